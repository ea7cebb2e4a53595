"""The rows of `benchmarks.decoding` as a line of text and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdllm_jax.comparison_plot import MARKERS, save

PARTS = ("draft", "verify", "one-pass", "block", "rest")  # of an iteration, from the bottom of a bar to its top

Rows = Sequence[dict[str, Any]]


def value(rows: Rows, metric: str, part: str | None = None) -> dict[str, Any] | None:
    """The row of a metric; None where it was not measured."""
    return next((r for r in rows if r["metric"] == metric and r["case"].get("part") == part), None)


def in_iteration(rows: Rows, part: str) -> float | None:
    """Seconds of an iteration that a part takes, by the share of iterations in which it runs; None if not measured."""
    time, share = value(rows, "time", part), value(rows, "share_of_iterations", part)
    return None if time is None else time["median"] * (1.0 if share is None else share["median"])


def line(rows: Rows) -> str:
    """A measured case in a line."""
    case = rows[0]["case"]
    name = case["name"] + (" (replayed)" if "replayed" in case else "")
    words = [f"{name}, batch {case['batch']}, {case['prompt_tokens']} + {case['gen_length']} tokens:"]
    for metric, scale, unit in (
        ("decode_tokens_per_second", 1, "decode tokens/s"),
        ("tokens_per_second", 1, "tokens/s"),
        ("tokens_per_step", 1, "tokens/step"),
        ("accuracy", 100, "% right"),
        ("planned_memory", 1e-9, "GB"),
    ):
        if (row := value(rows, metric)) is not None:
            words.append(f"{row['median'] * scale:.4g} {unit}")
    for part in ("iteration", *PARTS, "prefill", "call"):
        if (row := value(rows, "time", part)) is not None:
            over = "" if row["floor"] is None else f" ({row['median'] / row['floor']:.2f}x)"
            share = value(rows, "share_of_iterations", part)
            often = "" if share is None else f" in {share['median']:.0%} of them"
            words.append(f"{part} {row['median'] * 1e3:.2f} ms{over}{often}")
    return " ".join(words[:1]) + " " + ", ".join(words[1:])


def write(file: Path, rows: Rows, title: str) -> None:
    """Write a PNG whole or not at all: a row of panels for each prompt and response length.

    Throughput and memory by batch, accuracy by throughput, and an iteration's time by its parts. Raises ImportError
    where there is no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[tuple[int, int], dict[tuple[str, int], list[dict[str, Any]]]] = {}
    for row in rows:
        case = row["case"]
        group = groups.setdefault((case["prompt_tokens"], case["gen_length"]), {})
        group.setdefault((case["name"], case["batch"]), []).append(row)
    names = list(dict.fromkeys(row["case"]["name"] for row in rows))
    has_accuracy = any(row["metric"] == "accuracy" for row in rows)
    batches = sorted({row["case"]["batch"] for row in rows})
    figure = Figure(figsize=(19, 1.4 + 4.4 * len(groups)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), 4, squeeze=False)
    for (speed, memory, accuracy, time), ((prompt, response), found) in zip(axes, groups.items(), strict=True):
        for i, name in enumerate(names):
            look = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "label": name}
            of_batch = [(batch, found[name, batch]) for batch in batches if (name, batch) in found]
            for axis, metric, scale in ((speed, "decode_tokens_per_second", 1), (memory, "planned_memory", 1e-9)):
                points = [(batch, row["median"] * scale) for batch, its in of_batch if (row := value(its, metric))]
                axis.plot(*zip(*points, strict=True), **look) if points else None
            pairs = [(value(its, "tokens_per_second"), value(its, "accuracy")) for _, its in of_batch]
            points = [(x["median"], 100 * y["median"]) for x, y in pairs if x and y]
            accuracy.plot(*zip(*points, strict=True), **look) if points else None
        _bars(time, names, batches, found)
        for axis, x, y in (
            (speed, "batch", "decode tokens per second"),
            (memory, "batch", "memory planned (GB)"),
            (accuracy, "tokens per second, prefill included; a point a batch", "accuracy (%)"),
        ):
            axis.set(xlabel=x, ylabel=y)
            axis.set_xscale("log", base=2) if x == "batch" else None
            axis.set_xticks(batches, map(str, batches)) if x == "batch" else None
            axis.set_ylim(bottom=0) if x == "batch" else None
            axis.grid(color="0.9")
        speed.set_title(f"prompts of {prompt} tokens, {response} response positions", fontsize=9, loc="left")
    shown = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    for accuracy in axes[:, 2]:
        accuracy.set_visible(has_accuracy)
    figure.suptitle(title, fontsize=10)
    save(figure, file)


def _bars(axis: Any, names: Sequence[str], batches: Sequence[int], found: Any) -> None:
    """An iteration's parts, as shares of it: a bar a method and batch."""
    keys = [(name, batch) for name in names for batch in batches if (name, batch) in found]
    labels = [key for key in keys if value(found[key], "time", "rest")]
    axis.set_visible(bool(labels))
    at, bottom = range(len(labels)), [0.0] * len(labels)
    whole = [value(found[key], "time", "iteration") for key in labels]
    for shade, part in enumerate(PARTS):
        seconds = [in_iteration(found[key], part) for key in labels]
        shares = [
            max(0.0, 100 * s / w["median"]) if s and w else 0.0  # noise may leave less than no rest
            for s, w in zip(seconds, whole, strict=True)
        ]
        if any(shares):
            axis.barh(at, shares, left=bottom, color=f"C{shade}" if part != "rest" else "0.75", label=part)
        bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
    for y, w in zip(at, whole, strict=True):
        if w:
            axis.annotate(f"{w['median'] * 1e3:.3g} ms", (1 + max(100, bottom[y]), y), va="center", fontsize=7)
    axis.set_yticks(at, [f"{name}, {batch}" for name, batch in labels], fontsize=6)
    axis.set(xlabel="share of an iteration (%)", xlim=(0, 15 + max([100, *bottom])))
    axis.invert_yaxis()
    if labels:
        axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS))
