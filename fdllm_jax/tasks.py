"""Questions with gold answers: numbers that a response gives after `####`, as in GSM8K."""

import json
import re
from dataclasses import dataclass
from typing import Any

_MARKED = re.compile(r"####\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question, and the number that answers it, as `extract_answer` writes numbers."""

    question: str
    gold: str


# Held-out problems of the kind that the small model knows.
EXAMPLES = (
    Task(
        question="Sara bakes 7 trays of cupcakes. There are 8 cupcakes on each tray. Her family eats 50 of them. How "
        "many cupcakes does Sara have left?",
        gold="6",
    ),
    Task(
        question="Ada borrows $135 from Paula and returns $23 a week for 5 weeks. She pays the rest in 2 equal parts. "
        "How much is one part?",
        gold="10",
    ),
    Task(
        question="Felix takes 4 melons and 6 pens. Each melon costs $20 and each pen costs $12. How much does Felix "
        "pay in total?",
        gold="152",
    ),
    Task(
        question="A store has 9 shelves of 37 records. 28 records are sold. 7 more records are bought. 9 more records "
        "are bought. How many records does the store have then?",
        gold="321",
    ),
    Task(
        question="Tom makes 8 loaves, and each takes 12 spoons of flour. He also needs 6 spoons for a drink. He has "
        "just 16 spoons. One spoon costs 6 cents. How many cents does the rest cost?",
        gold="516",
    ),
    Task(
        question="Karl is twice as old as Ben, who is 20. Ines is 14 years older than both together. How old is Ines?",
        gold="74",
    ),
    Task(
        question="Sofia needs 22 minutes for each of 4 letters. She also takes a break of 34 minutes. Cleaning up "
        "takes 4 minutes more. She has 179 minutes. How many minutes are left in the end?",
        gold="53",
    ),
    Task(
        question="Elena has 237 inches of ribbon and cuts off 10 pieces of 18 inches each. Then she cuts what is left "
        "into 3 equal parts and takes one. How many inches does Elena have in the end?",
        gold="19",
    ),
)


def extract_answer(text: str) -> str | None:
    """The number after the last `####`, without thousands separators or trailing `.0`; None where there is none."""
    found = _MARKED.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return number if number not in ("", "-", "-0") else "0"


def parse_tasks(lines: str) -> list[Task]:
    """Tasks of JSON lines with `question` and `answer`: the number after the answer's `####`, or the whole answer.

    Blank lines are left out. Raises ValueError that names the lines at fault.
    """
    tasks, faults = [], []
    for number, line in enumerate(lines.split("\n"), 1):
        if line.strip():
            try:
                tasks.append(_task(parse_line(line)))
            except ValueError as error:
                faults.append(f"line {number}: {error}")
    if not tasks and not faults:
        raise ValueError("no task in it: expected JSON lines with a question and an answer")
    if faults:
        others = f"; and {len(faults) - 3} more" * (len(faults) > 3)
        raise ValueError("; ".join(faults[:3]) + others)
    return tasks


def parse_line(line: str | bytes) -> Any:
    """What a line of JSON says. Raises ValueError that says what is wrong with it."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a list in thousands of others
        raise ValueError(f"not JSON that can be read ({error})") from error


def _task(given: Any) -> Task:
    if not isinstance(given, dict) or not {"question", "answer"} <= given.keys():
        raise ValueError('expected {"question": ..., "answer": ...}')
    question, answer = given["question"], str(given["answer"])
    if not isinstance(question, str) or not question.strip():
        raise ValueError("the question is no text, or blank")
    gold = extract_answer(answer if "####" in answer else f"#### {answer}")
    if gold is None:
        raise ValueError(f"the answer {answer[-60:]!r} is not a number, and has none after ####")
    return Task(question=question, gold=gold)
