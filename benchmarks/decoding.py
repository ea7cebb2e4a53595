"""Decoding, end to end and part by part: python -m benchmarks.decoding --model PATH

Of each method, batch, response and prompt length: a batch begun together, timed while all its slots are live (what an
iteration takes, and decoded tokens per second) and in its first step (the prefill, and what it verifies); what a call
of the device costs that steps nothing (there is one for each sequence that ends; the tokens per second include it, the
times do not); all prompts through slots that are refilled (tokens per second with prefill, accuracy); and the forwards
of an iteration timed alone at the same shapes, beside their floors. What they leave of the iteration is its rest (of a
verify pass its share: it does not run where there is nothing to verify): with fast-dllm-dual, also the passes over
everything at a block's start.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import decoding_plot, forward, replay, report, roofline
from benchmarks.decoding_batch import Timed, timed
from benchmarks.decoding_profile import profiled
from benchmarks.expand import shape_of as shape_named
from benchmarks.forward_parts import Lengths, Part, parts, shape_of
from benchmarks.paper.suites import SUITES, Suite
from fdllm_jax import LLM, Settings, command_line
from fdllm_jax.batching import Program
from fdllm_jax.cache import allocate
from fdllm_jax.compare import batch_size, encode
from fdllm_jax.comparison import Variant, variants
from fdllm_jax.evaluation.task import Item
from fdllm_jax.memory import ran_out
from fdllm_jax.settings import PRESETS

Rows = list[dict[str, Any]]
Values = dict[tuple[str, str | None], list[float]]  # by metric and part

PROGRAM = "benchmarks.decoding"
METHODS = ("fast-dllm-dual", "flash-cache", "flash-dllm", "flash-dllm:mask_window=32,track_budget=32")
OWN_PRESETS = ("quality", "balanced", "fast")
FEWEST = 32  # texts of which an iteration and the decode tokens per second are measured
FORWARDS = {
    "flash-dllm": ("draft", "verify"),
    "flash-cache": ("draft",),
    "flash-dllm-onepass": ("one-pass",),
    "fast-dllm-dual": ("block",),
}  # of an iteration, by method


class Case(NamedTuple):
    """Prompts of one number of examples and one response length, the methods that decode them, what to say of it."""

    items: Sequence[Item]
    ids: Sequence[list[int]]
    variants: Sequence[Variant]
    about: dict[str, Any]


def of_batches(
    program: Program, llm: LLM, prompts: Sequence[list[int]], settings: Settings, repeats: int, *, lockstep: bool
) -> Values:
    """Of batches of the prompts, one after the other: a sample is of one, or of as many as `FEWEST` texts take.

    One more warms up. A sample's figures are of the sums over its batches.
    """
    source, values = cycle(prompts), dict[tuple[str, str | None], list[float]]()
    each = -(-FEWEST // (repeats * program.slots))

    def batch() -> Timed:
        return timed(program, llm, list(islice(source, program.slots)), settings, lockstep=lockstep)

    batch()
    for _ in range(repeats):
        found = [batch() for _ in range(each)]
        live, call, steps, tokens, verified = (
            sum(n)
            for n in zip(*((one.live, one.call, one.steps, one.tokens, one.verified) for one in found), strict=True)
        )
        values.setdefault(("time", "call"), []).append(call / each)
        values.setdefault(("time", "prefill"), []).append((sum(one.first for one in found) - call) / each)
        if steps:
            values.setdefault(("time", "iteration"), []).append((live - call) / steps)
            values.setdefault(("decode_tokens_per_second", None), []).append(tokens / live)
            values.setdefault(("share_of_iterations", "verify"), []).append(verified / steps)
    return values


def of_stream(
    llm: LLM, prompts: Sequence[list[int]], items: Sequence[Item], suite: Suite, settings: Settings
) -> tuple[Values, list[float]]:
    """Of all prompts through refilled slots; and the scores of the responses."""
    start = time.perf_counter()
    results = llm.generate(prompts, settings)
    seconds = time.perf_counter() - start
    tokens, steps, forwards = (
        sum(n) for n in zip(*((len(r.token_ids), r.steps, r.forwards) for r in results), strict=True)
    )
    right = [suite.task.score(item, r.text)[suite.task.metrics[0]] for item, r in zip(items, results, strict=True)]
    values: Values = {
        ("tokens_per_second", None): [tokens / seconds],
        ("tokens_per_step", None): [tokens / steps],
        ("tokens_per_forward", None): [tokens / forwards],
    }
    return values, right


def of_parts(llm: LLM, settings: Settings, slots: int, lengths: Lengths, repeats: int) -> dict[str, tuple[Any, Part]]:
    """The forwards of an iteration by name, each timed alone: its spread, and what it is."""
    wanted = FORWARDS.get(settings.method, ())
    chosen = [part for part in parts(llm.config, slots, lengths) if part.name in wanted]
    cache = allocate(llm.config, slots=slots, capacity=lengths.capacity, dtype=llm.dtype)
    found = {}
    for part in chosen:
        figure, cache = forward.measure(forward.compile(llm.model, part, cache), cache, repeats)
        found[part.name] = figure, part
    return found


def lengths_of(prompts: Sequence[list[int]], settings: Settings, capacity: int) -> Lengths:
    """The shapes of an iteration of a batch of these prompts."""
    value = settings.value
    return Lengths(
        prompt=_mean_length(prompts), response=settings.gen_length, capacity=capacity,
        tracked=value("track_budget") or 0, masked=value("mask_window") or settings.block_length,
        block=settings.block_length, isolation=value("isolation") or "paper",
    )  # fmt: skip


def measure(
    llm: LLM, suite: Suite, variant: Variant, batch: int, items: Sequence[Item], ids: Sequence[list[int]],
    case: dict[str, Any], repeats: int, *, profile: bool,
) -> Rows:  # fmt: skip
    """The rows of one method at one batch, which is the engine's number of slots."""
    settings, device = variant.settings, roofline.DEVICES.get(report.hardware())
    program = llm.compile(ids, settings)
    case = case | {"name": variant.label, **settings.used(), "batch": batch}

    def row(metric: str, unit: str, samples: Sequence[float], part: str | None = None, **more: Any) -> dict[str, Any]:
        return report.sampled(case | ({"part": part} if part else {}), metric, unit, samples, **more)

    units = {
        "time": "s", "share_of_iterations": "fraction", "decode_tokens_per_second": "tokens/s",
        "tokens_per_second": "tokens/s",
    }  # fmt: skip
    batches = of_batches(program, llm, ids, settings, repeats, lockstep="replayed" in case)
    if "verify" not in FORWARDS.get(settings.method, ()):
        batches.pop(("share_of_iterations", "verify"), None)
    values, right = of_stream(llm, ids, items, suite, settings)
    lengths = lengths_of(ids, settings, program.capacity)
    found = of_parts(llm, settings, batch, lengths, repeats)
    work = {name: part.work for name, (_, part) in found.items()}
    length = lengths.prompt + lengths.response
    work["prefill"] = roofline.forward(shape_of(llm.config), rows=length, slots=batch, kv_length=length)
    floors: dict[tuple[str, str | None], float] = {}
    if device is not None:
        floors |= {("time", name): its.floor(device) for name, its in work.items()}
    rows = [
        row(metric, units.get(metric, "tokens"), v, part, floor=floors.get((metric, part)))
        for (metric, part), v in (batches | values).items()
    ]
    if "replayed" not in case:
        rows.append(report.proportion(case, "accuracy", sum(right), len(right)))
    rows.append(report.row(case, "planned_memory", "B", program.plan.total))
    iteration = batches.get(("time", "iteration"))
    for name, (figure, _) in found.items():
        time = {"value": figure.pop("median"), "floor": floors.get(("time", name))}
        rows.append(report.row(case | {"part": name}, "time", "s", **time, **figure))
    if iteration and found:
        forwards = sum(decoding_plot.in_iteration(rows, name) or 0.0 for name in found)
        rows.append(row("time", "s", [one - forwards for one in iteration], "rest"))
    if profile and (of_device := profiled(program, ids[:batch], settings)) is not None:
        rows.append(row("device_span", "s", [of_device.span]))
        for name, (seconds, launches) in of_device.largest().items():
            of_kernel = case | {"kernel": name}
            rows.append(report.row(of_kernel, "device_time", "s", seconds))
            rows.append(report.row(of_kernel, "launches", "launches", launches))
    return rows


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_line.Parser(PROGRAM, "Decoding, end to end and part by part.")
    many: dict[str, Any] = {"nargs": "+", "type": command_line.count, "metavar": "N"}
    batches: dict[str, Any] = many | {"type": batch_size}
    p.add_argument("--task", choices=tuple(SUITES), default="word_problems", metavar="TASK", help="whose prompts")
    p.add_argument("--data", type=Path, help="the task's files, unless it is synthetic")
    p.add_argument("--methods", nargs="*", default=METHODS, metavar="METHOD", help="as of fdllm_jax.compare")
    of_presets = f"presets beside the methods ({' '.join(OWN_PRESETS)}); none after a bare --presets"
    p.add_argument(
        "--presets", nargs="*", choices=tuple(PRESETS), default=OWN_PRESETS, metavar="PRESET", help=of_presets
    )
    p.add_argument("--batch", **batches, default=[1, 8, 32], help="sequences side by side (1 8 32)")
    p.add_argument("--gen-length", **many, default=[256], help="response positions (256)")
    p.add_argument("--block-length", type=command_line.count, default=16, metavar="N", help="(16)")
    p.add_argument(
        "--shots", nargs="+", type=_shots, metavar="N",
        help="worked examples before each prompt (8, or as many as the task has)",
    )  # fmt: skip
    p.add_argument("--problems", type=command_line.count, default=64, metavar="N", help="prompts of each case (64)")
    p.add_argument("--repeats", type=command_line.count, default=3, metavar="N", help="samples of each case (3)")
    p.add_argument("--profile", action="store_true", help="also an iteration's device time by kernel (on a GPU)")
    command_line.add_model(p, raw=False)
    p.add_argument(
        "--random", type=shape_named, metavar="SHAPE",
        help="random weights in the model's place, llada-8b or D,LAYERS,HEADS,MLP,VOCAB, with a --schedule",
    )  # fmt: skip
    p.add_argument(
        "--schedule", nargs=2, type=int, metavar=("DRAFTED", "VERIFIED"),
        help="tokens that a step of --random commits (DRAFTED of a one-pass method's first step only)",
    )  # fmt: skip
    p.add_argument("--output", type=command_line.folder, metavar="DIR", help="for decoding.json and decoding.png")
    return p


