"""Accuracy and tokens per step of a checkpoint on held-out problems: python -m benchmarks.small_model.evaluate

Word problems count as right when the number after `####` is the gold one; functions when all their tests pass (pass@1).
With both, the figures of all items together follow.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks import report
from benchmarks.small_model import functions, word_problems
from fdllm_jax import LLM, Result, command_line
from fdllm_jax.comparison import variants
from fdllm_jax.evaluation.sandbox import pass_all
from fdllm_jax.settings import PRESETS
from fdllm_jax.tasks import extract_answer

Rows = list[dict[str, Any]]
Samples = dict[tuple[str, str], dict[str, dict[str, Any]]]  # of each prompt, by task and method

# What a comparison at block_length 16 needs, in the words of `fdllm_jax.compare`.
METHODS = (
    "llada", "threshold", "fast-dllm-dual", "flash-cache", "flash-dllm",
    # At about the accuracy of fast-dllm-dual, also with fewer rows in a pass:
    "flash-cache:threshold=0.98", "flash-cache:threshold=0.98,mask_window=16,track_budget=16",
    "flash-dllm:threshold=0.995,gamma=0.98", "flash-dllm:threshold=0.995,gamma=0.98,mask_window=16,track_budget=16",
    # What the options that go beyond the paper gain and lose:
    "flash-dllm:isolation=strict", "flash-dllm:isolation=strict,max_deviation=0.1", "flash-dllm:bonus",
    "flash-dllm:skip_verify", "flash-dllm:order=position",
    # With one-pass verify's narrower windows, and one-pass verify without them:
    "flash-dllm:mask_window=32,track_budget=32", "flash-dllm-onepass:mask_window=64,track_budget=64",
)  # fmt: skip
PROGRAM = "benchmarks.small_model.evaluate"
OWN_PRESETS = ("quality", "balanced", "fast")
MODULES = {"word_problems": word_problems, "functions": functions}  # that make the tasks' items
BASELINES = (
    "llada",
    "fast-dllm-dual",
    "flash-cache",
    "flash-dllm",
)  # what the others' accuracy is compared with, item by item


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, write the results file, and print it as a table; returns the exit code: 0, or 2 for a user's error."""
    p = command_line.Parser(PROGRAM, "Accuracy and tokens per step of a checkpoint on held-out problems.")
    p.add_argument("--problems", type=int, default=2000)
    p.add_argument("--functions", type=int, default=500)
    p.add_argument("--first", type=int, default=0, help="number of the first item of each: others than the default's")
    p.add_argument("--methods", nargs="*", default=METHODS, metavar="METHOD", help="as of fdllm_jax.compare")
    p.add_argument("--presets", nargs="*", choices=tuple(PRESETS), default=OWN_PRESETS, metavar="PRESET")
    p.add_argument("--gen-length", type=command_line.count, default=160)
    p.add_argument("--block-length", type=command_line.count, default=16)
    p.add_argument("--slots", type=command_line.count, default=32)
    command_line.add_model(p, raw=False)
    p.add_argument("--output", type=Path, help="results file (default: benchmarks/results/small_model.json, of all)")
    p.add_argument("--samples", type=Path, help="also write every prompt and text, as JSON lines")
    p.add_argument("--against", type=Path, help="another model's --samples: adds each method's difference to its own")
    return command_line.run(PROGRAM, partial(_run, p, p.parse_args(arguments)))


