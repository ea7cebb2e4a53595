"""The project's own tasks, word problems and functions, from the lines that `benchmarks.small_model` prints."""

from pathlib import Path

from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.data import find, read, text_of
from fdllm_jax.evaluation.task import Item, Task
from fdllm_jax.tasks import extract_answer, parse_tasks

_GEN_LENGTH = 160


def load_word_problems(data: Path) -> list[Item]:
    """The lines of `python -m benchmarks.small_model.word_problems N`, or others that `parse_tasks` reads."""
    path = find(data, ("word_problems.jsonl",))
    text = text_of(path)
    try:
        problems = parse_tasks(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return [Item(key=str(i), prompt=p.question, document={"gold": p.gold}) for i, p in enumerate(problems)]


def score_number(item: Item, text: str) -> dict[str, float]:
    """Whether the number after the last `####` is the gold one."""
    return {"exact_match": float(extract_answer(text) == item.document["gold"])}


def load_functions(data: Path) -> list[Item]:
    """The lines of `python -m benchmarks.small_model.functions N`: a question, and tests, one assertion a line."""
    rows = read(find(data, ("functions.jsonl",)), {"question": str, "tests": str})
    return [Item(key=str(i), prompt=row["question"], document={"tests": row["tests"]}) for i, row in enumerate(rows)]


def score_function(item: Item, text: str) -> dict[str, float]:
    """Whether the text, as code, passes the tests."""
    return {"pass@1": float(sandbox.passes(text, item.document["tests"]))}


WORD_PROBLEMS = Task(
    name="word_problems",
    load=load_word_problems,
    score=score_number,
    metrics=("exact_match",),
    shots=0,
    stop=(),
    gen_length=_GEN_LENGTH,
    chat_template=True,
    source="benchmarks.small_model.word_problems",
)
FUNCTIONS = Task(
    name="functions",
    load=load_functions,
    score=score_function,
    metrics=("pass@1",),
    shots=0,
    stop=(),
    gen_length=_GEN_LENGTH,
    chat_template=True,
    source="benchmarks.small_model.functions",
    runs_code=True,
)
