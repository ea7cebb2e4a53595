"""The mixture of kinds that the small model learns from, as text: word problems, functions, GSM8K."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from benchmarks.small_model import functions, gsm8k, word_problems
from benchmarks.small_model.dialogue import Example, Item, chat_example, from_function, from_question, raw_example


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Shares of the kinds (any positive scale) and the share of examples in the raw form."""

    word_problems: float
    functions: float
    gsm8k: float
    raw: float

    def __post_init__(self) -> None:
        weights = (self.word_problems, self.functions, self.gsm8k)
        if min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"{self=}: the shares must be at least 0 and not all 0")
        if not 0 <= self.raw <= 1:
            raise ValueError(f"{self.raw=} must be in [0, 1]")


ZERO_SHOT = Mixture(word_problems=0.6, functions=0.3, gsm8k=0.1, raw=0.2)
FEW_SHOT = Mixture(word_problems=0.6, functions=0.2, gsm8k=0.2, raw=0.5)


class _Kind(NamedTuple):
    weight: float
    make: Callable[[Random], Item]
    characters_per_token: float


class Writer:
    """Draws examples of a mixture; GSM8K is left out, with a message, where its file is absent."""

    def __init__(self, mixture: Mixture):
        self._raw = mixture.raw
        self._kinds = [
            _Kind(mixture.word_problems, _word_problem, 2.75),
            _Kind(mixture.functions, _function, 3.5),
        ]
        if mixture.gsm8k:
            try:
                pairs = gsm8k.load()
                self._kinds.append(_Kind(mixture.gsm8k, lambda random: from_question(*_one_of(pairs, random)), 2.85))
            except FileNotFoundError as error:
                print(f"left out of the mixture: {error}", file=sys.stderr)
        self._total = sum(kind.weight for kind in self._kinds)

    def example(self, random: Random, tokens: int = 0) -> Example:
        """An example of a drawn kind, with shots of the same kind up to about so many `tokens`."""
        kind = self._kind(random)
        make, characters = kind.make, tokens * kind.characters_per_token
        item = make(random)
        shots: list[Item] = []
        size = len(item.question) + len(item.answer)
        while size < characters:
            shot = make(random)
            size += len(shot.opening) + len(shot.continuation) + 2
            if size < characters:
                shots.append(shot)
        form = raw_example if random.random() < self._raw else chat_example
        return form(item, shots)

    def _kind(self, random: Random) -> _Kind:
        point = random.random() * self._total
        for kind in self._kinds:
            point -= kind.weight
            if point < 0:
                return kind
        return self._kinds[0]


def _one_of(pairs: Sequence[tuple[str, str]], random: Random) -> tuple[str, str]:
    return pairs[int(random.random() * len(pairs))]


def _word_problem(random: Random) -> Item:
    problem = word_problems.draw(random)
    return from_question(problem.question, problem.answer)


def _function(random: Random) -> Item:
    return from_function(functions.draw(random, with_tests=False))
