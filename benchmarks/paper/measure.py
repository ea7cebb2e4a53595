"""A cell's figures: its prompts decoded and timed, the responses scored."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import report
from benchmarks.paper.grid import Cell, Rows, Table
from benchmarks.paper.published import baseline
from benchmarks.paper.suites import sample
from fdllm_jax.compare import decode, encode, longest, measured
from fdllm_jax.engine import LLM
from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.task import Item, Task
from fdllm_jax.settings import Settings

Scorer = Callable[[Task, Sequence[Item], Sequence[str]], list[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A sample of a task's items, and their prompts as token ids."""

    items: Sequence[Item]
    ids: Sequence[list[int]]


def prompts(llm: LLM, cell: Cell, items: Sequence[Item], limit: int | None, seeds: int | None) -> list[Prompts]:
    """What a cell decodes: the first `limit` items, or a sample for each seed. Raises ValueError where they don't fit.

    items: all of the task's.
    """
    samples = []
    for seed in range(seeds) if seeds is not None else (None,):
        chosen = sample(items, limit, seed)
        if cell.shots is not None:
            if cell.suite.with_shots is None:
                raise ValueError(f"task {cell.suite.name} has no worked examples to make prompts of other lengths from")
            chosen = cell.suite.with_shots(chosen, cell.shots)
        texts = [item.prompt for item in chosen]
        gen_length = cell.variant.settings.gen_length
        ids = encode(llm, texts, gen_length, raw=not cell.suite.task.chat_template)
        samples.append(Prompts(items=chosen, ids=ids))
    return samples


def compile_all(llm: LLM, grid: Iterable[tuple[int, Cell, Sequence[Prompts]]]) -> None:
    """Compile what decoding a grid of batches and cells needs, side by side.

    One that fails does so again when it is decoded, and is dealt with there.
    """

    def compile_one(batch: int, settings: Settings, one: Prompts) -> None:
        of_batch = copy(llm)  # of the same programs
        of_batch.slots = batch
        of_batch.compile(longest(one.ids, batch), settings)

    with ThreadPoolExecutor() as pool:
        wait([pool.submit(compile_one, batch, cell.variant.settings, one) for batch, cell, its in grid for one in its])


def scorer() -> Scorer:
    """Scores by a task's main metric; a response that was seen before is not scored again."""
    known: dict[tuple[str, str, str], bool] = {}

    def score(task: Task, items: Sequence[Item], texts: Sequence[str]) -> list[bool]:
        keys = [(task.name, item.key, text) for item, text in zip(items, texts, strict=True)]
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
        with sandbox.pool() as pool:
            scores = pool.map(lambda key: task.score(new[key], key[-1])[task.metrics[0]] == 1, new)
            known.update(zip(new, scores, strict=True))
        return [known[key] for key in keys]

    return score


def measure(
    llm: LLM, table: Table, cell: Cell, batch: int, samples: Sequence[Prompts], repeats: int, score: Scorer
) -> Rows:
    """A cell's rows. Of several samples: the median, the least and the greatest."""
    figures: list[dict[str, dict[str, Any]]] = []
    results = []
    for one in samples:
        run = decode(llm, one.ids, cell.variant, batch, repeats)
        of_run = measured(run, None, {})
        right = score(cell.suite.task, one.items, [result.text for result in run.results])
        figures.append(replace(of_run, right=right).rows())
        results += run.results
    lengths = [len(ids) for one in samples for ids in one.ids]
    case = cell.case | figures[0]["tokens_per_second"]["case"] | {"prompt_tokens": round(sum(lengths) / len(lengths))}
    rows = [
        _over_samples([of[metric] for of in figures]) for metric in figures[0] if all(metric in of for of in figures)
    ]
    if (plan := llm.plan) is not None:
        rows.append(report.row(case, "planned_memory", "B", plan.total))
    rows = [row | {"case": case, "baseline": baseline(case, row["metric"])} for row in rows]
    return rows + table.details(case, results)


def _over_samples(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return rows[0] if len(rows) == 1 else rows[0] | report.spread([row["median"] for row in rows])
