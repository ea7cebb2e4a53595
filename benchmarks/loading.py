"""How long `convert.load` takes, beside the least that loading could be: safe_open and device_put in a bare loop.

`python -m benchmarks.loading` makes a 1 GB checkpoint in a temporary directory and writes results/loading.json.
"""

import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from safetensors import safe_open

from benchmarks import report
from benchmarks.synthetic import write_checkpoint
from convert import load
from convert.checkpoint import SINGLE_FILE
from fdllm_jax.config import ModelConfig

REPEATS = 5
CONFIG = ModelConfig(
    vocab_size=32768,
    embedding_size=32768,
    d_model=2048,
    n_layers=7,
    n_heads=16,
    n_kv_heads=16,
    mlp_size=6144,
    rope_theta=500000.0,
    norm_eps=1e-5,
    max_sequence_length=4096,
    qkv_bias=False,
    weight_tying=False,
    scale_logits=False,
    mask_token_id=32767,
    eos_token_id=32766,
    pad_token_id=32766,
)


def bare_loop(file: Path) -> list[jax.Array]:
    """Every tensor of the file on the default device, as it is: nothing checked, nothing packed."""
    with safe_open(file, framework="numpy") as tensors:
        return [jax.device_put(tensor) for tensor in map(tensors.get_tensor, tensors.keys())]


def seconds(action: Callable[[], Any]) -> float:
    """Seconds until all that the action returns is on the device."""
    start = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - start


def measure(directory: Path, repeats: int) -> dict[str, Any]:
    """A row of results: the two alternate, after one warm-up each, so the file is in the page cache."""
    actions = {"load": lambda: load(directory)[1], "bare": lambda: bare_loop(directory / SINGLE_FILE)}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            taken = seconds(action)
            if repeat:
                times[name].append(taken)
    baseline = {"name": "bare loop of safe_open and device_put", "median": statistics.median(times["bare"])}
    return report.row(
        {"op": "load", "bytes": (directory / SINGLE_FILE).stat().st_size},
        "time",
        "s",
        statistics.median(times["load"]),
        low=min(times["load"]),
        high=max(times["load"]),
        repeats=repeats,
        baseline=baseline,
    )


def main() -> None:
    """Measure, print and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoint"
        write_checkpoint(directory, CONFIG, dtype="bfloat16", seed=1, shard_bytes=2**40)
        row = measure(directory, REPEATS)
    settings = {"dtype": "bfloat16", "d_model": CONFIG.d_model, "n_layers": CONFIG.n_layers, "warm_up": 1}
    report.write(report.RESULTS / "loading.json", settings=settings, rows=[row])
    print(f"{report.hardware()}, {settings}, {REPEATS} repeats")
    print(f"load {row['median']:.3f} s ({row['low']:.3f} to {row['high']:.3f})")
    print(f"bare loop {row['baseline']['median']:.3f} s; ratio {row['median'] / row['baseline']['median']:.2f}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is temporary is cleared away
    main()
