"""What it takes until the first text: python -m benchmarks.startup --model PATH

Loading (with the kernels' self-check), compiling and a first response, each time in a new process: first with an empty
compilation cache, then with what that has left there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from benchmarks import report
from benchmarks.small_model import word_problems
from fdllm_jax import LLM, Settings, command_line
from fdllm_jax.settings import METHODS

PROGRAM = "benchmarks.startup"
CACHES = ("empty", "filled")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_line.Parser(PROGRAM, "What it takes until the first text.")
    command_line.add_model(p, raw=False)
    p.add_argument("--method", choices=tuple(METHODS), default="flash-dllm")
    p.add_argument("--gen-length", type=command_line.count, default=128, metavar="N")
    p.add_argument("--repeats", type=command_line.count, default=3, metavar="N", help="processes with a filled cache")
    p.add_argument("--output", type=Path, help="results file (default: printed only)")
    p.add_argument("--once", action="store_true", help="measure in this process, and print the seconds as JSON")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code: 0, or 2 for a user's error."""
    options = parser().parse_args(arguments)
    return command_line.run(PROGRAM, partial(_once if options.once else _run, options))


def _once(options: argparse.Namespace) -> None:
    """The seconds of this process."""
    if options.output is not None:
        raise ValueError(f"--output {options.output}: --once prints its seconds and writes none: leave one out")
    moments = [time.perf_counter()]
    command_line.use_compilation_cache()
    llm = LLM(options.model, dtype=options.dtype, kernels=options.kernels)
    jax.block_until_ready(jax.tree.leaves(llm.model.embedding))
    moments.append(time.perf_counter())
    prompts = [word_problems.make(0, split="test").question]
    settings = Settings(method=options.method, gen_length=options.gen_length)
    llm.compile(prompts, settings)
    moments.append(time.perf_counter())
    llm.generate(prompts, settings)
    moments.append(time.perf_counter())
    parts = ("load", "compile", "first response")
    print(json.dumps(dict(zip(parts, (b - a for a, b in pairwise(moments)), strict=True))))


def _run(options: argparse.Namespace) -> None:
    if options.output is not None:
        report.check_file("--output", options.output)
    command = [sys.executable, "-m", PROGRAM, "--once", "--method", options.method]
    command += ["--gen-length", str(options.gen_length), "--dtype", options.dtype, "--kernels", options.kernels]
    command += [] if options.model is None else ["--model", options.model]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for state, repeats in zip(CACHES, (1, options.repeats), strict=True):
            seconds: dict[str, list[float]] = {}
            for _ in range(repeats):
                began = time.perf_counter()
                done = subprocess.run(
                    command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}, capture_output=True, text=True
                )
                whole = time.perf_counter() - began
                if done.returncode:
                    raise ValueError(
                        (done.stderr.strip() or "no message").splitlines()[-1].removeprefix(f"{PROGRAM}: ")
                    )
                parts = json.loads(done.stdout.splitlines()[-1])
                for part, its in {**parts, "Python and imports": whole - sum(parts.values()), "all": whole}.items():
                    seconds.setdefault(part, []).append(its)
            for part, samples in seconds.items():
                case = {"method": options.method, "compilation_cache": state, "part": part}
                rows.append(report.sampled(case, "time", "s", samples))
                print(f"compilation cache {state:>6}, {part:>18}: {rows[-1]['median']:7.2f} s", flush=True)
    if options.output is not None:
        about = {"model": options.model or "shipped", "dtype": options.dtype, "kernels": options.kernels}
        report.write(options.output, settings=about | {"gen_length": options.gen_length}, rows=rows)


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
