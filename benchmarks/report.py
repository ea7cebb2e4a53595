"""Results as data: those of the benchmarks lie in `RESULTS`."""

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fdllm_jax.command_line import at_interrupt
from fdllm_jax.report import hardware, proportion, row, wilson, write

__all__ = [
    "RESULTS",
    "check_file",
    "file_of",
    "finish",
    "hardware",
    "kept",
    "part",
    "proportion",
    "row",
    "sampled",
    "spread",
    "wilson",
    "write",
    "write_part",
]

RESULTS = Path(__file__).parent / "results"


def file_of(name: str, options: argparse.Namespace, defaults: argparse.ArgumentParser) -> Path | None:
    """Where a run's results go: --output, or the committed file if all is as by default.

    Raises ValueError for an --output that cannot be a file.
    """
    if options.output is not None:
        check_file("--output", options.output)
        return options.output
    whole = all(value == defaults.get_default(option) for option, value in vars(options).items())
    return RESULTS / f"{name}.json" if whole else None


def check_file(option: str, file: Path) -> None:
    """Raise ValueError unless a file can be written there."""
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {file}: expected a file in a folder that exists and is writable")


def write_part(file: Path, **what: Any) -> None:
    """`write` what a run has so far beside its file: an unfinished run replaces no results, and loses none."""
    write(part(file), **what)


@contextmanager
def kept(file: Path | None, rows: Sequence[Any]) -> Iterator[None]:
    """At Ctrl-C meanwhile, it is said where the rows lie that `write_part` has written."""
    with at_interrupt(lambda: f"what was measured lies in {part(file)}" if file is not None and rows else ""):
        yield


def finish(file: Path) -> None:
    """Put what was written to its `part` in the file's place."""
    part(file).replace(file)


def part(file: Path) -> Path:
    """Where what this process writes to a file lies until all of it is there: of two runs at once the last one wins."""
    return file.with_name(f"{file.stem}.{os.getpid()}.part{file.suffix}")


def sampled(case: Mapping[str, Any], metric: str, unit: str, samples: Sequence[float], **more: Any) -> dict[str, Any]:
    """The `row` of a figure's samples."""
    figure = spread(samples)
    return row(case, metric, unit, figure.pop("median"), **figure, **more)


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """median, low, high and repeats of a figure's samples."""
    return {"median": statistics.median(samples), "low": min(samples), "high": max(samples), "repeats": len(samples)}
