"""Results as data: those of the benchmarks lie in `RESULTS`."""

from pathlib import Path

from fdllm_jax.report import hardware, proportion, row, wilson, write

__all__ = ["RESULTS", "hardware", "proportion", "row", "wilson", "write"]

RESULTS = Path(__file__).parent / "results"
