"""A table of the paper, as data: its cells, and how it is printed and drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.paper.methods import variant
from benchmarks.paper.suites import Suite
from fdllm_jax.comparison import Variant

if TYPE_CHECKING:
    from fdllm_jax.job import Result

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting: a task, decoded in one way.

    shots: worked examples before each prompt, where they are others than the task's own.
    sweep: what is varied, in a table that varies more than one thing.
    """

    suite: Suite
    variant: Variant
    shots: int | None = None
    sweep: str | None = None

    @property
    def case(self) -> dict[str, Any]:
        """What the results say of it beside its settings."""
        shots = self.suite.task.shots if self.shots is None else self.shots
        case = {"task": self.suite.name, "synthetic": self.suite.is_synthetic, "shots": shots}
        return case if self.sweep is None else case | {"sweep": self.sweep}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What of a table is asked for: tasks, names of methods, and response lengths in place of the table's."""

    suites: Sequence[Suite]
    methods: Sequence[str]
    gen_lengths: Sequence[int] = ()


def cross(
    asked: Asked,
    *,
    lengths: Callable[[Suite], Sequence[int]] = lambda suite: (suite.gen_length,),
    options: Sequence[Mapping[str, Any]] = ({},),
    shots: int | None = None,
    sweep: str | None = None,
) -> list[Cell]:
    """A cell for each task, length, method and set of options. Raises ValueError for settings that cannot be."""
    return [
        Cell(suite=suite, variant=variant(suite, name, length, **its), shots=shots, sweep=sweep)
        for suite in asked.suites
        for length in asked.gen_lengths or lengths(suite)
        for name in asked.methods
        for its in options
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A picture of one metric: y, and x, a metric or a part of the case.

    sweep: of which cells. note: a part of the case that is written at each point.
    """

    x: str
    y: str
    sweep: str | None = None
    note: str | None = None


def no_details(case: Mapping[str, Any], results: "Sequence[Result]") -> Rows:
    """The details of a table that has none."""
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table or figure of the paper.

    cells: its settings. methods: the names it has by default. all_tasks: whether it has every task, or the first.
    batches: sequences decoded side by side. seeds: samples of the items, where their spread is the table's matter.
    limit: items by default. by: parts of the case that tell its lines apart. metrics: its columns.
    panels: its plot, once for each value of `each`; lines: the part of the case that a line is of.
    details: further rows from a cell's results.
    """

    name: str
    title: str
    cells: Callable[[Asked], list[Cell]]
    methods: tuple[str, ...]
    by: tuple[str, ...]
    metrics: tuple[str, ...]
    panels: tuple[Panel, ...]
    lines: str = "name"
    each: tuple[str, ...] = ("task", "gen_length", "batch")
    all_tasks: bool = False
    batches: tuple[int, ...] = (32,)
    seeds: int | None = None
    limit: int | None = None
    details: Callable[[Mapping[str, Any], "Sequence[Result]"], Rows] = no_details
