"""Command line: `python -m fdllm_jax.compare --output DIR`: several methods on the same prompts, with one engine."""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdllm_jax import command_line, report, tasks
from fdllm_jax.comparison import SWEPT, Measurement, Variant, advice, agreement, sweep_of, uncached, variants
from fdllm_jax.options import add_settings
from fdllm_jax.settings import METHODS, PRESETS, Settings

if TYPE_CHECKING:
    from fdllm_jax.engine import LLM
    from fdllm_jax.job import Result

PROGRAM = "fdllm_jax.compare"
FILE = "compare.json"  # of the results, in the output folder
MOST_BATCH = 4096
DEFAULT_METHODS = ("flash-dllm", "flash-dllm-onepass", "flash-cache", "fast-dllm-dual", "threshold", "llada")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A variant's results at a batch, one of each prompt; of each repeat, the tokens per second."""

    variant: Variant
    batch: int
    results: "Sequence[Result]"
    speeds: Sequence[float]
    peak_memory: int | None


def parser() -> argparse.ArgumentParser:
    """The command line's options; those of `Settings` keep their names and defaults."""
    p = command_line.Parser(
        PROGRAM,
        "Compare decoding methods on the same prompts: accuracy, speed, and agreement with decoding without a cache. "
        "Without prompts, on a few built-in word problems.",
    )
    command_line.add_prompts(p)
    p.add_argument(
        "--tasks",
        metavar="FILE.jsonl",
        help='prompts with gold answers, as lines of {"question": ..., "answer": ...}: the number after ####, or the '
        "whole answer, is compared with the number after #### of the response",
    )
    p.add_argument("--limit", type=command_line.count, metavar="N", help="only the first N prompts")
    p.add_argument(
        "--output", required=True, type=command_line.folder, metavar="DIR", help="for compare.json and compare.png"
    )
    command_line.add_model(p)
    c = p.add_argument_group("comparison")
    c.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"of {', '.join(METHODS)} (default, where no preset is given: {' '.join(DEFAULT_METHODS)}); its own "
        "options may follow: flash-dllm:threshold=0.95,gamma=0.9",
    )
    c.add_argument(
        "--presets", nargs="+", default=[], choices=tuple(PRESETS), metavar="PRESET", help=f"of {', '.join(PRESETS)}"
    )
    c.add_argument(
        "--sweep",
        nargs="+",
        metavar=("NAME", "VALUE"),
        help=f"an option ({' | '.join(SWEPT)}) and its values, for every method that uses it",
    )
    c.add_argument(
        "--batch", nargs="+", type=batch_size, default=[1, 8], metavar="N", help="sequences side by side (default: 1 8)"
    )
    c.add_argument("--repeats", type=command_line.count, default=3, metavar="N", help="timed runs of each (default: 3)")
    add_settings(p, method=False)
    return p


def batch_size(text: str) -> int:
    """The type of an option that is a batch size."""
    if (number := command_line.count(text)) <= MOST_BATCH:
        return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected at most {MOST_BATCH}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a user's error."""
    return command_line.run(PROGRAM, partial(_compare, parser().parse_args(arguments)))


