"""What is decoded: the paper's benchmarks from local files, and the synthetic tasks that the small checkpoint knows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from benchmarks.small_model import functions, word_problems
from benchmarks.small_model.dialogue import Item as Worked
from benchmarks.small_model.dialogue import from_function, from_question, raw_example
from fdllm_jax.evaluation.task import Item, Task
from fdllm_jax.evaluation.tasks import TASKS

MADE = 256  # items of a synthetic task where no number is asked for
_SHOT = "Question: "  # begins each of GSM8K's


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A task with its settings.

    preset: its settings of flash-dllm. block_length: of the methods that decode block by block.
    gen_lengths: of Table 5, the middle two also of Table 1; gen_length: of the others.
    make: a number of items, without data; None for a task that is read from data.
    with_shots: the items with another number of worked examples before each; None where there is no way to make them.
    """

    task: Task
    preset: str
    gen_lengths: tuple[int, int, int, int]
    gen_length: int
    block_length: int
    make: Callable[[int], list[Item]] | None = None
    with_shots: Callable[[Sequence[Item], int], list[Item]] | None = None

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def is_synthetic(self) -> bool:
        """Whether its items are made by this project."""
        return self.make is not None

    def items(self, data: Path | None, count: int | None) -> list[Item]:
        """The items; of a synthetic task `count`. Raises ValueError and FileNotFoundError where there are none."""
        if self.make is not None:
            return self.make(count or MADE)
        if data is None:
            raise ValueError(f"task {self.name} is read from local files: give their folder as --data")
        return self.task.load(data)


def sample(items: Sequence[Item], count: int | None, seed: int | None) -> list[Item]:
    """The first `count` items; with a seed, as many drawn with it. Raises ValueError where that would be all."""
    if seed is None:
        return list(items[:count])
    if count is None or count >= len(items):
        raise ValueError(
            f"{len(items)} items and samples of {count or 'all'}: each seed would draw the same ones; give a smaller "
            "--limit"
        )
    return Random(f"sample {seed}").sample(items, count)


def _word_problem(seed: int, split: str) -> Worked:
    problem = word_problems.make(seed, split=split)
    return from_question(problem.question, problem.answer)


def _function(seed: int, split: str) -> Worked:
    return from_function(functions.make(seed, split=split))


def _word_problems(count: int) -> list[Item]:
    made = (word_problems.make(i, split="test") for i in range(count))
    return [Item(key=str(i), prompt=p.question, document={"gold": str(p.gold)}) for i, p in enumerate(made)]


def _functions(count: int) -> list[Item]:
    made = (functions.make(i, split="test") for i in range(count))
    return [Item(key=str(i), prompt=p.question, document={"tests": p.tests}) for i, p in enumerate(made)]


def _own_with_shots(worked: Callable[[int, str], Worked]) -> Callable[[Sequence[Item], int], list[Item]]:
    """Examples of the training split in plain text, as the small checkpoint has seen them before a question."""

    def with_shots(items: Sequence[Item], shots: int) -> list[Item]:
        if not shots:
            return list(items)
        prompts = []
        for item in items:
            seed = int(item.key)
            examples = [worked(seed * shots + k, "train") for k in range(shots)]
            prompts.append(raw_example(worked(seed, "test"), examples).prompt)
        return _with_prompts(items, prompts)

    return with_shots


def _gsm8k_with_shots(items: Sequence[Item], shots: int) -> list[Item]:
    """The prompts' own shots; more than an item has are taken from the items after it."""
    parts = [[f"{_SHOT}{part}" for part in f"\n\n{item.prompt}".split(f"\n\n{_SHOT}")[1:]] for item in items]
    each = len(parts[0]) - 1
    if shots > each * len(items):
        raise ValueError(f"{len(items)} items have {each * len(items)} shots, not {shots}: give a larger --limit")
    prompts = []
    for i, (*_, question) in enumerate(parts):
        others = [shot for k in range(-(-shots // each)) for shot in parts[(i + k) % len(parts)][:-1]]
        prompts.append("\n\n".join([*others[:shots], question]))
    return _with_prompts(items, prompts)


def _with_prompts(items: Sequence[Item], prompts: Sequence[str]) -> list[Item]:
    return [Item(key=i.key, prompt=p, document=i.document) for i, p in zip(items, prompts, strict=True)]


_REAL: dict[str, Any] = {"gen_lengths": (128, 256, 512, 1024), "gen_length": 512, "block_length": 32}
_OWN: dict[str, Any] = {"gen_lengths": (80, 160, 320, 640), "gen_length": 160, "block_length": 16}
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        suite.name: suite
        for suite in (
            Suite(task=TASKS["gsm8k"], preset="gsm8k", with_shots=_gsm8k_with_shots, **_REAL),
            Suite(task=TASKS["math"], preset="math", **_REAL),
            Suite(task=TASKS["humaneval"], preset="humaneval", **_REAL),
            Suite(task=TASKS["mbpp"], preset="mbpp", **_REAL),
            Suite(
                task=TASKS["word_problems"], preset="gsm8k", make=_word_problems,
                with_shots=_own_with_shots(_word_problem), **_OWN,
            ),
            Suite(
                task=TASKS["functions"], preset="humaneval", make=_functions, with_shots=_own_with_shots(_function),
                **_OWN,
            ),
        )
    }
)  # fmt: skip
PAPERS = tuple(name for name, suite in SUITES.items() if not suite.is_synthetic)
OWN = tuple(name for name, suite in SUITES.items() if suite.is_synthetic)
