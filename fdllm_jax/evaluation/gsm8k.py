"""GSM8K (arXiv 2110.14168), 5-shot, as lm-evaluation-harness's task `gsm8k`."""

import re
from pathlib import Path
from random import Random

from fdllm_jax.evaluation.data import Row, find, read
from fdllm_jax.evaluation.task import Item, Task

_SHOTS = 5
_SEED = 1234  # the harness's default for shots
_FIELDS = {"question": str, "answer": str}
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def load(data: Path) -> list[Item]:
    """The test set; the shots of each item are drawn from the training set, which lies beside it.

    As in the harness, one generator draws five other examples for each item in turn.
    """
    test = read(find(data, [name.format("test") for name in _NAMES]), _FIELDS)
    folder = data.parent if data.is_file() else data
    train = read(find(folder, [name.format("train") for name in _NAMES]), _FIELDS)
    if len(train) < _SHOTS:
        raise ValueError(f"{folder}: {len(train)} training examples, expected {_SHOTS} at least, for the shots")
    random = Random(_SEED)
    items = []
    for index, row in enumerate(test):
        shots = "".join(f"{_question(shot)} {shot['answer']}\n\n" for shot in random.sample(train, _SHOTS))
        items.append(Item(key=str(index), prompt=shots + _question(row), document={"answer": row["answer"]}))
    return items


_NAMES = ("gsm8k_{}.jsonl", "gsm8k/{}.jsonl", "{}.jsonl")


def _question(row: Row) -> str:
    return f"Question: {row['question']}\nAnswer:"


def score(item: Item, text: str) -> dict[str, float]:
    """Whether the number after the first `#### `, and whether the last number of all, is the answer's."""
    gold = normalised(item.document["answer"])
    strict = _STRICT.findall(text)
    flexible = ["".join(groups) for groups in _FLEXIBLE.findall(text)]
    return {
        "strict-match": float(bool(strict) and normalised(strict[0]) == gold),
        "flexible-extract": float(bool(flexible) and normalised(flexible[-1]) == gold),
    }


def normalised(answer: str) -> str:
    """An answer without commas, dollars, all up to its last `#### ` and a full stop at its end, in lower case."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        answer = re.sub(ignored, "", answer)
    return answer.lower()


TASK = Task(
    name="gsm8k",
    load=load,
    score=score,
    metrics=("strict-match", "flexible-extract"),
    shots=_SHOTS,
    stop=("Question:", "</s>", "<|im_end|>"),
    gen_length=256,
    chat_template=False,
    source="lm-evaluation-harness 0.4.13, gsm8k version 3",
)
