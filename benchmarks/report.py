"""Results as data: those of the benchmarks lie in `RESULTS`."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdllm_jax.report import hardware, proportion, row, wilson, write

__all__ = ["RESULTS", "file_of", "finish", "hardware", "proportion", "row", "spread", "wilson", "write", "write_part"]

RESULTS = Path(__file__).parent / "results"


def file_of(name: str, options: argparse.Namespace, defaults: argparse.ArgumentParser, *decides: str) -> Path | None:
    """Where a run's results go: --output, or the committed file if all options that decide them are as by default."""
    whole = all(getattr(options, option) == defaults.get_default(option) for option in decides)
    return options.output or (RESULTS / f"{name}.json" if whole else None)


def write_part(file: Path, **what: Any) -> None:
    """`write` what a run has so far beside its file: an unfinished run replaces no results, and loses none."""
    write(_part(file), **what)


def finish(file: Path) -> None:
    """Put what `write_part` wrote last in the file's place."""
    _part(file).replace(file)


def _part(file: Path) -> Path:
    return file.with_name(f"{file.stem}.part{file.suffix}")


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """median, low, high and repeats of a figure's samples."""
    return {"median": statistics.median(samples), "low": min(samples), "high": max(samples), "repeats": len(samples)}
