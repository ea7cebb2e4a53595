"""Short Python functions from a docstring, from a seed, with tests.

A function belongs to a family and has constants; together they are its combination. Whether a combination is in the
test split is decided by its CRC, so a test combination never occurs in training. Families with few combinations are in
training only. `python -m benchmarks.small_model.functions 200` prints held-out ones as JSON lines.
"""

import json
import sys
import zlib
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.small_model.function_drafts import Draft
from benchmarks.small_model.function_families import FAMILIES
from benchmarks.small_model.wording import expand

SPLITS = ("train", "test")
TEST_SHARE = 12
"""One combination in so many belongs to the test split."""

INSTRUCTIONS = (
    "[Complete|Write|Finish|Implement|Fill in] [this|the|the following] [Python function|function]:|"
    "[Write|Give|Show] the [body|code] of this [Python function|function].|"
    "[Please complete|Please write|Can you write|I need] [this|the following] function[| in Python]:|"
    "[Solve this with|Write] [Python code|a Python function]:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionProblem:
    """A function to write.

    `header` is the line `def ...:` and the docstring, `body` what follows; `question` is an instruction and the header,
    `answer` the function without its docstring. `tests` are assertions, one a line.
    """

    question: str
    answer: str
    header: str
    body: str
    tests: str
    entry_point: str
    family: str
    combination: str


def split_of(family: str, combination: str) -> str:
    """The split to which a combination belongs."""
    held_out = FAMILIES[family].held_out and zlib.crc32(combination.encode()) % TEST_SHARE == 0
    return "test" if held_out else "train"


def make(seed: int, split: str = "train") -> FunctionProblem:
    """The function of a seed: a pure function of `(seed, split)`."""
    if split not in SPLITS:
        raise ValueError(f"{split=} is unknown: give one of {', '.join(SPLITS)}")
    return draw(Random(f"function {split} {seed}"), split)


def draw(random: Random, split: str = "train", *, with_tests: bool = True) -> FunctionProblem:
    """A function of a split, drawn with `random`; without tests it is faster."""
    names = _NAMES[split]
    while True:
        name = names[int(random.random() * len(names))]
        draft = FAMILIES[name].write(random)
        combination = f"{name} {draft.combination}"
        if split_of(name, combination) == split:
            return _finish(name, combination, draft, random, with_tests)


_NAMES = {
    "train": [name for name in FAMILIES],
    "test": [name for name, family in FAMILIES.items() if family.held_out],
}


def _finish(family: str, combination: str, draft: Draft, random: Random, with_tests: bool) -> FunctionProblem:
    signature = f"def {draft.name}({', '.join(draft.parameters)}):"
    text = expand(draft.docstring, random)
    text = text[:1].upper() + text[1:]
    example = _example(draft) if random.random() < 0.5 else ""
    header = f'{signature}\n    """{text}{example}"""\n'
    body = "\n".join(f"    {line}" for line in draft.body)
    instruction = expand(f"[{INSTRUCTIONS}]", random)
    return FunctionProblem(
        question=f"{instruction}\n\n{header}",
        answer=f"{signature}\n{body}",
        header=header,
        body=body,
        tests=_tests(draft) if with_tests else "",
        entry_point=draft.name,
        family=family,
        combination=combination,
    )


def _call(name: str, arguments: tuple[Any, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _example(draft: Draft) -> str:
    """A call and its result for the docstring; nothing where they are long."""
    arguments = draft.inputs()
    call, result = _call(draft.name, arguments), repr(draft.function(*arguments))
    return f"\n\n    >>> {call}\n    {result}\n    " if len(call) + len(result) < 120 else ""


def _tests(draft: Draft, count: int = 8) -> str:
    """Assertions on `count` random inputs; what they expect comes from the family's meaning, not from the body."""
    calls = (draft.inputs() for _ in range(count))
    return "\n".join(f"assert {_call(draft.name, arguments)} == {draft.function(*arguments)!r}" for arguments in calls)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        problem = make(seed, split="test")
        print(json.dumps({"question": problem.question, "tests": problem.tests}))