def _compare(options: argparse.Namespace) -> None:
    methods = options.methods or (() if options.presets else DEFAULT_METHODS)
    chosen, notes = variants(methods, options.presets, options, sweep_of(options.sweep))
    prompts, golds = _prompts(options)
    batches = sorted(set(options.batch))
    if (command_line.made(options.output) / FILE).is_dir():
        raise ValueError(f"--output {options.output}: {FILE} in it is a directory")
    if len(prompts) < batches[-1]:
        notes.append(f"fewer prompts ({len(prompts)}) than a batch of {batches[-1]}: repeated to fill it, scored once")
    for note in notes:
        _say(note)

    command_line.use_compilation_cache()
    command_line.check_device()
    from rich.console import Console

    from fdllm_jax.engine import LLM
    from fdllm_jax.memory import ran_out

    llm = LLM(options.model, dtype=options.dtype, kernels=options.kernels)
    ids = encode(llm, prompts, chosen[0].settings.gen_length, raw=options.raw)
    settings = {
        "model": llm.name,
        "dtype": str(llm.dtype),
        "kernels": options.kernels,
        "raw": options.raw,
        "tasks": options.tasks or ("built-in" if golds else None),
        "prompts": len(prompts),
    }

    def save(measurements: Sequence[Measurement]) -> None:
        rows = [row for m in measurements for row in m.rows().values()]
        report.write(options.output / FILE, settings=settings, rows=rows)

    with Console(stderr=True).status("") as status:
        runs: list[Run] = []
        done: list[Measurement] = []
        for batch in batches:
            llm.slots = batch
            status.update(f"compiling for batch {batch}")
            with ThreadPoolExecutor() as pool:
                # One that fails does so again when it is decoded, and is dealt with there.
                wait([pool.submit(llm.compile, longest(ids, batch), variant.settings) for variant in chosen])
            for variant in chosen:
                status.update(f"{variant.label}, batch {batch} ({len(runs) + 1} of {len(chosen) * len(batches)})")
                try:
                    runs.append(decode(llm, ids, variant, batch, options.repeats))
                except RuntimeError as error:
                    if not ran_out(error):
                        raise
                    _say(f"{variant.label} at batch {batch}: out of memory, left out")
                    continue
                done.append(measured(runs[-1], golds, {}))
                save(done)  # an interrupted comparison keeps what it has measured
                progress = f"{len(runs)} of {len(chosen) * len(batches)}"
                _say(f"{variant.label}, batch {batch}: {done[-1].speed:.1f} tokens/s, {progress}")
        status.update("decoding without a cache, to compare with")
        references = reference_tokens(llm, ids, runs, batches[-1])
    if not runs:
        raise ValueError("out of memory: give a smaller --batch, shorter prompts, or a smaller --gen-length")
    measurements = [measured(run, golds, references) for run in runs]

    save(measurements)
    title = f"{llm.name}, {llm.dtype}, {report.hardware()}, {len(prompts)} prompts"
    _plot(options.output / "compare.png", measurements, title)
    _print_table(measurements, several=len(runs) > 1)
    if len(chosen) > 1:
        print(advice(measurements))


