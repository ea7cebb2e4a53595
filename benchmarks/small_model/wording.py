"""Wording of word problems: alternatives in text, people and things, and the phrasings of a worked step.

Text is written with alternatives in brackets, `"Tom [has|owns] 3 pens[| at home]"`, equally likely; they may nest.
A worked step always shows its expression with the operands before the result, `7 + 12 = 19`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from benchmarks.small_model.tables import WORDS

T = TypeVar("T")

NAMES = [(name, pronoun) for pronoun in ("she", "he") for name in WORDS[pronoun]]

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r"(?:^|[.?!] )[a-z]")
_UNIT = re.compile(r"@ (?:more )?((?:square )?\w+)")
_DOING = {
    "+": "[adding {b} to {a}|{a} plus {b}|the sum of {a} and {b}]",
    "-": "[taking {b} from {a}|{a} minus {b}|the difference of {a} and {b}]",
    "*": "[multiplying {a} by {b}|{a} times {b}|the product of {a} and {b}]",
    "/": "[dividing {a} by {b}|{a} divided by {b}|the quotient of {a} and {b}]",
}
_LEADS = {"first": "[|first, |]", "middle": "[|then |next, ]", "last": "[|finally, |so ]"}
_FORMS = (
    "{lead}{clause_shown}.",
    "{shown}[, so|, which means|. That means] {clause}.",
    "[since|as|because] {shown}, {clause}.",
    "{label} [is|equals|comes to] {shown}{unit}.",
    "{doing} [gives|makes|is] {shown}{unit}.",
    "[to find|to get|for] {label}, [compute|we need|take] {shown}{unit}.",
    "what is {label}? [It is|That is|We get] {shown}{unit}.",
    "{label}: {shown}{unit}.",
    "[we know|we see|note] that {clause_shown}.",
)
MANNERS = 3
"""A manner picks the alternatives of an answer and leaves out every third form: 6 forms for each step."""

_BEFORE = (
    "[it is a [sunny|rainy|cold|windy|quiet|busy] [day|morning|evening|weekend].|"
    "here is a [short|small|new] [problem|question].|"
    "please [solve this|answer the question|help with this].|[consider|think about] this.]"
)
_AFTER = "[show your work.|explain each step.|think step by step.|write down the steps.|give the steps and the answer.]"


class OutOfRange(Exception):
    """A step's result is negative or above 999: the story is to be drawn again."""


@dataclass(frozen=True, slots=True)
class Person:
    """A name with its pronouns."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of an answer and the words for its result."""

    a: int
    operation: str
    b: int
    result: int
    label: str
    clause: str

    @property
    def shown(self) -> str:
        """The expression, operands before the result."""
        return f"{self.a} {self.operation} {self.b} = {self.result}"


def expand(text: str, random: Random) -> str:
    """`text` with every bracketed group of alternatives replaced by a random one of them, innermost first."""
    while "[" in text:
        text = _ALTERNATIVES.sub(lambda group: _one_of(group[1].split("|"), random), text)
    return text


def in_manner(text: str, manner: int) -> str:
    """`text` with the `manner`-th of the alternatives of every group, counted around."""
    while "[" in text:
        text = _ALTERNATIVES.sub(lambda group: (options := group[1].split("|"))[manner % len(options)], text)
    return text


def _one_of(options: Sequence[str], random: Random) -> str:
    return options[int(random.random() * len(options))]


def sentence(text: str) -> str:
    """`text` with the first letter of each sentence in upper case."""
    return _SENTENCE_START.sub(lambda start: start[0].upper(), text)


def calculate(a: int, operation: str, b: int) -> int:
    """`a operation b`; a division must be exact."""
    if operation == "+":
        return a + b
    if operation == "-":
        return a - b
    if operation == "*":
        return a * b
    assert a % b == 0, f"{a=} is not divisible by {b=}"
    return a // b


def phrase(step: Step, lead: str, manner: int, random: Random) -> str:
    """A sentence that works a step, in one of several forms; `lead` may come first."""
    unit = _UNIT.search(step.clause)
    forms = [form for index, form in enumerate(_FORMS) if (index + manner) % MANNERS]
    text = _one_of(forms, random).replace("{lead}", lead)
    for name, part in (
        ("{doing}", _DOING[step.operation].replace("{a}", str(step.a)).replace("{b}", str(step.b))),
        ("{label}", step.label),
        ("{clause_shown}", step.clause.replace("@", step.shown)),
        ("{clause}", step.clause.replace("@", str(step.result))),
        ("{shown}", step.shown),
        ("{unit}", f" {unit[1]}" if unit else ""),
    ):
        text = text.replace(name, part)
    return sentence(in_manner(text, manner))


class Story:
    """A word problem being written: what the question says and the steps of the answer."""

    def __init__(self, random: Random, steps: int):
        self.random = random
        self.steps = steps
        self.told: list[str] = []
        self._worked: list[Step] = []
        self._taken: set[str] = set()

    @property
    def left(self) -> int:
        """Steps still to be written."""
        return self.steps - len(self._worked)

    @property
    def value(self) -> int:
        """The result of the latest step."""
        return self._worked[-1].result

    def number(self, low: int, high: int) -> int:
        """A uniform integer of [low, high]."""
        return low + int(self.random.random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[int(self.random.random() * len(options))]

    def person(self) -> Person:
        """Somebody new to this story."""
        name, he = self._new(NAMES, key=0)
        return Person(name, he, "her" if he == "she" else "his", "her" if he == "she" else "him")

    def things(self, among: Sequence[str] = WORDS["things"]) -> str:
        """A plural noun new to this story."""
        return self._new(among)

    def _new(self, options, key=None):
        while True:
            option = self.pick(options)
            name = option if key is None else option[key]
            if name not in self._taken:
                self._taken.add(name)
                return option

    def divisor(self, number: int, low: int = 2, high: int = 10) -> int:
        """A divisor of `number` in [low, high], or 0 where there is none."""
        divisors = [d for d in range(low, min(high, number) + 1) if number % d == 0]
        return self.pick(divisors) if divisors else 0

    def tell(self, text: str) -> None:
        """Adds a sentence to the question."""
        self.told.append(sentence(expand(text, self.random)))

    def step(self, a: int, operation: str, b: int, label: str, clause: str) -> int:
        """Adds a worked step; returns its result.

        `label` is a noun phrase for the result; `clause` is a clause with `@` for it and then what it counts.

        Raises:
            OutOfRange: the result is not in [0, 999].
        """
        result = calculate(a, operation, b)
        if not 0 <= result < 1000:
            raise OutOfRange(f"{a} {operation} {b} = {result}")
        self._worked.append(Step(a=a, operation=operation, b=b, result=result, label=label, clause=clause))
        return result

    def answer(self) -> str:
        """The worked steps, all in one manner that is drawn here, and the line `#### result`."""
        manner = int(self.random.random() * MANNERS)
        last = len(self._worked) - 1
        leads = [_LEADS["last" if index == last else "middle" if index else "first"] for index in range(last + 1)]
        lines = [phrase(step, lead, manner, self.random) for step, lead in zip(self._worked, leads, strict=True)]
        return "\n".join([*lines, f"#### {self.value}"])

    def question(self) -> str:
        """The told sentences as one paragraph, sometimes with a sentence before or after that says nothing."""
        random = self.random
        before = [sentence(expand(_BEFORE, random))] if random.random() < 0.15 else []
        after = [sentence(expand(_AFTER, random))] if random.random() < 0.1 else []
        return " ".join([*before, *self.told, *after])
