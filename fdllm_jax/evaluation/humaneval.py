"""HumanEval (arXiv 2107.03374), 0-shot pass@1, as lm-evaluation-harness's task `humaneval`."""

from pathlib import Path

from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.data import find, read
from fdllm_jax.evaluation.task import Item, Task

_FIELDS = {"task_id": str, "prompt": str, "entry_point": str, "test": str}


def load(data: Path) -> list[Item]:
    """The functions to complete: a prompt is the signature with its docstring."""
    rows = read(find(data, ("HumanEval.jsonl", "humaneval.jsonl", "humaneval/test.jsonl", "test.jsonl")), _FIELDS)
    return [
        Item(key=row["task_id"], prompt=row["prompt"], document={k: row[k] for k in ("prompt", "entry_point", "test")})
        for row in rows
    ]


def score(item: Item, text: str) -> dict[str, float]:
    """Whether the function, prompt and text, passes its tests."""
    document = item.document
    tests = f"{document['test']}\ncheck({document['entry_point']})"
    return {"pass@1": float(sandbox.passes(document["prompt"] + text, tests))}


TASK = Task(
    name="humaneval",
    load=load,
    score=score,
    metrics=("pass@1",),
    shots=0,
    stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    gen_length=512,
    chat_template=False,
    source="lm-evaluation-harness 0.4.13, humaneval version 1",
    runs_code=True,
)