def _prompts(options: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """The prompts, and their gold answers where there are any."""
    prompts = command_line.read_prompts(options.prompt, options.prompt_file)
    if prompts and options.tasks is not None:
        raise ValueError("prompts and --tasks were given: expected one of the two, as prompts have no gold answers")
    if prompts:
        return prompts[: options.limit], None
    problems: Sequence[tasks.Task] = tasks.EXAMPLES
    if options.tasks is not None:
        lines = command_line.read_text("--tasks", options.tasks)
        try:
            problems = tasks.parse_tasks(lines)
        except ValueError as error:
            raise ValueError(f"--tasks {options.tasks}: {error}") from error
    problems = problems[: options.limit]
    return [task.question for task in problems], [task.gold for task in problems]


def encode(llm: "LLM", prompts: Sequence[str], gen_length: int, *, raw: bool) -> list[list[int]]:
    """Token ids of the prompts. Raises ValueError for those that leave no room for a response."""
    ids = [llm.tokenizer.encode_raw(prompt) if raw else llm.tokenizer.encode_chat(prompt) for prompt in prompts]
    room = llm.config.max_sequence_length - gen_length
    if long := [f"{i} has {len(prompt)} tokens" for i, prompt in enumerate(ids) if len(prompt) > room]:
        context = llm.config.max_sequence_length
        raise ValueError(
            f"prompt {', '.join(long)}: with {gen_length=} more than the model's context, {context}. Shorten the "
            "prompt or gen_length"
        )
    return ids


def decode(llm: "LLM", prompts: Sequence[list[int]], variant: Variant, batch: int, repeats: int) -> Run:
    """Decode all prompts, `batch` side by side, `repeats` times, after a warm-up of one full batch.

    Fewer prompts than the batch are repeated to fill it. The time holds prefill and no compilation.
    """
    llm.slots = batch
    before = _peak_memory()
    llm.generate(longest(prompts, batch), variant.settings)
    filled = list(islice(cycle(prompts), max(batch, len(prompts))))
    results, speeds = [], []
    for _ in range(repeats):
        compiled, start = llm.compile_seconds, time.perf_counter()
        results = llm.generate(filled, variant.settings)
        seconds = time.perf_counter() - start - (llm.compile_seconds - compiled)
        speeds.append(sum(len(result.token_ids) for result in results) / seconds)
    after = _peak_memory()
    # The device counts the highest of the whole process: it is this run's own where the run has raised it.
    peak = after if after is not None and after > (before or 0) else None
    return Run(variant=variant, batch=batch, results=results[: len(prompts)], speeds=speeds, peak_memory=peak)


def longest(prompts: Sequence[list[int]], batch: int) -> list[list[int]]:
    """A full batch of the longest prompt."""
    return [max(prompts, key=len)] * batch


def _peak_memory() -> int | None:
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def reference_tokens(
    llm: "LLM", prompts: Sequence[list[int]], runs: Sequence[Run], batch: int
) -> dict[Settings, list[list[int]]]:
    """Response tokens of the uncached decodings that the runs are to agree with, each at `batch`."""
    from fdllm_jax.memory import ran_out

    decoded = {run.variant.settings: [r.token_ids for r in run.results] for run in runs if run.batch == batch}
    references: dict[Settings, list[list[int]]] = {}
    for run in runs:
        settings = uncached(run.variant.settings)
        if settings is None or settings in references:
            continue
        if settings not in decoded:
            llm.slots = batch
            try:
                decoded[settings] = [result.token_ids for result in llm.generate(prompts, settings)]
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                _say(f"{settings.method} at batch {batch}: out of memory, so no agreement with it")
                continue
        references[settings] = decoded[settings]
    return references


def measured(run: Run, golds: Sequence[str] | None, references: dict[Settings, list[list[int]]]) -> Measurement:
    """A run, scored."""
    right = agreements = None
    if golds is not None:
        right = [tasks.extract_answer(result.text) == gold for result, gold in zip(run.results, golds, strict=True)]
    reference = uncached(run.variant.settings)
    if reference in references:
        agreements = [agreement(r.token_ids, t) for r, t in zip(run.results, references[reference], strict=True)]
    return Measurement(
        variant=run.variant,
        batch=run.batch,
        right=right,
        agreements=agreements,
        tokens=sum(len(result.token_ids) for result in run.results),
        steps=sum(result.steps for result in run.results),
        forwards=sum(result.forwards for result in run.results),
        speeds=run.speeds,
        peak_memory=run.peak_memory,
    )


def _plot(file: Path, measurements: Sequence[Measurement], title: str) -> None:
    try:
        from fdllm_jax.comparison_plot import write_plot

        if not write_plot(file, measurements, title=title):
            _say(f"no {file.name}: there are neither gold answers nor uncached decodings to plot")
    except ImportError as error:
        _say(f"no {file.name}: {error}; pip install 'fdllm-jax[plot]'")


def _print_table(measurements: Sequence[Measurement], *, several: bool) -> None:
    """Print the figures: on a terminal ruled and fitted to it, else plain text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = {
        "accuracy": lambda figure: f"{figure['median']:.1%} ({figure['low']:.1%} to {figure['high']:.1%})",
        "agreement": lambda figure: f"{figure['median']:.1%}",
        "tokens_per_step": lambda figure: f"{figure['median']:.2f}",
        "tokens_per_forward": lambda figure: f"{figure['median']:.2f}",
        "tokens_per_second": lambda figure: f"{figure['median']:.1f}",
        "peak_memory": lambda figure: f"{figure['median'] / 1e9:.2f} GB",
    }
    figures = [m.rows() for m in measurements]
    columns = {metric: text for metric, text in columns.items() if any(metric in rows for rows in figures)}
    terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in ("batch", *(metric.replace("_per_", "\n/" if terminal else "/") for metric in columns)):
        table.add_column(heading.replace("/second", "/s").replace("_", " "), justify="right")
    for m, rows in zip(measurements, figures, strict=True):
        cells: list[Any] = [text(rows[metric]) if metric in rows else "-" for metric, text in columns.items()]
        table.add_row(m.variant.label, str(m.batch), *cells)
    Console(width=None if terminal else 200, highlight=False).print(table)
    if "peak_memory" in columns and several:
        print("Peak memory is the whole process's: shown where a run raised it. To see a method's own, run it alone.")


def _say(note: str) -> None:
    print(f"{PROGRAM}: {note}", file=sys.stderr)


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
