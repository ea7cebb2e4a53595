"""Function families that are written one by one, read from `tables/functions.txt`, and all families together.

An entry of the table is its name and parameters, the function's possible names, the docstring, the values of its
constants (`<k> 2..99`, or names of word lists), and bodies after `---`. The first body is `return EXPRESSION`: the
family's meaning, from which the tests are made. The others are other ways to write it, in the canonical variable names
of `function_drafts.py`.
"""

import math
from dataclasses import dataclass
from random import Random

from benchmarks.small_model import function_pipelines
from benchmarks.small_model.function_drafts import Draft, Family, draft
from benchmarks.small_model.tables import WORDS, read

HELD_OUT_FROM = 28
"""Families with at least so many combinations have held-out ones."""

_MEANING_ONLY = ("factorial", "fibonacci", "gcd")
"""Families whose meaning is no way to write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A family of the table."""

    names: str
    parameters: tuple[str, ...]
    docstring: str
    bodies: tuple[str, ...]
    constants: dict[str, tuple[str, ...]]

    @property
    def combinations(self) -> int:
        """How many choices of the constants there are."""
        return math.prod(len(values) for values in self.constants.values())


def _values(text: str) -> tuple[str, ...]:
    if ".." in text:
        low, high = text.split("..")
        return tuple(str(number) for number in range(int(low), int(high) + 1))
    return tuple(value for name in text.split() for value in WORDS[name])


def read_table(text: str) -> dict[str, Entry]:
    """The entries of a table by family name."""
    entries = {}
    for block in text.strip().split("\n\n"):
        head, *bodies = block.split("\n---\n")
        signature, names, docstring, *constants = head.split("\n")
        name, parameters = signature.removesuffix(")").split("(")
        entries[name] = Entry(
            names=names.removeprefix("names: "),
            parameters=tuple(parameters.split(", ")),
            docstring=docstring.removeprefix("doc: "),
            bodies=tuple(bodies),
            constants={constant: _values(text) for constant, text in (line.split(" ", 1) for line in constants)},
        )
    return entries


def _write(random: Random, name: str, entry: Entry) -> Draft:
    bodies = entry.bodies[1:] if name in _MEANING_ONLY else entry.bodies
    body = bodies[int(random.random() * len(bodies))]
    parts = [entry.names, entry.docstring, body, entry.bodies[0].removeprefix("return ")]
    chosen = {constant: values[int(random.random() * len(values))] for constant, values in entry.constants.items()}
    for constant, value in chosen.items():
        parts = [part.replace(constant, value) for part in parts]
    names, docstring, body, expression = parts
    return draft(
        random,
        names=names,
        parameters=entry.parameters,
        docstring=docstring,
        body=body,
        expression=expression,
        combination=" ".join(chosen.values()),
    )


def _family(name: str, entry: Entry) -> Family:
    return Family(write=lambda random: _write(random, name, entry), held_out=entry.combinations >= HELD_OUT_FROM)


FAMILIES: dict[str, Family] = {
    **{name: _family(name, entry) for name, entry in read_table(read("functions.txt")).items()},
    **function_pipelines.families(),
}
"""All families by name."""
