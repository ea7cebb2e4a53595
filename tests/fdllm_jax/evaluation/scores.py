"""The scores of many responses."""

from collections.abc import Sequence

from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.task import Item, Task


def score_all(task: Task, responses: Sequence[tuple[Item, str]]) -> list[dict[str, float]]:
    """`task.score` of every item and text."""
    with sandbox.pool() as pool:
        return list(pool.map(lambda response: task.score(*response), responses))
