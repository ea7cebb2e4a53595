"""Tasks whose responses are run: the data sets' own solutions pass, others fail; prompts."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdllm_jax.evaluation import humaneval, mbpp, own
from tests.fdllm_jax.evaluation.scores import score_all

HUMANEVAL = Path(os.environ.get("FDLLM_DATA", "../shared/data")) / "HumanEval.jsonl.gz"
ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("layers")
@pytest.mark.skipif(not HUMANEVAL.is_file(), reason="HumanEval is not in $FDLLM_DATA")
def test_humaneval_s_solutions_pass():
    items = humaneval.load(HUMANEVAL)
    rows = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    assert [item.key for item in items] == [f"HumanEval/{i}" for i in range(164)]
    assert [item.prompt for item in items] == [row["prompt"] for row in rows]
    solutions = [row["canonical_solution"] for row in rows]
    assert sum(s["pass@1"] for s in score_all(humaneval.TASK, list(zip(items, solutions, strict=True)))) == 164
    wrong = [(item, "    return None\n") for item in items[::16]]
    assert sum(s["pass@1"] for s in score_all(humaneval.TASK, wrong)) == 0


@pytest.mark.usefixtures("layers")
def test_mbpp(tmp_path: Path):
    """The digest is of the prompt that lm-evaluation-harness 0.4.13 makes of problem 11."""
    rows = [
        {"task_id": i, "text": f"Write a function to do thing {i}.", "test_list": [f"assert f({j}) == {j}" for j in t]}
        for i, t in ((10, range(3)), (11, range(3)), (510, range(5)), (511, range(3)))
    ]
    (tmp_path / "mbpp.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    items = mbpp.load(tmp_path)
    assert [item.key for item in items] == ["11", "510"]
    assert (
        hashlib.sha256(items[0].prompt.encode()).hexdigest()
        == "a367905838c0822f5876b1e88e20ebfd45cdf8e5fbda65f7e0ca011819345e29"
    )
    assert items[1].prompt.endswith("== 0\nassert f(1) == 1\nassert f(2) == 2\n[BEGIN]\n")
    texts = ("def f(x):\r\n  return x\n", "def f(x):\n  return 0", "def f(x):\n  return min(x, 2)")
    found = score_all(mbpp.TASK, [(items[1], text) for text in texts])
    assert [score["pass@1"] for score in found] == [1, 0, 1]
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(rows[0] | {"test_list": ["assert f(0) == 0"]}))
    with pytest.raises(ValueError, match="line 1: expected a test_list of 3 assertions"):
        mbpp.load(tmp_path)


@pytest.mark.usefixtures("layers")
def test_our_own_tasks_read_what_the_generators_print(tmp_path: Path):
    from benchmarks.small_model import functions, word_problems

    for name in ("functions", "word_problems"):
        command = [sys.executable, "-m", f"benchmarks.small_model.{name}", "12"]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        (tmp_path / f"{name}.jsonl").write_bytes(lines)
    problems = [word_problems.make(seed, split="test") for seed in range(12)]
    items = own.load_word_problems(tmp_path)
    assert [item.prompt for item in items] == [problem.question for problem in problems]
    responses = [(item, problem.answer) for item, problem in zip(items, problems, strict=True)]
    assert score_all(own.WORD_PROBLEMS, [*responses, (items[0], "#### 0.5")]) == [
        *[{"exact_match": 1.0}] * 12,
        {"exact_match": 0.0},
    ]
    written = [functions.make(seed, split="test") for seed in range(12)]
    items = own.load_functions(tmp_path)
    assert [item.prompt for item in items] == [function.question for function in written]
    responses = [(item, function.answer) for item, function in zip(items, written, strict=True)]
    assert score_all(own.FUNCTIONS, [*responses, (items[0], "def")]) == [*[{"pass@1": 1.0}] * 12, {"pass@1": 0.0}]
