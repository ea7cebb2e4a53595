"""What every function family is made of: a draft, random arguments by parameter name, and varied variable names."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from benchmarks.small_model.tables import WORDS

SYNONYMS = {
    "numbers": ("numbers", "nums", "values", "lst", "items", "data", "xs"),
    "text": ("text", "s", "string", "sentence", "line"),
    "words": ("words", "strings", "names", "items", "tokens"),
    "counts": ("counts", "d", "data", "table", "scores"),
    "first": ("first", "a", "left", "xs"),
    "second": ("second", "b", "right", "ys"),
    "n": ("n", "number", "num", "x"),
    "x": ("x", "n", "value", "item", "num", "v", "y"),
    "ch": ("ch", "c", "char", "letter"),
    "word": ("word", "w", "item", "name"),
    "result": ("result", "res", "output", "out", "answer", "ans"),
    "total": ("total", "result", "acc", "s", "answer"),
    "count": ("count", "result", "cnt", "k"),
    "kept": ("kept", "selected", "values", "found", "chosen", "picked"),
    "best": ("best", "result", "top", "answer"),
    "i": ("i", "j", "k", "index"),
    "key": ("key", "k", "name"),
    "value": ("value", "v", "val"),
}
_WORD = re.compile(r"(?<![.\w])[A-Za-z_]+\b(?!=)")
_QUOTED = re.compile(r"(\"[^\"]*\")")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A function about to be written.

    `function` is what it means, `inputs` makes random arguments, `combination` names its parameters within the family.
    """

    name: str
    parameters: tuple[str, ...]
    docstring: str
    body: tuple[str, ...]
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    combination: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of function: writes drafts; `held_out` when it has combinations enough to hold some out."""

    write: Callable[[Random], Draft]
    held_out: bool


def _integer(random: Random, low: int, high: int) -> int:
    return low + int(random.random() * (high - low + 1))


def _one_of(random: Random, options):
    return options[int(random.random() * len(options))]


def _integers(random: Random) -> list[int]:
    return [_integer(random, -9, 30) for _ in range(_integer(random, 0, 7))]


def _some_integers(random: Random) -> list[int]:
    return [_integer(random, -9, 30) for _ in range(_integer(random, 1, 7))]


def _text(random: Random) -> str:
    words = [_one_of(random, WORDS["words"]) for _ in range(_integer(random, 1, 3))]
    words = [word.capitalize() if random.random() < 0.3 else word for word in words]
    return " ".join(words) + (str(_integer(random, 0, 99)) if random.random() < 0.3 else "")


ARGUMENTS: dict[str, Callable[[Random], Any]] = {
    "n": lambda random: _integer(random, 0, 30),
    "m": lambda random: _integer(random, 1, 12),
    "a": lambda random: _integer(random, -20, 40),
    "b": lambda random: _integer(random, -20, 40),
    "c": lambda random: _integer(random, -20, 40),
    "numbers": _integers,
    "some": _some_integers,
    "first": _integers,
    "second": _integers,
    "text": _text,
    "word": lambda random: _one_of(random, WORDS["words"]),
    "letter": lambda random: _one_of(random, "aeoirtbm"),
    "words": lambda random: [_one_of(random, WORDS["words"]) for _ in range(_integer(random, 0, 6))],
    "counts": lambda random: {
        _one_of(random, WORDS["words"]): _integer(random, -5, 30) for _ in range(_integer(random, 0, 5))
    },
}
"""Random arguments by the canonical name of a parameter; `some` is a `numbers` that is never empty."""


@lru_cache(maxsize=16384)
def meaning(parameters: tuple[str, ...], expression: str) -> Callable[..., Any]:
    """The function of `parameters` that an expression means."""
    return eval(f"lambda {', '.join(parameters)}: {expression}", {"__builtins__": __builtins__})


def draft(
    random: Random,
    *,
    names: str,
    parameters: tuple[str, ...],
    docstring: str,
    body: str,
    expression: str,
    combination: str,
) -> Draft:
    """A draft with varied names.

    `names` are the function's possible names; `docstring` has `@numbers` for a parameter; `body` has canonical names.
    """
    shown = tuple("numbers" if parameter == "some" else parameter for parameter in parameters)
    name = _one_of(random, names.split())
    taken = set(_WORD.findall(_QUOTED.sub("", body))) | set(shown) | {name}
    renamed: dict[str, str] = {}
    for word in [*shown, *sorted(taken - set(shown))]:
        if word in SYNONYMS:
            options = [option for option in SYNONYMS[word] if option == word or option not in taken]
            renamed[word] = _one_of(random, options)
            taken.add(renamed[word])

    def rename(match: re.Match[str]) -> str:
        return renamed.get(match[0], match[0])

    parts = _QUOTED.split(body)
    code = "".join(part if index % 2 else _WORD.sub(rename, part) for index, part in enumerate(parts))
    text = re.sub(r"@(\w+)", lambda match: renamed.get(match[1], match[1]), docstring)
    return Draft(
        name=name,
        parameters=tuple(renamed.get(parameter, parameter) for parameter in shown),
        docstring=text,
        body=tuple(code.split("\n")),
        function=meaning(shown, expression),
        inputs=lambda: tuple(ARGUMENTS[parameter](random) for parameter in parameters),
        combination=combination,
    )
