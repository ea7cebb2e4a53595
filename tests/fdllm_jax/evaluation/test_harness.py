"""Prompts and scores against lm-evaluation-harness itself, where it is installed (`pip install lm-eval[math]`)."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fdllm_jax.evaluation import gsm8k, humaneval, mbpp, minerva
from fdllm_jax.evaluation.task import Item
from fdllm_jax.evaluation.tasks import TASKS
from tests.fdllm_jax.evaluation.scores import score_all
from tests.fdllm_jax.evaluation.test_data import GOOD, write

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "math_verify")),
    reason="lm-evaluation-harness is not installed",
)

# The harness runs in a process of its own: it answers one JSON object with another.
HARNESS = """
import json, sys
from pathlib import Path
import evaluate

class NoCode:
    def compute(self, **_): return [{"pass@1": 0.0}]

evaluate.load = lambda *_, **__: NoCode()
import lm_eval
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.filters.extraction import RegexFilter
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.minerva_math import utils as minerva

root = Path(lm_eval.__file__).parent / "tasks"
asked = json.load(sys.stdin)
gsm8k = load_yaml(root / "gsm8k/gsm8k.yaml", resolve_func=True, recursive=True)

def prompts(file, files):
    config = dict(load_yaml(root / file, resolve_func=True, recursive=True))
    for name in ("tag", "metadata", "dataset_name"): config.pop(name, None)
    task = ConfigurableTask(config=config | {"dataset_path": "json", "dataset_kwargs": {"data_files": files}})
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [instance.args[0] for instance in task.instances], task.config.generation_kwargs["until"]

def number_scores(answer, text):
    metric = gsm8k["metric_list"][0]
    options = {"ignore_case": metric["ignore_case"], "regexes_to_ignore": metric["regexes_to_ignore"]}
    found = []
    for entry in gsm8k["filter_list"]:
        regex = {k: v for k, v in entry["filter"][0].items() if k != "function"}
        ((taken,),) = RegexFilter(**regex).apply([[text]], [{}])
        found.append(float(exact_match_hf_evaluate(predictions=[taken], references=[answer], **options)["exact_match"]))
    return found

def math_scores(solution, text):
    gold = minerva.normalize_final_answer(minerva.remove_boxed(minerva.last_boxed_only_string(solution)))
    scores = minerva.process_results({"solution": solution, "answer": gold}, [text])
    return [scores["exact_match"], scores["math_verify"]]

