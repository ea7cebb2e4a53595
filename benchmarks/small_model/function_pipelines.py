"""Function families that select elements, change each and reduce them: a source, a filter, a map and a reduction.

The parts are read from `tables/pipelines.txt`, where `x` is the element, `<k>` and the like are the constants:
* filters: noun phrase with `<of>` for the source; condition; word for the function's name
* maps: "the squares of"; "square each"; expression; word for the name
* reductions: word for the name; "the sum of"; "return their sum"; an expression of the elements `<g>`; and a loop's
  start, update and end
"""

import re
from dataclasses import dataclass
from random import Random

from benchmarks.small_model.function_drafts import Draft, Family, draft
from benchmarks.small_model.tables import WORDS, read

_LOOP_ONLY = ("first", "last", "product")
_FROM_GENERATOR = ("sum", "sorted", "string", "joined")
"""Reductions whose call takes a bare generator expression."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which elements are taken."""

    noun: str
    condition: str
    word: str


@dataclass(frozen=True, slots=True)
class Map:
    """How an element is changed."""

    noun: str
    verb: str
    change: str
    word: str


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the elements become the result."""

    word: str
    noun: str
    verb: str
    call: str
    start: str
    update: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the elements come from; a loop over `iterate` has the variable `element`; `parts` names its tables."""

    parameter: str
    where: str
    iterate: str
    element: str
    parts: str


SOURCES = {
    "numbers": Source(
        parameter="numbers",
        where="[in @numbers|of the list @numbers|in the list]",
        iterate="numbers",
        element="x",
        parts="number",
    ),
    "range": Source(
        parameter="n",
        where="from 1 to @n[|, inclusive]",
        iterate="range(1, n + 1)",
        element="i",
        parts="number",
    ),
    "characters": Source(
        parameter="text",
        where="[in @text|of the string @text|in the string]",
        iterate="text",
        element="ch",
        parts="character",
    ),
    "words": Source(
        parameter="words",
        where="[in @words|of the list @words|in the list]",
        iterate="words",
        element="word",
        parts="word",
    ),
    "sentence": Source(
        parameter="text",
        where="[in @text|of the string @text|in the string]",
        iterate="text.split()",
        element="word",
        parts="word",
    ),
}
_X = re.compile(r"\bx\b")


def _read_parts() -> dict[str, list[list[str]]]:
    parts: dict[str, list[list[str]]] = {}
    for block in read("pipelines.txt").split("\n\n"):
        lines = [line for line in block.strip().split("\n") if not line.startswith("#")]
        if lines:
            rows = [["" if field == "-" else field for field in line.split(" ; ")] for line in lines[1:]]
            parts[lines[0].strip("[]")] = rows
    return parts


_PARTS = _read_parts()
_FILTERS = {kind: [Filter(*row) for row in _PARTS[f"{kind} filters"]] for kind in ("number", "character", "word")}
_MAPS = {kind: [Map(*row) for row in _PARTS[f"{kind} maps"]] for kind in _FILTERS}
_REDUCTIONS = {kind: [Reduction(*row) for row in _PARTS[f"{kind} reductions"]] for kind in _FILTERS}
_PLAIN = Map("", "", "x", "")


def _constants(random: Random) -> dict[str, str]:
    def number(low: int, high: int) -> str:
        return str(low + int(random.random() * (high - low + 1)))

    c, f = random.sample(WORDS["letters"], 2)
    return {
        "<k>": number(-3, 20),
        "<d>": number(2, 9),
        "<e>": number(0, 9),
        "<m>": number(2, 9),
        "<w>": number(2, 7),
        "<c>": c,
        "<f>": f,
        "<j>": "-,+_*/"[int(random.random() * 6)],
    }


def _docstring(random: Random, elements: str, change: Map, reduction: Reduction) -> str:
    if random.random() < 0.6 or not change.verb:
        whose = " ".join(part for part in (reduction.noun, change.noun, elements) if part)
        return f"[Return|Compute|Find|Give|Get] {whose}."
    return f"[Take|Select|Keep] {elements}, {change.verb} and {reduction.verb}."


def _body(random: Random, source: Source, reduction: Reduction, chosen: Filter, change: Map) -> str:
    """The code in one of three styles: a list and an expression, one expression, or a loop."""
    element = source.element
    changed, condition, call = (_X.sub(element, part) for part in (change.change, chosen.condition, reduction.call))
    loop = f"for {element} in {source.iterate}"
    test = f" if {condition}" if condition else ""
    style = random.random()
    if style < 0.25 and reduction.word not in _LOOP_ONLY:
        return f"kept = [{changed} {loop}{test}]\nreturn {call.replace('<g>', 'kept')}"
    if style < 0.6 and reduction.word not in _LOOP_ONLY:
        if reduction.word == "length":
            return f"return sum(len({changed}) {loop}{test})"
        generator = f"{changed} {loop}{test}"
        bare = reduction.word in _FROM_GENERATOR and not call.endswith("[::-1]")
        elements = generator if bare else f"({generator})" if "default" in call else f"[{generator}]"
        return f"return {call.replace('<g>', elements)}"
    update = _X.sub(lambda _: changed, reduction.update)
    start = [reduction.start] if reduction.start else []
    inner = [f"    if {condition}:", f"        {update}"] if condition else [f"    {update}"]
    return "\n".join([*start, f"{loop}:", *inner, reduction.end])


def _write(random: Random, source: Source, reduction: Reduction) -> Draft:
    filters, maps = _FILTERS[source.parts], _MAPS[source.parts]
    chosen = filters[int(random.random() * len(filters))]
    change = _PLAIN if reduction.word == "count" else maps[int(random.random() * len(maps))]
    comprehension = f"{change.change} for x in {source.iterate}{f' if {chosen.condition}' if chosen.condition else ''}"
    docstring = _docstring(random, chosen.noun.replace("<of>", source.where), change, reduction)
    body = _body(random, source, reduction, chosen, change)
    expression = reduction.call.replace("<g>", f"[{comprehension}]")
    used = f"{chosen.condition} {change.change} {reduction.call}"
    constants = {name: value for name, value in _constants(random).items() if name in used}
    for name, value in constants.items():
        docstring, body, expression = (part.replace(name, value) for part in (docstring, body, expression))
    described = "_".join(part for part in (reduction.word, change.word, chosen.word) if part)
    return draft(
        random,
        names=described if random.random() < 0.5 else " ".join(WORDS["verbs"]),
        parameters=(source.parameter,),
        docstring=docstring,
        body=body,
        expression=expression,
        combination=" ".join((chosen.condition, change.change, *constants.values())),
    )


def _family(source: Source, reduction: Reduction) -> Family:
    return Family(write=lambda random: _write(random, source, reduction), held_out=True)


def families() -> dict[str, Family]:
    """A family for every source and reduction."""
    return {
        f"{name}_{reduction.word}": _family(source, reduction)
        for name, source in SOURCES.items()
        for reduction in _REDUCTIONS[source.parts]
    }
