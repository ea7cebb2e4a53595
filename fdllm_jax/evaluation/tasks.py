"""The tasks by name."""

from collections.abc import Mapping
from types import MappingProxyType

from fdllm_jax.evaluation import gsm8k, humaneval, mbpp, minerva, own
from fdllm_jax.evaluation.task import Task

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (gsm8k.TASK, minerva.TASK, humaneval.TASK, mbpp.TASK, own.WORD_PROBLEMS, own.FUNCTIONS)
    }
)
