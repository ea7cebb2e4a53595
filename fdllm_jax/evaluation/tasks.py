"""The tasks by name, and the scores of many responses."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from fdllm_jax.evaluation import gsm8k, humaneval, mbpp, minerva, own
from fdllm_jax.evaluation.task import Item, Task

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (gsm8k.TASK, minerva.TASK, humaneval.TASK, mbpp.TASK, own.WORD_PROBLEMS, own.FUNCTIONS)
    }
)


def score_all(task: Task, responses: Sequence[tuple[Item, str]]) -> list[dict[str, float]]:
    """`task.score` of every item and text, one at a time on each core."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda response: task.score(*response), responses))
