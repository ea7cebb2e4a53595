"""A table's rows as text."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.paper.grid import Rows, Table
from benchmarks.paper.published import SOURCE

Figure = Mapping[str, Any]


def _share(figure: Figure) -> str:
    return f"{figure['median']:.1%} ({figure['low']:.1%} to {figure['high']:.1%})"


def _speed(figure: Figure) -> str:
    digits = 0 if figure["median"] >= 1000 else 1
    median, low, high = (f"{figure[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return median if figure["repeats"] == 1 else f"{median} ({low} to {high})"


def _tokens(figure: Figure) -> str:
    return f"{figure['median']:.2f}"


def _memory(figure: Figure) -> str:
    return _bytes(figure["median"])


def _bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


# Per metric: its heading, a figure as text, and the paper's figure.
COLUMNS: Mapping[str, tuple[str, Callable[[Figure], str], Callable[[float], str]]] = {
    "accuracy": ("accuracy", _share, "{:.2%}".format),
    "tokens_per_second": ("tokens/s", _speed, "{:.1f}".format),
    "tokens_per_step": ("tokens/step", _tokens, "{:.1f}".format),
    "tokens_per_forward": ("tokens/forward", _tokens, "{:.1f}".format),
    "planned_memory": ("memory planned", _memory, _bytes),
    "peak_memory": ("at the peak", _memory, _bytes),
}


def lines_of(table: Table, rows: Rows) -> list[tuple[Mapping[str, Any], dict[str, Figure]]]:
    """Each case with its figures by metric, of the table's columns."""
    found: dict[str, tuple[Mapping[str, Any], dict[str, Figure]]] = {}
    for row in rows:
        if row["metric"] in table.metrics:
            found.setdefault(json.dumps(row["case"]), (row["case"], {}))[1][row["metric"]] = row
    return list(found.values())


def line(table: Table, rows: Rows) -> str:
    """One cell's case and figures in words."""
    ((case, figures),) = lines_of(table, rows)
    where = ", ".join(_part(name, case[name]) for name in table.by if case.get(name) is not None)
    found = [f"{COLUMNS[m][0]} {COLUMNS[m][1](figures[m])}" for m in table.metrics if m in figures]
    return f"{where}: {', '.join(found)}"


def _part(name: str, value: Any) -> str:
    return str(value) if name in ("name", "task") else f"{name} {_value(value)}"


def _value(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def print_table(table: Table, rows: Rows, title: str) -> None:
    """Print the figures under their title; what is the same in all lines is said once."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    lines = lines_of(table, rows)
    values = {name: {_value(case.get(name)) for case, _ in lines} for name in table.by}
    varied = [name for name in table.by if len(values[name]) > 1] or ["name"]
    same = [_part(name, *values[name]) for name in table.by if name not in varied]
    metrics = [metric for metric in table.metrics if any(metric in figures for _, figures in lines)]
    papers = [m for m in metrics if any(_paper(figures.get(m)) is not None for _, figures in lines)]

    terminal = sys.stdout.isatty()
    out = RichTable(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    for name in varied:
        out.add_column(name.replace("_", " "), overflow="fold")
    for metric in metrics:
        out.add_column(COLUMNS[metric][0], justify="right")
        if metric in papers:
            out.add_column("paper's", justify="right")
    for case, figures in lines:
        cells = [_value(case.get(name)) for name in varied]
        for metric in metrics:
            _, text, papers_text = COLUMNS[metric]
            cells.append(text(figures[metric]) if metric in figures else "-")
            if metric in papers:
                value = _paper(figures.get(metric))
                cells.append("-" if value is None else papers_text(value))
        out.add_row(*cells)
    print(title)
    print(", ".join(same))
    Console(width=None if terminal else 200, highlight=False).print(out)
    if papers:
        print(f"paper's: {SOURCE}")


def _paper(figure: Figure | None) -> float | None:
    if figure is None or figure["baseline"] is None:
        return None
    return figure["baseline"]["median"]
