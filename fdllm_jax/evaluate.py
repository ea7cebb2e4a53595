"""Command line: `python -m fdllm_jax.evaluate --task NAME --data PATH --output DIR`: a benchmark, item by item."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdllm_jax import command_line
from fdllm_jax.evaluation import sandbox, summary
from fdllm_jax.evaluation.samples import Sample, Samples
from fdllm_jax.evaluation.task import Item, Task
from fdllm_jax.evaluation.tasks import TASKS
from fdllm_jax.options import add_settings, settings_of
from fdllm_jax.settings import Settings

if TYPE_CHECKING:
    from fdllm_jax.engine import LLM
    from fdllm_jax.job import Refusal, Result

PROGRAM = "fdllm_jax.evaluate"
SLOTS = 32


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_line.Parser(
        PROGRAM,
        "Decode a benchmark's prompts and score the responses. An evaluation that was interrupted goes on where it was "
        "when the same command is given again.",
    )
    e = p.add_argument_group("evaluation")
    e.add_argument("--task", required=True, choices=tuple(TASKS), metavar="NAME", help=f"of {', '.join(TASKS)}")
    e.add_argument("--data", required=True, type=Path, metavar="PATH", help="the data's JSON lines, or their folder")
    e.add_argument("--limit", type=command_line.count, metavar="N", help="only the first N items")
    e.add_argument("--slots", type=_slots, default=SLOTS, metavar="N", help=f"side by side, or auto ({SLOTS})")
    e.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put prompts through the checkpoint's chat template (default: as the task is meant)",
    )
    e.add_argument(
        "--output", required=True, type=command_line.folder, metavar="DIR", help="for samples.jsonl and summary.json"
    )
    command_line.add_model(p, raw=False)
    add_settings(p)
    return p


def _slots(text: str) -> int | str:
    return text if text == "auto" else command_line.count(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a user's error."""
    return command_line.run(PROGRAM, partial(_evaluate, parser().parse_args(arguments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be decoded, and how. data: a digest of all items of the data, also those beyond a limit."""

    task: Task
    items: Sequence[Item]
    data: str
    settings: Settings
    chat_template: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Plan":
        """The plan of a command line. Raises ValueError and FileNotFoundError for a user's errors."""
        task = TASKS[options.task]
        own = {} if options.gen_length is not None else {"gen_length": task.gen_length}
        settings = settings_of(options, **own)
        settings = replace(settings, stop=tuple(dict.fromkeys((*settings.stop, *task.stop))))
        chat = task.chat_template if options.chat_template is None else options.chat_template
        items = task.load(options.data)
        return cls(task=task, items=items[: options.limit], data=digest(items), settings=settings, chat_template=chat)

    def of_item(self, index: int) -> Settings:
        """The settings of an item: its seed does not depend on what else is decoded."""
        return replace(self.settings, seed=(self.settings.seed + index) % 2**32)


def _evaluate(options: argparse.Namespace) -> None:
    plan = Plan.of(options)
    record = plan.task.record()
    if plan.task.runs_code:
        record["sandbox"] = sandbox.isolation()
    command_line.use_compilation_cache()
    command_line.check_device()
    from fdllm_jax.engine import LLM, dtype_of, name_of

    case = {"task": plan.task.name, "method": plan.settings.method, **plan.settings.used()}
    case |= {"chat_template": plan.chat_template, "shots": plan.task.shots}
    about = {"model": name_of(options.model), "dtype": str(dtype_of(options.dtype)), "kernels": options.kernels}
    settings = {**record, **case, **about, "data_sha256": plan.data}
    if (options.output / summary.SUMMARY).is_dir():
        raise ValueError(f"--output {options.output}: {summary.SUMMARY} in it is a directory")
    with Samples(options.output, settings) as samples, command_line.at_interrupt(partial(_kept, plan, samples)):
        slots = options.slots if options.slots == "auto" else min(options.slots, len(plan.items))
        llm = LLM(options.model, slots=slots, dtype=options.dtype, kernels=options.kernels)
        evaluate(llm, plan, samples)
        chosen = [sample for sample in samples.all if sample.index < len(plan.items)]
        rows = summary.write(options.output, settings, case, chosen, complete=len(chosen) == len(samples.all))
    for row in rows:
        _print(row)
    if llm.load.seconds:
        print(f"{PROGRAM}: slots: {llm.load}", file=sys.stderr)
    if refused := [sample.key for sample in chosen if sample.stop_reason == "refused"]:
        which = f"{', '.join(refused[:3])}{' and others' * (len(refused) > 3)}"
        print(f"{PROGRAM}: {len(refused)} prompts do not fit and count as wrong: {which}", file=sys.stderr)


def _kept(plan: Plan, samples: Samples) -> str:
    return f"{len(samples.done)} of {len(plan.items)} items are finished and kept, the same command goes on"


def digest(items: Sequence[Item]) -> str:
    """What tells items from others: SHA-256 of their keys, prompts and documents."""
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps([item.key, item.prompt, item.document], sort_keys=True, default=str).encode() + b"\n")
    return found.hexdigest()


def evaluate(llm: "LLM", plan: Plan, samples: Samples) -> None:
    """Decode and score the items that have no sample yet; the samples get each as it is finished.

    Those whose prompts do not fit get a sample without tokens, and count as wrong.
    """
    from fdllm_jax.job import Refusal

    todo = [index for index in range(len(plan.items)) if index not in samples.done]
    if not todo:
        return
    context = llm.config.max_sequence_length
    if plan.settings.gen_length >= context:
        raise ValueError(
            f"--gen-length {plan.settings.gen_length} leaves no room for a prompt: the model has {context} positions"
        )
    prompts, settings = [plan.items[i].prompt for i in todo], [plan.of_item(i) for i in todo]
    told = False
    pending: dict[Future[dict[str, float]], Sample] = {}
    stream = llm.stream(prompts, settings, raw=not plan.chat_template, longest_first=True)
    slots = 0 if llm.plan is None else llm.plan.slots  # no plan: no prompt fits
    with _progress(len(plan.items), len(plan.items) - len(todo)) as advance, sandbox.pool() as pool:
        for seconds, one in _timed(llm, stream):
            index = todo[one.index]
            item = plan.items[index]
            if isinstance(one, Refusal):
                if not told:
                    print(f"{PROGRAM}: item {item.key}: {one.reason}", file=sys.stderr)
                    told = True
                samples.append(_refused(index, item, plan.task, seconds, slots))
                advance(0)
                continue
            pending[pool.submit(plan.task.score, item, one.text)] = _sample(index, item, one, seconds, slots)
            for future in [future for future in pending if future.done()]:
                advance(_append(samples, pending.pop(future), future))
        for future, sample in pending.items():
            advance(_append(samples, sample, future))


def _append(samples: Samples, sample: Sample, score: "Future[dict[str, float]]") -> int:
    samples.append(replace(sample, scores=score.result()))
    return sample.tokens


def _timed(llm: "LLM", stream: "Iterator[Result | Refusal]") -> "Iterator[tuple[float, Result | Refusal]]":
    """Each with the seconds since the one before it, less compilation."""
    last, compiled = time.perf_counter(), llm.compile_seconds
    for one in stream:
        now = time.perf_counter()
        yield now - last - (llm.compile_seconds - compiled), one
        last, compiled = now, llm.compile_seconds


def _sample(index: int, item: Item, result: "Result", seconds: float, slots: int) -> Sample:
    return Sample(
        index=index, key=item.key, prompt=item.prompt, text=result.text, tokens=len(result.token_ids),
        steps=result.steps, forwards=result.forwards, seconds=seconds, slots=slots,
        stop_reason=result.stop_reason, scores={},
    )  # fmt: skip


def _refused(index: int, item: Item, task: Task, seconds: float, slots: int) -> Sample:
    return Sample(
        index=index, key=item.key, prompt=item.prompt, text="", tokens=0, steps=0, forwards=0, seconds=seconds,
        slots=slots, stop_reason="refused", scores=dict.fromkeys(task.metrics, 0.0),
    )  # fmt: skip


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; call what it yields with the tokens of each finished item."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    start, tokens = time.perf_counter(), 0
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("", total=total, completed=done, speed="")

        def advance(count: int) -> None:
            nonlocal tokens
            tokens += count
            progress.update(bar, advance=1, speed=f"{tokens / (time.perf_counter() - start):.0f} tokens/s")

        yield advance


def _print(row: Mapping[str, Any]) -> None:
    name, value, unit = row["metric"].replace("_", " "), row["median"], row["unit"]
    if unit == "fraction":
        score = row["case"].get("score") if name == "accuracy" else None
        name += f" ({score})" if score else ""
        print(f"{name:>28}: {value:.1%} ({row['low']:.1%} to {row['high']:.1%}) of {row['repeats']}")
    else:
        print(f"{name:>28}: {value:.2f}" if isinstance(value, float) else f"{name:>28}: {value}")


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