answer = {
    "prompts": {name: prompts(*given) for name, given in asked["prompts"].items()},
    "numbers": [number_scores(*case) for case in asked["numbers"]],
    "normalised": [minerva.normalize_final_answer(text) for text in asked["normalised"]],
    "math": [math_scores(*case) for case in asked["math"]],
}
Path(sys.argv[1]).write_text(json.dumps(answer))
"""

FILES = {
    "gsm8k": "gsm8k/gsm8k.yaml",
    "math": "minerva_math/minerva_math_algebra.yaml",
    "humaneval": "humaneval/humaneval.yaml",
    "mbpp": "mbpp/mbpp.yaml",
}
NUMBER_PIECES = ["#### ", "####", "18", "1,234", "$", ".", "-", " ", "\n", "The answer is ", "12.50", "0", ",", "A"]
MATH_PIECES = [
    "$", "=", " ", "1", "2", "x", ",", "10,000", r"\frac", r"\sqrt", "[3]", "{", "}", r"\left(", r"\right)", r"\pi",
    "cm", " cm ", "ft", "feet", "a ", "an ", r"\text{", r"\text{and}", r"\text{m}", r"\mbox{", r"\boxed{", r"\textbf{",
    r"\overline{", r"^\circ", r"\$", ".", ".$", "\\ ", r"\;", r",\!", "{,}", '"', r"\dots", r"\ldots", "square", "\n",
    r"\mathrm{th}", "units", "\\",
]  # fmt: skip
MATH_CASES = [
    (rf"so $\boxed{{{gold}}}$", text.replace("{}", answer))
    for gold, answer in (
        ("2", "2"), ("2", "2.0"), ("2", "3"), (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", r"\frac12"), ("[2,5)", "[2,5)"),
        ("x^2-1", "(x-1)(x+1)"), ("10{,}000", "10,000"), (r"\text{(A)}", "A"), ("3,4", "4,3"), ("2x", "2y"), ("1", ""),
        (r"\sqrt{8}", r"2\sqrt2"), (r"90^\circ", "90"), (r"12\text{ cm}", "12"), ("(1,2)", "(1, 2)"), ("-1", "-1.0"),
    )
    for text in (r" Final Answer: The final answer is ${}$. I hope it is correct.", r" It is $\boxed{{}}$.")
]  # fmt: skip


def cases(pieces: list[str], count: int) -> list[str]:
    drawn = random.Random(5)
    return ["".join(drawn.choices(pieces, k=drawn.randint(0, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    train, test = ([{"question": f"{s} {i}? α", "answer": f"so\n#### {i}"} for i in range(40)] for s in ("a", "b"))
    write(folder / "gsm8k_train.jsonl", *train)
    write(folder / "gsm8k_test.jsonl", *test)
    write(folder / "math.jsonl", *({"problem": f"${i}$?", "solution": rf"\boxed{{{i}}}"} for i in range(5)))
    write(folder / "mbpp.jsonl", *(GOOD["mbpp"] | {"task_id": i, "text": f"{i}"} for i in range(11, 16)))
    write(folder / "HumanEval.jsonl", GOOD["humaneval"])
    return folder


@pytest.fixture(scope="module")
def harness(folder: Path) -> dict[str, Any]:
    test = {name: str(folder / file) for name, file in (("humaneval", "HumanEval.jsonl"), ("mbpp", "mbpp.jsonl"))}
    splits = {
        "gsm8k": {split: str(folder / f"gsm8k_{split}.jsonl") for split in ("train", "test")},
        "math": dict.fromkeys(("train", "test"), str(folder / "math.jsonl")),
        **{name: {"test": file} for name, file in test.items()},
    }
    asked = {
        "prompts": {name: (FILES[name], splits[name]) for name in FILES},
        "numbers": [(f"so\n#### {gold}", text) for gold in ("18", "1,234", "-0") for text in cases(NUMBER_PIECES, 700)],
        "normalised": cases(MATH_PIECES, 3000),
        "math": MATH_CASES,
    }
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, str(folder / "answer.json")],
        input=json.dumps(asked),
        env=os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {"asked": asked, **json.loads((folder / "answer.json").read_text())}


@pytest.mark.parametrize("task", [gsm8k.TASK, minerva.TASK, humaneval.TASK, mbpp.TASK], ids=lambda task: task.name)
def test_prompts_and_stop_strings(harness: dict[str, Any], folder: Path, task: Any):
    prompts, stop = harness["prompts"][task.name]
    assert [item.prompt for item in TASKS[task.name].load(folder)] == prompts and list(task.stop) == stop


def test_scores_of_numbers(harness: dict[str, Any]):
    found = [
        list(gsm8k.score(Item(key="", prompt="", document={"answer": answer}), text).values())
        for answer, text in harness["asked"]["numbers"]
    ]
    assert found == harness["numbers"] and 100 < sum(map(sum, found)) < len(found)


def test_normalised_answers(harness: dict[str, Any]):
    assert [minerva.normalised(text) for text in harness["asked"]["normalised"]] == harness["normalised"]


def test_scores_of_mathematics(harness: dict[str, Any]):
    items = [Item(key="", prompt="", document={"solution": solution}) for solution, _ in MATH_CASES]
    found = score_all(minerva.TASK, [(item, text) for item, (_, text) in zip(items, MATH_CASES, strict=True)])
    assert [[f["exact_match"], f["math_verify"]] for f in found] == harness["math"]
