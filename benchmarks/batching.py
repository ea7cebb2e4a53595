"""Continuous batching against waiting for whole batches: python -m benchmarks.batching --data GSM8K_FOLDER

Both decode the same prompts in the same program, in turns: one with slots that are refilled as their sequences end, the
other a batch at a time. The shipped checkpoint's answers to GSM8K are of no worth; what it takes to decode them is.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.small_model import word_problems
from fdllm_jax import LLM, Result, Settings, command_line
from fdllm_jax.batching import Load
from fdllm_jax.evaluation import gsm8k
from fdllm_jax.settings import METHODS

PROGRAM = "benchmarks.batching"
KINDS = ("continuous", "longest first", "whole batches")


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode, write the results file, and print it; returns the exit code: 0, or 2 for a user's error."""
    p = command_line.Parser(PROGRAM, "Continuous batching against waiting for whole batches.")
    p.add_argument("--model", help="checkpoint directory (default: the one that ships)")
    p.add_argument("--data", type=Path, help="GSM8K's files, or their folder (default: synthetic word problems)")
    p.add_argument("--prompts", type=command_line.count, default=1319)
    p.add_argument("--slots", type=command_line.count, default=32)
    p.add_argument("--gen-length", type=command_line.count, default=256)
    p.add_argument("--repeats", type=command_line.count, default=3)
    p.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=["flash-dllm", "fast-dllm-dual"])
    p.add_argument("--output", type=Path, help="results file (default: in benchmarks/results, of all)")
    return command_line.run(PROGRAM, partial(_run, p, p.parse_args(arguments)))


def _run(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    name = "batching" if options.data is None else "batching_gsm8k"
    if options.output is not None:
        command_line.made(options.output.parent)
    file = report.file_of(name, argparse.Namespace(**(vars(options) | {"data": None})), p)

    llm = LLM(options.model, slots=options.slots)
    if options.data is None:
        questions = (word_problems.make(i, split="test").question for i in range(options.prompts))
        prompts, stop = [llm.tokenizer.encode_chat(question) for question in questions], ()
    else:
        items = gsm8k.load(options.data)[: options.prompts]
        prompts, stop = [llm.tokenizer.encode_raw(item.prompt) for item in items], gsm8k.TASK.stop
    llm.capacity = max(map(len, prompts)) + options.gen_length  # so that every batch runs the same program
    about = {
        "model": llm.name, "dtype": str(llm.dtype), "slots": options.slots, "capacity": llm.capacity,
        "gen_length": options.gen_length, "prompts": len(prompts),
        "prompts_of": "synthetic word problems" if options.data is None else "gsm8k, 5-shot",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with report.kept(file, rows):
        for method in options.methods:
            rows += of_method(llm, prompts, Settings(method=method, gen_length=options.gen_length, stop=stop), options)
            if file is not None:
                report.write_part(file, settings=about, rows=rows)
    for row in rows:
        print(f"{' '.join(row['case'].values()):>30} {row['metric']:>18}: {row['median']:.4g}", flush=True)
    if file is not None:
        report.finish(file)


def of_method(
    llm: LLM, prompts: Sequence[list[int]], settings: Settings, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of a method: its kinds in turns, and how many programs they are."""
    programs = llm.programs
    llm.generate(prompts[: options.slots], settings)  # compiles, and warms up
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    loads: dict[str, list[Load]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind in KINDS:
            start = time.perf_counter()
            results = decode(llm, prompts, settings, kind, options.slots)
            seconds = time.perf_counter() - start
            speeds[kind].append(sum(len(result.token_ids) for result in results) / seconds)
            loads[kind].append(llm.load)
    method = settings.method
    rows = [row for kind in KINDS for row in figures(method, kind, speeds, loads[kind])]
    return [*rows, report.row({"method": method}, "programs", "programs", llm.programs - programs)]


def decode(llm: LLM, prompts: Sequence[list[int]], settings: Settings, kind: str, slots: int) -> list[Result]:
    """Decode all prompts, in one of the `KINDS`."""
    if kind == "whole batches":
        batches = [prompts[i : i + slots] for i in range(0, len(prompts), slots)]
        return [result for batch in batches for result in llm.generate(batch, settings)]
    stream = llm.stream(prompts, settings, longest_first=kind == "longest first")
    return [one for one in stream if isinstance(one, Result)]


def figures(method: str, kind: str, speeds: dict[str, list[float]], loads: Sequence[Load]) -> list[dict[str, Any]]:
    """The rows of one kind: throughput, also over that of whole batches in the same turn, and what the slots did."""
    row = partial(report.sampled, {"method": method, "batching": kind})
    rows = [row("tokens_per_second", "tokens/s", speeds[kind])]
    if kind == "whole batches":
        return rows
    over = [own / whole for own, whole in zip(speeds[kind], speeds["whole batches"], strict=True)]
    rows.append(row("speedup", "ratio", over, baseline={"name": "whole batches"}))
    if waited := [load.occupancy for load in loads if load.occupancy is not None]:
        rows.append(row("occupancy", "fraction", waited))
    return [*rows, row("host_share", "fraction", [load.host_share for load in loads])]


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
