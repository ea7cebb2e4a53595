"""Results as data: those of the benchmarks lie in `RESULTS`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdllm_jax.report import hardware, proportion, row, wilson, write

__all__ = ["RESULTS", "hardware", "proportion", "row", "spread", "wilson", "write"]

RESULTS = Path(__file__).parent / "results"


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """median, low, high and repeats of a figure's samples."""
    return {"median": statistics.median(samples), "low": min(samples), "high": max(samples), "repeats": len(samples)}
