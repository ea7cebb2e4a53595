"""A table's rows as a picture: a panel for each metric and part of the grid, a line for each method or setting."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.grid import Panel, Rows, Table
from fdllm_jax.comparison_plot import MARKERS, save, stretch

LABELS = {
    "accuracy": "accuracy (%)",
    "tokens_per_second": "tokens per second, prefill included",
    "planned_memory": "memory planned (GB)",
    "share_of_steps": "share of steps (%)",
    "tokens": "tokens that a step commits",
    "tenth": "tenth of the decoding",
    "tokens_of_a_step": "tokens of a step, mean",
    "prompt_tokens": "prompt (tokens, mean)",
    "gen_length": "response positions",
}
SCALES = {"accuracy": 100, "share_of_steps": 100, "planned_memory": 1e-9}

Point = tuple[Mapping[str, float], Mapping[str, float], str]  # x and y, each with low and high; a note


def write(file: Path, table: Table, rows: Rows, title: str) -> None:
    """Write a PNG whole or not at all. Raises ImportError where there is no matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = {panel.y for panel in table.panels}
    groups = list(dict.fromkeys(_group(table, row) for row in rows if row["metric"] in metrics))
    places = [(group, panel) for group in groups for panel in table.panels]
    columns = len(table.panels) if len(table.panels) > 1 else min(len(groups), max(2, math.ceil(len(groups) / 2)))
    height = math.ceil(len(places) / columns)
    names = list(dict.fromkeys(row["case"][table.lines] for row in rows))
    figure = Figure(figsize=(max(7.0, 4.6 * columns), 1.2 + 3.4 * height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for axis, (group, panel) in zip(axes, places, strict=False):
        found = points(table, panel, [row for row in rows if _group(table, row) == group])
        for name, its in found.items():
            _draw(axis, its, names.index(name), str(name) if table.lines == "name" else f"{table.lines} {name}")
        _dress(axis, panel, [point for its in found.values() for point in its])
        heading = [_words(key, value) for key, value in zip(table.each, group, strict=True)]
        axis.set_title(", ".join(heading) + (f"\nby {panel.note or panel.sweep}" if panel.sweep else ""), fontsize=9)
    for axis in axes[len(places) :]:
        axis.set_visible(False)
    shown = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in shown}
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=10)
    save(figure, file)


def points(table: Table, panel: Panel, rows: Rows) -> dict[Any, list[Point]]:
    """The points of a panel, by line."""
    of_case = {(json.dumps(row["case"]), row["metric"]): row for row in rows}
    found: dict[Any, list[Point]] = {}
    for row in rows:
        case = row["case"]
        if row["metric"] != panel.y or case.get("sweep") != panel.sweep:
            continue
        x = case.get(panel.x)
        at = of_case[json.dumps(case), panel.x] if x is None else {"median": x, "low": x, "high": x}
        note = f"{case[panel.note]:g}" if panel.note else ""
        found.setdefault(case[table.lines], []).append((_scaled(at, panel.x), _scaled(row, panel.y), note))
    return found


def _scaled(figure: Mapping[str, Any], metric: str) -> dict[str, float]:
    return {key: SCALES.get(metric, 1) * figure[key] for key in ("median", "low", "high")}


def _group(table: Table, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row["case"][key] for key in table.each)


def _words(key: str, value: Any) -> str:
    return str(value).replace("_", " ") if key in ("task", "name") else f"{key.replace('_', ' ')} {value}"


def _draw(axis: Any, points: Sequence[Point], number: int, label: str) -> None:
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axis.errorbar(
        [x["median"] for x in xs],
        [y["median"] for y in ys],
        xerr=[[x["median"] - x["low"] for x in xs], [x["high"] - x["median"] for x in xs]],
        yerr=[[y["median"] - y["low"] for y in ys], [y["high"] - y["median"] for y in ys]],
        label=label,
        color=f"C{number % 10}",
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        linewidth=1.4,
        ecolor=(f"C{number % 10}", 0.4),
        elinewidth=0.8,
    )
    for x, y, note in points:
        axis.annotate(
            note, (x["median"], y["median"]), xytext=(4, 4), textcoords="offset points", fontsize=7,
            color=f"C{number % 10}",
        )  # fmt: skip


def _dress(axis: Any, panel: Panel, points: Sequence[Point]) -> None:
    from matplotlib.ticker import NullLocator

    for name, its, scale, along in (
        (panel.x, [p[0]["median"] for p in points], axis.set_xscale, axis.xaxis),
        (panel.y, [p[1]["median"] for p in points], axis.set_yscale, axis.yaxis),
    ):
        along.set_label_text(LABELS.get(name, name.replace("_", " ")), fontsize=9)
        ticks = sorted(set(its))
        if not ticks:  # all was left out
            continue
        if name in ("batch", "gen_length", "mask_window", "prompt_tokens") and ticks[0] > 0:
            scale("log")
            along.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            along.set_minor_locator(NullLocator())
        elif name in ("tokens_per_second", "planned_memory"):
            stretch(scale, along, its)
    if panel.y in ("tokens_of_a_step", "share_of_steps"):
        axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8)
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)