def _run(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    file = report.file_of("small_model", options, p)
    if options.samples is not None:
        report.check_file("--samples", options.samples)
        for option, its in (("--output", file), ("--against", options.against)):
            if its is not None and its.absolute() == options.samples.absolute():
                raise ValueError(f"--samples {options.samples}: {option} has that name too: give another")
    if min(options.problems, options.functions) < 0 or not options.problems + options.functions:
        raise ValueError("--problems, --functions: expected numbers of at least 0, and not both of them 0")
    if options.first < 0:
        raise ValueError(f"--first {options.first}: expected a number of at least 0")
    other = {} if options.against is None else samples_of(options.against)
    command_line.use_compilation_cache()
    command_line.check_device()
    llm = LLM(options.model, slots=options.slots, dtype=options.dtype, kernels=options.kernels)
    settings_of_run = {"model": llm.name, "dtype": str(llm.dtype), "slots": options.slots, "kernels": options.kernels}
    rows: Rows = []
    if options.samples is not None:
        report.part(options.samples).unlink(missing_ok=True)
    with report.kept(file, rows):
        for found, samples in evaluated(llm, options, other):
            rows += found
            samples = [sample | {"run": settings_of_run} for sample in samples]
            if options.samples is not None:
                with report.part(options.samples).open("a", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
            if file is not None:
                report.write_part(file, settings=settings_of_run, rows=rows)
            for row in found:
                to = f" to {row['baseline']['name']}" if row["baseline"] else ""
                of = f"{row['case']['task']:>14} {row['case']['method']:>68}"
                print(f"{of} {row['metric'] + to:>16}: {row['median']:.4f}", flush=True)
    for one in (file, options.samples):
        if one is not None:
            report.finish(one)


class Outcome(NamedTuple):
    """What a method made of some items: which are right, and how many ended by EOS; tokens, steps and forwards."""

    right: list[bool]
    ended: int
    tokens: int
    steps: int
    forwards: int

    @classmethod
    def of(cls, results: Sequence[Result], right: list[bool]) -> Self:
        """The outcome of these results."""
        numbers = ((r.stop_reason == "eos", len(r.token_ids), r.steps, r.forwards) for r in results)
        return cls(right, *map(sum, zip(*numbers, strict=True)))

    @classmethod
    def together(cls, outcomes: Iterable[Self]) -> Self:
        """Of all their items."""
        right, *numbers = zip(*outcomes, strict=True)
        return cls([ok for its in right for ok in its], *map(sum, numbers))


def rows_of(case: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> Rows:
    """A case's figures, from its method's outcome, which is the last, and its differences to baselines before it."""
    method, of = case["method"], outcomes[case["method"]]
    count, before = len(of.right), [one for one in BASELINES if one in outcomes and one != method]
    return [
        report.proportion(case, "accuracy", sum(of.right), count),
        report.row(case, "tokens_per_step", "tokens", of.tokens / of.steps),
        report.row(case, "tokens_per_forward", "tokens", of.tokens / of.forwards),
        report.row(case, "tokens", "tokens", of.tokens / count),
        report.proportion(case, "ended_by_eos", of.ended, count),
        *(paired(case, outcomes[one].right, of.right, one) for one in before),
    ]


def evaluated(llm: LLM, options: argparse.Namespace, other: Samples) -> Iterator[tuple[Rows, list[dict[str, Any]]]]:
    """Of each task and method, the rows and the samples; then the rows of all items together.

    Raises ValueError where the other model's are not of these.
    """
    counts = {"word_problems": options.problems, "functions": options.functions}
    first = options.first
    made = {task: [MODULES[task].make(first + i, split="test") for i in range(n)] for task, n in counts.items()}
    lengths = argparse.Namespace(gen_length=options.gen_length, block_length=options.block_length)
    chosen, _ = variants(options.methods, options.presets, lengths)
    for task, variant in product(made, chosen if options.against else ()):
        its = other.get((task, variant.label), {})
        if missing := sum(item.question not in its for item in made[task]):
            raise ValueError(
                f"--against {options.against}: {missing} of {counts[task]} {task} have no sample of {variant.label} "
                "there: make it with the same items and methods"
            )
        for key, value in json.loads(json.dumps(variant.settings.used())).items():
            for sample in its.values():
                if sample["settings"].get(key) != value:
                    raise ValueError(
                        f"--against {options.against}: {variant.label} had {key}={sample['settings'].get(key)} there, "
                        f"and has {value} here: make it with the same settings"
                    )
    outcomes: dict[str, dict[str, Outcome]] = {}
    for task, items in made.items():
        count = len(items)
        prompts = [item.question for item in items]
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(llm.compile, prompts), [variant.settings for variant in chosen if count]))
        for variant in chosen if count else ():
            method, settings = variant.label, variant.settings
            results = llm.generate(prompts, settings)
            right = score(task, items, [result.text for result in results])
            case = {"task": task, **settings.used(), "method": method}
            its_outcomes = outcomes.setdefault(task, {})
            its_outcomes[method] = Outcome.of(results, right)
            rows = rows_of(case, its_outcomes)
            if options.against is not None:
                its = [other[task, method][prompt] for prompt in prompts]
                rows.append(paired(case, [sample["right"] for sample in its], right, str(options.against)))
                rows[-1]["baseline"] |= its[0]["run"]
            yield (
                rows,
                [
                    {
                        "task": task,
                        "method": method,
                        "settings": settings.used(),
                        "prompt": prompt,
                        "text": result.text,
                        "right": ok,
                    }
                    for prompt, result, ok in zip(prompts, results, right, strict=True)
                ],
            )
    if len(outcomes) > 1:
        whole: dict[str, Outcome] = {}
        for variant in chosen:
            whole[variant.label] = Outcome.together(its[variant.label] for its in outcomes.values())
            yield rows_of({"task": "together", **variant.settings.used(), "method": variant.label}, whole), []


def samples_of(samples: Path) -> Samples:
    """A run's `--samples`, by task and method, then by prompt. Raises ValueError for a file of other lines."""
    found: Samples = {}
    for number, line in enumerate(command_line.read_text("--against", str(samples)).splitlines(), 1):
        try:
            sample = json.loads(line)
            if not (isinstance(sample["right"], bool) and isinstance(sample["settings"], dict)):
                raise TypeError(sample)
            sample["run"].keys()
            found.setdefault((sample["task"], sample["method"]), {})[sample["prompt"]] = sample
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--against {samples}: line {number} is {line[:40]!r}...: expected a line as --samples writes them, "
                "with task, method, settings, run, prompt and right: make the file anew with --samples"
            ) from error
    return found


def paired(case: Mapping[str, Any], before: Sequence[bool], after: Sequence[bool], baseline: str) -> dict[str, Any]:
    """The difference in accuracy to a baseline on the same items, with its 95 % interval."""
    differences = [int(a) - int(b) for a, b in zip(after, before, strict=True)]
    mean = statistics.fmean(differences)
    half = 1.959964 * statistics.pstdev(differences) / math.sqrt(len(differences))
    return report.row(
        case, "accuracy_difference", "fraction", mean, low=mean - half, high=mean + half, repeats=len(differences),
        baseline={"name": baseline},
    )  # fmt: skip


def score(task: str, items: Sequence[Any], texts: Sequence[str]) -> list[bool]:
    """Whether each item's text is right."""
    if task == "word_problems":
        return [extract_answer(text) == str(item.gold) for text, item in zip(texts, items, strict=True)]
    return pass_all([(text, item.tests) for text, item in zip(texts, items, strict=True)])


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
