"""Items as text for the model: a prompt, in chat form or raw, with or without shots, and the answer that follows it.

The prompt and the answer are encoded separately, as they are when the model is used; `<|endoftext|>` ends the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.small_model.functions import FunctionProblem

BOS, EOS, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
START_HEADER, END_HEADER, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A task in both forms: `question` and `answer` for a chat; `opening` and `continuation` as plain text."""

    question: str
    answer: str
    opening: str
    continuation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What the model is given and what it is to write, `<|endoftext|>` not included."""

    prompt: str
    answer: str


def from_question(question: str, answer: str) -> Item:
    """An item of a question and its answer."""
    return Item(question=question, answer=answer, opening=f"Question: {question}\nAnswer:", continuation=f" {answer}")


def from_function(problem: FunctionProblem) -> Item:
    """An item of a function: the whole function in a chat, the body after the header in the raw form."""
    return Item(question=problem.question, answer=problem.answer, opening=problem.header, continuation=problem.body)


def chat(content: str) -> str:
    """LLaDA's chat form of one user message, up to where the assistant's answer starts."""
    user = f"{START_HEADER}user{END_HEADER}\n\n{content.strip()}{EOT}"
    return f"{BOS}{user}{START_HEADER}assistant{END_HEADER}\n\n"


def raw_example(item: Item, shots: Sequence[Item] = ()) -> Example:
    """Plain text: the shots, each followed by an empty line, then the item's opening."""
    before = "".join(f"{shot.opening}{shot.continuation}\n\n" for shot in shots)
    return Example(prompt=f"{before}{item.opening}", answer=item.continuation)


def chat_example(item: Item, shots: Sequence[Item] = ()) -> Example:
    """Chat form; shots are part of the user's message, as plain text."""
    if not shots:
        return Example(prompt=chat(item.question), answer=item.answer)
    raw = raw_example(item, shots)
    return Example(prompt=chat(raw.prompt), answer=raw.answer.lstrip(" ") if item.opening.endswith(":") else raw.answer)
