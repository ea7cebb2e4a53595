"""The picture of a comparison: quality against speed, a line a method, a panel a batch."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fdllm_jax.comparison import Measurement

LABELS = {"accuracy": "accuracy (%)", "agreement": "tokens equal to the uncached decoding (%)"}
CHARACTERS_AN_INCH = 12  # of a legend
MARKERS = "osD^vP*X<>h"  # one more than there are colours: a pair repeats after 110


def write_plot(file: Path, measurements: Sequence[Measurement], *, title: str) -> bool:
    """Write a PNG whole or not at all; False, and no file, where no measurement has a quality.

    Bars are the 95 % interval of the quality and the range of the repeats' speeds. Raises ImportError where there is no
    matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    shown = [m for m in measurements if m.quality is not None]
    if not shown:
        return False
    quality = shown[0].quality or ""
    batches = list(dict.fromkeys(m.batch for m in shown))
    names = list(dict.fromkeys(m.variant.name for m in shown))
    figure = Figure(figsize=(max(6.5, 4.2 * len(batches)), 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for panel, batch in zip(panels, batches, strict=True):
        for i, name in enumerate(names):
            points = [m for m in shown if (m.batch, m.variant.name) == (batch, name)]
            if not points:
                continue
            rows = [m.rows() for m in points]
            x, y = ([row[metric] for row in rows] for metric in ("tokens_per_second", quality))
            panel.errorbar(
                [p["median"] for p in x],
                [100 * p["median"] for p in y],
                xerr=[[p["median"] - p["low"] for p in x], [p["high"] - p["median"] for p in x]],
                yerr=[[100 * (p["median"] - p["low"]) for p in y], [100 * (p["high"] - p["median"]) for p in y]],
                label=name,
                color=f"C{i % 10}",
                marker=MARKERS[i % len(MARKERS)],
                markersize=6,
                linewidth=1.6,
                ecolor=(f"C{i % 10}", 0.5),
                elinewidth=0.8,
                capsize=2,
            )
            for n, (m, at_x, at_y) in enumerate(zip(points, x, y, strict=True)):
                if m.variant.swept is not None:
                    panel.annotate(
                        f"{m.variant.swept[1]:g}",
                        (at_x["median"], 100 * at_y["median"]),
                        xytext=(5, -11 if (n + i) % 2 else 5),
                        textcoords="offset points",
                        fontsize=7,
                        zorder=10,
                        path_effects=[withStroke(linewidth=2, foreground="white")],
                        color=f"C{i % 10}",
                    )
        panel.set_title(f"batch {batch}", fontsize=10)
        panel.set_xlabel("tokens per second, prefill included")
        stretch(panel.set_xscale, panel.xaxis, [speed for m in shown if m.batch == batch for speed in m.speeds])
        panel.grid(True, color="0.9")
        panel.set_axisbelow(True)
    panels[0].set_ylabel(LABELS[quality])
    handles, labels = [], []
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    columns = int(CHARACTERS_AN_INCH * figure.get_figwidth() / (6 + max(map(len, labels))))
    columns = max(1, min(4, len(labels), columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    swept = next((f"\nnumbers at points: {m.variant.swept[0]}" for m in shown if m.variant.swept is not None), "")
    figure.suptitle(title + swept, fontsize=10)

    save(figure, file)
    return True


def stretch(set_scale: Callable[[str], None], axis: Any, values: Sequence[float]) -> None:
    """Make a Matplotlib axis logarithmic where its values span more than a factor of ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    if max(values) > 10 * min(values):  # of less, a logarithmic axis has no two of these ticks for certain
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def save(figure: Any, file: Path) -> None:
    """Write a Matplotlib figure as a PNG, whole or not at all."""
    partial = file.with_suffix(".partial")
    figure.savefig(partial, format="png")
    os.replace(partial, file)
