"""GSM8K: prompts on the public files, and scores by hand."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from fdllm_jax.evaluation import gsm8k
from fdllm_jax.evaluation.task import Item

DATA = Path(os.environ.get("FDLLM_DATA", "../shared/data"))


@pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").is_file(), reason="GSM8K is not in $FDLLM_DATA")
def test_the_prompts_are_the_harness_s():
    """The digest is of the prompts that lm-evaluation-harness 0.4.13 makes of the same files, joined by NUL."""
    items = gsm8k.load(DATA)
    joined = "\0".join(item.prompt for item in items)
    assert len(items) == 1319
    assert (
        hashlib.sha256(joined.encode()).hexdigest()
        == "84119a05b6c77e92415182c7963444e153dd2df04e05e238744f26b105c0a8b6"
    )


def test_each_item_has_five_shots_of_its_own(tmp_path: Path):
    for name, count in (("train", 30), ("test", 8)):
        rows = ({"question": f"{name} {i}?", "answer": f"so\n#### {i}"} for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    items = gsm8k.load(tmp_path)
    drawn = []
    for i, item in enumerate(items):
        *shots, asked = item.prompt.split("\n\n")
        numbers = [shot.split("?")[0].removeprefix("Question: train ") for shot in shots]
        assert shots == [f"Question: train {n}?\nAnswer: so\n#### {n}" for n in numbers] and len({*numbers}) == 5
        assert asked == f"Question: test {i}?\nAnswer:" and item.key == str(i)
        drawn.append(tuple(numbers))
    assert len(set(drawn)) == 8
    assert [item.prompt for item in gsm8k.load(tmp_path / "test.jsonl")] == [item.prompt for item in items]


@pytest.mark.parametrize(
    ("answer", "text", "strict", "flexible"),
    [
        ("<<9*2=18>>18.\n#### 18", " He has 9 * 2 = 18.\n#### 18", 1, 1),
        ("#### 18", "#### 18.", 1, 1),
        ("#### 18", "#### 17\n#### 18", 0, 1),
        ("#### 18", "#### 18\n\nand 3", 1, 0),
        ("#### 18", "The answer is $18.", 0, 1),
        ("#### 18", "####18", 0, 1),
        ("#### 18", "#### $18", 0, 1),
        ("#### 1,234", "#### 1234", 1, 1),
        ("#### 1234", "it costs $1,234", 0, 1),
        ("#### -5", "#### -5", 1, 1),
        ("#### 5", "#### 5.0", 0, 0),
        ("#### 5", "", 0, 0),
        ("#### 5", "no number", 0, 0),
        ("#### 5", "five... 5...", 0, 0),
    ],
)
def test_scores(answer: str, text: str, strict: float, flexible: float):
    item = Item(key="0", prompt="", document={"answer": answer})
    assert gsm8k.score(item, text) == {"strict-match": strict, "flexible-extract": flexible}
