"""Tables of the documents, from the results: python -m benchmarks.tables

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and is replaced whole.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers, roofline
from benchmarks.decoding_plot import PARTS
from benchmarks.report import RESULTS
from fdllm_jax import command_line

PROGRAM = "benchmarks.tables"
ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "fdllm_jax" / "assets" / "fdllm-9m" / "README.md",
    ROOT / "pallas_kernels" / "README.md",
)
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(?:(?!<!-- table: ).)*?(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring every document's tables up to date; returns the exit code: 0, or 2 for results that cannot be read."""
    command_line.Parser(PROGRAM, "The documents' tables, from the results.").parse_args(arguments)
    return command_line.run(PROGRAM, _run)


def _run() -> None:
    texts = {document: filled(document.read_text(encoding="utf-8")) for document in DOCUMENTS}
    for document, text in texts.items():
        document.write_text(text, encoding="utf-8")


def filled(text: str) -> str:
    """The text with every table made from the results as they are. Raises ValueError for a table without an end."""
    if text.count("<!-- table: ") != len(_TABLE.findall(text)):
        raise ValueError("a table has no <!-- end -->")
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a results file. Raises ValueError and OSError for one that is damaged or not there."""
    file = RESULTS / f"{name}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected a benchmark's results, whole: make it anew ({error})") from error


def small_model() -> str:
    """Accuracy and tokens per step of the shipped checkpoint, by task."""
    figures: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows_of("small_model"):
        if row["case"]["task"] != "together":
            figures.setdefault((row["case"]["task"], row["case"]["method"]), {})[row["metric"]] = row
    lines = ["| task | method | accuracy | of | tokens per step |", "|---|---|---|---|---|"]
    for (task, method), of in figures.items():
        accuracy = of["accuracy"]
        lines.append(
            f"| {task.replace('_', ' ')} | `{method}` | {accuracy['median']:.1%} "
            f"({accuracy['low']:.1%} to {accuracy['high']:.1%}) | {accuracy['repeats']} "
            f"| {of['tokens_per_step']['median']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def methods() -> str:
    """Each method on held-out word problems: accuracy and tokens per step and forward; tokens per second by batch."""
    figures: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows_of("small_model"):
        if row["case"]["task"] == "word_problems" and (row["baseline"] or {"name": "llada"})["name"] == "llada":
            figures.setdefault(row["case"]["method"], {})[row["metric"]] = row
    speeds: dict[int, dict[str, float]] = {}
    for row in rows_of("methods"):
        if row["metric"] == "tokens_per_second":
            speeds.setdefault(row["case"]["batch"], {})[row["case"]["name"]] = row["median"]
    batches = sorted(speeds)
    lines = [
        f"| method | accuracy | against `llada`, points | tokens per step | per forward |"
        f"{''.join(f' tokens/s, batch {b} |' for b in batches)}",
        f"|---|---|---|---|---|{'---|' * len(batches)}",
    ]
    for method, of in figures.items():
        cells = [
            f"`{method}`",
            f"{of['accuracy']['median']:.1%}",
            _points(of["accuracy_difference"]) if "accuracy_difference" in of else "-",
            f"{of['tokens_per_step']['median']:.2f}",
            f"{of['tokens_per_forward']['median']:.2f}",
            *(f"{speeds[batch][method]:,.0f}" if method in speeds[batch] else "-" for batch in batches),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def against() -> str:
    """What a method gains and loses beside `flash-cache`, by task and together: accuracy, tokens per step and pass."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    points: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows_of("small_model"):
        case = row["case"]
        if row["metric"] == "accuracy_difference" and row["baseline"]["name"] == "flash-cache":
            points.setdefault(case["method"], {})[case["task"]] = row
        elif row["baseline"] is None:
            found.setdefault(case["method"], {})[case["task"], row["metric"]] = row["median"]
    tasks = list(dict.fromkeys(task for its in points.values() for task in its))
    heads = "".join(f" {task.replace('_', ' ')}: points | tokens per step | per forward |" for task in tasks)
    lines = [f"| method |{heads}", f"|---|{'---|---|---|' * len(tasks)}"]
    for method, of in points.items():
        cells = [f"`{method}`"]
        for task in tasks:
            cells.append(_points(of[task]))
            for metric in ("tokens_per_step", "tokens_per_forward"):
                cells.append(f"{found[method][task, metric] / found['flash-cache'][task, metric]:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _points(difference: Mapping[str, Any]) -> str:
    """A difference in accuracy and its interval, in percentage points."""
    middle, low, high = (f"{100 * difference[key]:+.1f}" for key in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def iterations() -> str:
    """What an iteration of the small model takes while all slots are live, and its forward beside its floor."""
    lines = [
        "| batch | method | tokens per step | iteration, ms | its forward, ms (over its floor) | the rest, ms |",
        "|---|---|---|---|---|---|",
    ]
    for (batch, name), of in of_cases("decoding_small").items():
        forward = of.get("draft") or of["block"]
        lines.append(
            f"| {batch} | `{name}` | {of['tokens_per_step']['median']:.2f} | {1e3 * of['iteration']['median']:.2f} "
            f"| {1e3 * forward['median']:.2f} ({forward['median'] / forward['floor']:.0f}x) "
            f"| {1e3 * of['rest']['median']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def of_cases(name: str, *by: str) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """The rows of `benchmarks.decoding` by batch and method, or other settings, then by part or metric."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows_of(name):
        case = row["case"]
        if row["metric"] != "share_of_iterations":
            key = tuple(case[setting] for setting in by or ("batch", "name"))
            found.setdefault(key, {})[case.get("part", row["metric"])] = row
    return found


def large() -> str:
    """At LLaDA-8B's shape: tokens per second and step, what an iteration takes, memory and accuracy."""
    lines = [
        "| batch | method | right | decode tokens/s | with prefill | tokens per step | per forward | iteration, ms "
        "| its forwards, ms (over their floors) | the rest, ms | prefill, ms (over its floor) | memory planned, GB |",
        f"|{'---|' * 12}",
    ]
    for (batch, name), of in of_cases("decoding_8b").items():
        cells = [
            str(batch),
            f"`{name}`",
            f"{of['accuracy']['median']:.1%}",
            _range(of["decode_tokens_per_second"], 1, ",.0f"),
            f"{of['tokens_per_second']['median']:,.0f}",
            f"{of['tokens_per_step']['median']:.2f}",
            f"{of['tokens_per_forward']['median']:.2f}",
            _range(of["iteration"], 1e3, ".1f"),
            " + ".join(_over_floor(of[part]) for part in PARTS if part in of and part != "rest"),
            f"{1e3 * of['rest']['median']:.1f}",
            _over_floor(of["prefill"]),
            f"{1e-9 * of['planned_memory']['median']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _over_floor(time: Mapping[str, Any]) -> str:
    """Milliseconds, and over their floor."""
    return f"{1e3 * time['median']:,.1f} ({time['median'] / time['floor']:.2f}x)"


def scale(name: str, setting: str, heading: str) -> str:
    """At LLaDA-8B's shape: what one method's iteration, prefill and memory grow to with a setting of the cases."""
    lines = [
        f"| {heading} | right | decode tokens/s | with prefill | iteration, ms | draft, ms (over its floor) "
        "| verify, ms (over its floor) | prefill, ms (over its floor) | memory planned, GB |",
        f"|{'---|' * 9}",
    ]
    for (value,), of in sorted(of_cases(name, setting).items()):
        decoding, iteration = of.get("decode_tokens_per_second"), of.get("iteration")  # where all slots were live
        cells = [
            f"{value:,}",
            f"{of['accuracy']['median']:.1%}",
            "-" if decoding is None else f"{decoding['median']:,.0f}",
            f"{of['tokens_per_second']['median']:,.0f}",
            "-" if iteration is None else f"{1e3 * iteration['median']:.1f}",
            *(_over_floor(of[part]) for part in ("draft", "verify", "prefill")),
            f"{1e-9 * of['planned_memory']['median']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def grown() -> str:
    """Accuracy and tokens of the grown checkpoint, beside the small one it is grown from."""
    rows, small = rows_of("accuracy_8b"), dict[tuple[str, str], float]()
    for row in rows_of("accuracy_small"):
        if row["baseline"] is None:
            small[row["case"]["method"], row["metric"]] = row["median"]
    methods, found = {row["case"]["method"] for row in rows}, dict[str, dict[str, Mapping[str, Any]]]()
    for row in rows:
        if row["baseline"] is None or row["baseline"]["name"] not in methods:  # another model's file
            found.setdefault(row["case"]["method"], {})[row["metric"]] = row
    lines = [
        "| method | accuracy: small, grown | difference, points | tokens per step: small, grown | per forward |",
        f"|{'---|' * 5}",
    ]
    for name, of in found.items():
        cells = [f"`{name}`", f"{small[name, 'accuracy']:.1%}, {of['accuracy']['median']:.1%}"]
        cells.append(_points(of["accuracy_difference"]))
        for metric in ("tokens_per_step", "tokens_per_forward"):
            cells.append(f"{small[name, metric]:.2f}, {of[metric]['median']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


KERNELS: Mapping[str, tuple[str, ...]] = {
    "products": ("nvjet", "gemm_fusion", "linear_parts", "gate_up_silu", "qkv_rope_cache"),
    "attention": ("scheduled_attention", "verify_attention", "cudnn_generated"),
    "tracking scores": ("tracking_scores",),
    "norms and residuals": ("add_and_norm",),
    "rotation and cache": ("rope_cache",),
    "head": ("head_statistics",),
    "others": ("",),
}  # by what their names begin with; the first that fits
SHOWN = ("flash-dllm", "flash-dllm:mask_window=32,track_budget=32", "balanced")  # those of the others are like these


def kernels_of_iteration() -> str:
    """At LLaDA-8B's shape: what an iteration's kernels take, by kind."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    of, cases = of_cases("decoding_8b"), dict[tuple[int, str], Mapping[str, Any]]()
    for row in rows_of("decoding_8b"):
        case = row["case"]
        if row["metric"] != "device_time" or case["name"] not in SHOWN:
            continue
        kind = next(kind for kind, starts in KERNELS.items() if case["kernel"].startswith(starts))
        its = found.setdefault((case["batch"], case["name"]), dict.fromkeys(KERNELS, 0.0))
        its[kind] += row["median"]
        cases[case["batch"], case["name"]] = case
    lines = [f"| batch | method | iteration | its kernels |{''.join(f' {kind} |' for kind in KERNELS)}"]
    lines.append(f"|{'---|' * (4 + len(KERNELS))}")
    for (batch, name), its in found.items():
        over = f" ({its['products'] / floor_of_products(cases[batch, name]):.2f}x)"
        cells = [str(batch), f"`{name}`", f"{1e3 * of[batch, name]['iteration']['median']:.1f}"]
        cells += [f"{1e3 * sum(its.values()):.1f}"]
        cells += [f"{1e3 * seconds:.1f}{over if kind == 'products' else ''}" for kind, seconds in its.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def floor_of_products(case: Mapping[str, Any]) -> float:
    """Seconds that the layers' matrix products of an iteration take at least, on an H200 at LLaDA-8B's shape."""
    shape, queried = roofline.LLADA_8B, case["mask_window"] + case["track_budget"]
    if "plain_threshold" in case:  # a one-pass method
        passes = [queried + 2 * case["block_length"]]
    else:
        passes = [queried] + ([case["verify_rows"]] if "verify_rows" in case else [])
    d_model, width, seconds = shape.d_model, shape.heads * shape.head_dim, 0.0
    for rows in (case["batch"] * rows for rows in passes):
        for work in (
            roofline.qkv_rope_cache(shape, rows=rows),
            roofline.linear_residual(rows=rows, k=width, n=d_model),
            roofline.gate_up_silu(shape, rows=rows),
            roofline.linear_residual(rows=rows, k=shape.mlp, n=d_model),
        ):
            seconds += shape.layers * work.floor(roofline.H200)
    return seconds


def _range(row: Mapping[str, Any], scale: float, form: str) -> str:
    """A figure's median, lowest and highest."""
    middle, low, high = (format(scale * row[key], form) for key in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def beside_peers() -> str:
    """Ours beside the figures of `benchmarks.peers`, which are of the same GPU and model's shape."""
    of = of_cases("decoding_8b")

    def ours(name: str, part: str, scale: float) -> list[float]:
        return [scale * of[batch, name][part]["median"] for batch in peers.BATCHES]

    def row(what: str, theirs: Sequence[float], own: Sequence[float]) -> str:
        pairs = zip(theirs, own, strict=True)
        both = (f"{a:,.{a < 100:d}f} / {b:,.{b < 100:d}f} ({a / b:.1f}x)" for a, b in pairs)
        return f"| {what} | {' | '.join(both)} |"

    lines = [f"| theirs / ours | {' | '.join(f'batch {batch}' for batch in peers.BATCHES)} |", "|---|---|---|---|"]
    for key, what in (
        ("iteration", "Flash-dLLM's release: an iteration, ms"),
        ("draft", "Flash-dLLM's release: the draft's forward, ms"),
        ("verify", "Flash-dLLM's release: the verify pass's forward, ms"),
        ("prefill", "Flash-dLLM's release: prefill, ms"),
    ):
        lines.append(row(what, peers.RELEASE[key], ours("flash-dllm", key, 1e3)))
    lines.append(
        row("Flash-dLLM's release: memory, GB", peers.RELEASE["memory"], ours("flash-dllm", "planned_memory", 1e-9))
    )
    what = "Fast-dLLM, dual cache: a cached pass of a block, ms"
    lines.append(row(what, peers.FAST_DLLM["block"], ours("fast-dllm-dual", "block", 1e3)))
    lines.append(
        row(
            "Fast-dLLM, dual cache: a full pass, ms", peers.FAST_DLLM["prefill"], ours("fast-dllm-dual", "prefill", 1e3)
        )
    )
    lines.append(
        row(
            "Fast-dLLM, dual cache: memory, GB",
            peers.FAST_DLLM["memory"],
            ours("fast-dllm-dual", "planned_memory", 1e-9),
        )
    )
    return "\n".join(lines) + "\n"


def batching() -> str:
    """GSM8K's prompts through slots that are refilled, beside whole batches of the same prompts."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows_of("batching_gsm8k"):
        case = row["case"]
        if "batching" in case:
            found.setdefault((case["method"], case["batching"]), {})[row["metric"]] = row
    lines = [
        "| method | slots refilled | tokens/s | over whole batches | slots in use while prompts wait "
        "| time between calls |",
        f"|{'---|' * 6}",
    ]
    for (method, kind), of in found.items():
        if kind != "whole batches":
            cells = [
                f"`{method}`",
                {"continuous": "first come"}.get(kind, kind),
                f"{of['tokens_per_second']['median']:,.0f}",
                f"{of['speedup']['median']:.2f}x",
                f"{of['occupancy']['median']:.1%}",
                f"{of['host_share']['median']:.1%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def timed(name: str, heading: str, unit: str, seconds: float) -> str:
    """Times of each case in a unit of `seconds`: its floor, XLA, the kernel, and what other libraries take."""
    of_case: dict[str, dict[str, Any]] = {}
    for row in rows_of(name):
        if row["metric"] != "time":
            continue
        case, baseline = dict(row["case"]), row["baseline"]
        figures = of_case.setdefault(
            " ".join(
                str(value) if key in ("op", "part") else f"{key} {value}"
                for key, value in case.items()
                if key != "kernels"
            ),
            {"floor": row["floor"], "other": "-"},
        )
        figures[case["kernels"]] = row["median"]
        if baseline is not None and baseline["name"] != "xla":
            figures["other"] = f"{baseline['median'] / seconds:.1f} ({re.split('[ :]', baseline['name'])[0]})"

    def cell(figures: Mapping[str, Any], kernels: str) -> str:
        if kernels not in figures:
            return "-"
        over = "" if figures["floor"] is None else f" ({figures[kernels] / figures['floor']:.2f}x)"
        return f"{figures[kernels] / seconds:.1f}{over}"

    others = any(figures["other"] != "-" for figures in of_case.values())
    lines = [
        f"| {heading} | floor, {unit} | kernel | XLA |{' other |' * others}",
        f"|---|---|---|---|{'---|' * others}",
    ]
    for case, figures in of_case.items():
        floor = "-" if figures["floor"] is None else f"{figures['floor'] / seconds:.1f}"
        cells = [case, floor, cell(figures, "pallas"), cell(figures, "xla")]
        lines.append(f"| {' | '.join([*cells, figures['other']] if others else cells)} |")
    return "\n".join(lines) + "\n"


TABLES: Mapping[str, Callable[[], str]] = {
    "small_model": small_model,
    "methods": methods,
    "against": against,
    "iterations": iterations,
    "batching": batching,
    "large": large,
    "grown": grown,
    "batches": partial(scale, "decoding_8b_batches", "batch", "batch"),
    "lengths": partial(scale, "decoding_8b_lengths", "prompt_tokens", "tokens of a prompt"),
    "iteration_kernels": kernels_of_iteration,
    "peers": beside_peers,
    "kernels": partial(timed, "kernels", "operation", "us", 1e-6),
    "forward": partial(timed, "forward", "forward", "ms", 1e-3),
}

if __name__ == "__main__":
    sys.exit(main())