def _shots(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code: 0, or 2 for a user's error."""
    return command_line.run(PROGRAM, partial(_run, parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> None:
    suite = SUITES[options.task]
    if suite.is_synthetic and options.data is not None:
        raise ValueError(f"--data {options.data}: task {suite.name} is made, not read: leave it out")
    if options.shots and suite.with_shots is None:
        raise ValueError(f"--shots: the prompts of task {suite.name} have their own number of examples: leave it out")
    variants(options.methods, options.presets, lengths_asked(options, options.gen_length[0]))  # refused before all else
    items = suite.items(options.data, options.problems)[: options.problems]
    if len(items) < max(options.batch):
        raise ValueError(
            f"{len(items)} problems are too few for --batch {max(options.batch)}: give at least as many --problems"
        )
    command_line.use_compilation_cache()
    command_line.check_device()
    if options.profile and jax.default_backend() != "gpu":
        raise ValueError(
            f"--profile: the device's time is that of an NVIDIA GPU, and JAX runs on {jax.default_backend()}"
        )
    engine, about = engine_of(options)
    about |= {"kernels": options.kernels, "problems": len(items)}
    cases = cases_of(engine(1), suite, items, options)
    rows: Rows = []
    file = None if options.output is None else command_line.made(options.output) / "decoding.json"
    with report.kept(file, rows):
        for found in measured(engine, suite, cases, options):
            rows += found
            print(decoding_plot.line(found), flush=True)
            if file is not None:
                report.write_part(file, settings=about, rows=rows)
    if not rows:
        raise ValueError("nothing was measured: give a smaller --batch")
    if file is not None:
        report.finish(file)
        title = f"{about['model']}, {about['dtype']}, {report.hardware()}; {len(items)} {suite.name}"
        title += " (synthetic)" if suite.is_synthetic else ""
        try:
            decoding_plot.write(file.with_suffix(".png"), rows, title)
        except ImportError as error:
            print(f"{PROGRAM}: no decoding.png: {error}; pip install 'fdllm-jax[plot]'", file=sys.stderr)


def lengths_asked(options: argparse.Namespace, gen_length: int) -> argparse.Namespace:
    """The lengths of a case, as `variants` takes them."""
    return argparse.Namespace(gen_length=gen_length, block_length=options.block_length)


def engine_of(options: argparse.Namespace) -> tuple[Callable[[int], LLM], dict[str, Any]]:
    """Engines by their number of slots; and what the model is."""
    if (options.random is None) != (options.schedule is None):
        raise ValueError("--random and --schedule DRAFTED VERIFIED belong together: give both, or neither")
    if options.random is not None:
        if options.model is not None:
            raise ValueError("--random stands in --model's place: give one of the two")
        schedule = replay.Schedule(*options.schedule)
        if schedule.drafted < 1 or schedule.verified < 0 or sum(schedule) > options.block_length:
            raise ValueError(
                f"--schedule {schedule.drafted} {schedule.verified}: expected at least 1 and 0 tokens a step, and "
                f"together no more than --block-length {options.block_length}"
            )
        how = {"block_length": options.block_length, "dtype": options.dtype, "kernels": options.kernels}
        engine = replay.engine(options.random, schedule, **how)
        name = f"random weights of {','.join(map(str, options.random))}, commits replayed: "
        name += f"{schedule.drafted} drafted and {schedule.verified} verified a step (one-pass: drafted in the first)"
        return engine, {"model": name, "dtype": str(engine(1).dtype)}
    llm = LLM(options.model, dtype=options.dtype, kernels=options.kernels)

    def with_slots(slots: int) -> LLM:
        llm.slots = slots
        return llm

    return with_slots, {"model": llm.name, "dtype": str(llm.dtype)}


def cases_of(llm: LLM, suite: Suite, items: Sequence[Item], options: argparse.Namespace) -> list[Case]:
    """A case for each number of examples and response length. Raises ValueError for what cannot be measured."""
    asked = (options.shots or [8]) if suite.with_shots is not None else [suite.task.shots]
    if max(asked) > (most := llm.config.max_sequence_length):
        raise ValueError(f"--shots {max(asked)}: the model's context of {most} tokens does not hold as many examples")
    cases, left_out = [], dict[str, None]()
    for shots, gen_length in product(dict.fromkeys(asked), dict.fromkeys(options.gen_length)):
        chosen, _ = variants(options.methods, options.presets, lengths_asked(options, gen_length))
        shown = items if suite.with_shots is None else suite.with_shots(items, shots)
        ids = encode(llm, [item.prompt for item in shown], gen_length, raw=not suite.task.chat_template)
        about = {"task": suite.name, "synthetic": suite.is_synthetic, "shots": shots}
        about |= {"prompt_tokens": _mean_length(ids)}
        if options.random is not None:
            about["replayed"] = options.schedule
            left_out |= dict.fromkeys(one.label for one in chosen if one.settings.method not in replay.METHODS)
            chosen = [one for one in chosen if one.settings.method in replay.METHODS]
        cases.append(Case(shown, ids, chosen, about))
    if left_out:
        print(f"{PROGRAM}: {', '.join(left_out)} cannot be replayed: left out", file=sys.stderr)
    if not any(case.variants for case in cases):
        raise ValueError(f"none of the methods can be replayed: expected some of {', '.join(replay.METHODS)}")
    return cases


def measured(
    engine: Callable[[int], LLM], suite: Suite, cases: Sequence[Case], options: argparse.Namespace
) -> Iterator[Rows]:
    """The rows of each case, batch and method; what runs out of memory is left out with a note."""
    for items, ids, chosen, about in cases:
        for batch in dict.fromkeys(options.batch):
            llm = engine(batch)
            with ThreadPoolExecutor() as pool:  # what fails does so again when it is measured
                wait([pool.submit(llm.compile, ids, variant.settings) for variant in chosen])
            for variant in chosen:
                try:
                    yield measure(
                        llm, suite, variant, batch, items, ids, about, options.repeats, profile=options.profile
                    )
                except RuntimeError as error:
                    if not ran_out(error):
                        raise
                    print(f"{variant.label} at batch {batch}: out of memory, left out", file=sys.stderr)


def _mean_length(ids: Sequence[list[int]]) -> int:
    return round(sum(map(len, ids)) / len(ids))


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
