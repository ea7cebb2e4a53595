"""The figures of an evaluation, from its samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdllm_jax import report
from fdllm_jax.evaluation.samples import Sample

SUMMARY = "summary.json"


def rows(case: Mapping[str, Any], samples: Sequence[Sample], *, complete: bool) -> list[dict[str, Any]]:
    """Rows of a results file: the accuracy by each metric with its 95 % interval, and what the decoding took.

    Tokens count as in `Sample`; tokens_per_second includes prefill, and no compilation. complete: whether these are all
    samples of their runs: the time of a part of them is not known. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there are no samples to sum up")
    count = len(samples)
    tokens, steps, forwards, seconds = (
        sum(getattr(sample, name) for sample in samples) for name in ("tokens", "steps", "forwards", "seconds")
    )
    figures = [
        report.proportion({**case, "score": metric}, "accuracy", sum(s.scores[metric] for s in samples), count)
        for metric in samples[0].scores
    ]
    for metric, unit, value in (
        ("tokens", "tokens", tokens),
        ("forwards", "passes", forwards),
        ("tokens_per_step", "tokens", tokens / max(steps, 1)),
        ("tokens_per_forward", "tokens", tokens / max(forwards, 1)),
        *([("tokens_per_second", "tokens/s", tokens / seconds)] if complete else []),
    ):
        figures.append(report.row(case, metric, unit, value))
    ended = sum(sample.stop_reason in ("eos", "stop") for sample in samples)
    refused = sum(sample.stop_reason == "refused" for sample in samples)
    figures += [report.proportion(case, "ended", ended, count), report.proportion(case, "refused", refused, count)]
    return figures


def write(
    folder: Path, settings: Mapping[str, Any], case: Mapping[str, Any], samples: Sequence[Sample], *, complete: bool
) -> list[dict[str, Any]]:
    """Write `summary.json` whole or not at all, with the command, the date, hardware and versions; returns its rows."""
    figures = rows(case, samples, complete=complete)
    slots = sorted({sample.slots for sample in samples})
    report.write(folder / SUMMARY, settings={**settings, "slots": slots}, rows=figures)
    return figures
