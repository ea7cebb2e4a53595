"""The model of lm-evaluation-harness against the engine: with a stand-in for the harness, then with itself."""

import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fdllm_jax import LLM, Settings, evaluate, likelihood, lm_eval
from fdllm_jax.evaluation.lm_eval_contexts import pair_of
from fdllm_jax.likelihood import likelihoods

DATA = Path(os.environ.get("FDLLM_DATA", "../shared/data"))
HARNESS = importlib.util.find_spec("lm_eval")
SETTINGS = {"gen_length": 32, "block_length": 8}
ARGUMENTS = {**SETTINGS, "slots": 2, "dtype": "float32", "samples": 4}
QUESTIONS = ["Tom has 12 apples. He buys 7 more. How many apples does Tom have?", "A ticket costs $8."]
PAIRS = [("Question: 2 + 2?\nAnswer:", " 4"), ("Question: 2 + 2?\nAnswer:", " 22"), ("", "The number")]


class StandIn:
    """What the model uses of the harness's own class."""

    def __init__(self) -> None:
        self.cached: dict[Any, Any] = {}
        self.cache_hook = SimpleNamespace(
            add_partial=lambda what, args, value: self.cached.update({(what, *map(str, args)): value})
        )


@pytest.fixture(scope="module")
def harness() -> Iterator[ModuleType]:
    """The module of the model, made without the harness; small passes."""
    model, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    vars(model)["LM"], vars(registry)["register_model"] = StandIn, lambda name: lambda model: model
    with pytest.MonkeyPatch.context() as patch:
        for module in (ModuleType("lm_eval"), ModuleType("lm_eval.api"), model, registry):
            patch.setitem(sys.modules, module.__name__, module)
        made = importlib.import_module("fdllm_jax.evaluation.lm_eval_model")
        del sys.modules[made.__name__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "ROWS", 4 * 64)
        yield made


@pytest.fixture(scope="module")
def model(harness: ModuleType, kernels: str) -> Any:
    return harness.FdllmLM(**ARGUMENTS, capacity=128, kernels=kernels, batch_size=1, device=None)


@pytest.fixture(scope="module")
def llm(model: Any) -> LLM:
    return model.llm


def requests(*args: Sequence[Any]) -> list[Any]:
    return [SimpleNamespace(args=its) for its in args]


def test_responses_are_those_of_the_engine(model: Any, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    asked = [
        {"until": ["=", "\n\n"], "do_sample": False, "temperature": 1.0},
        {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 0.7},
        {"until": "\n", "max_gen_toks": 4000},
    ]
    prompts = [*(f"Question: {question}\nAnswer:" for question in QUESTIONS), "How many? " * 1500]
    settings = [
        Settings(**SETTINGS, stop=("=", "\n\n")),
        Settings(gen_length=20, block_length=8, temperature=0.7, seed=1),
    ]
    with caplog.at_level(logging.WARNING):
        texts = model.generate_until(requests(*zip(prompts, asked, strict=True)), disable_tqdm=True)
    expected = [result.text for result in llm.generate(prompts[:2], settings, raw=True)]
    assert texts == [*expected, ""] and all(expected) and "=" not in expected[0]
    assert list(model.cached.values()) in (expected, expected[::-1])
    assert "1 prompts have an empty response: " in caplog.text and "more than the capacity of a slot" in caplog.text
    assert model.generate_until([]) == []


def test_conversations_are_those_of_the_chat_template(model: Any, llm: LLM) -> None:
    contexts = [model.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    asked = {"until": [], "temperature": 0.7}
    texts = model.generate_until(requests(*((context, asked) for context in contexts)), disable_tqdm=True)
    assert texts == [result.text for result in llm.generate(QUESTIONS, Settings(**SETTINGS, temperature=0.7))]
    assert model.chat_template(True) == llm.tokenizer.chat_template and model.chat_template(False) == ""
    with pytest.raises(ValueError, match="--apply_chat_template tools: the checkpoint's own has no name"):
        model.chat_template("tools")


def test_likelihoods_are_the_estimate(model: Any, llm: LLM) -> None:
    found = model.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    expected = dict(likelihoods(llm, [pair_of(llm.tokenizer, *pair) for pair in PAIRS], samples=4))
    assert found == [tuple(expected[i]) for i in range(len(PAIRS))]
    with pytest.raises(ValueError, match="whole documents .loglikelihood_rolling."):
        model.loglikelihood_rolling(requests(("a text",)))


def test_the_records_say_what_decides(model: Any) -> None:
    info = model.get_model_info()["fdllm"]
    assert info["model"] == model.tokenizer_name == "fdllm-9m" and info["method"] == "flash-dllm"
    assert (info["gen_length"], info["block_length"], info["gamma"], info["dtype"]) == (32, 8, 0.8, "float32")
    json.dumps(info)


def test_without_the_harness_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    assert lm_eval.main() == 2
    assert "not installed: pip install 'fdllm-jax[lm-eval]'" in capsys.readouterr().err


# From here on with the harness itself.
with_harness = pytest.mark.skipif(HARNESS is None, reason="lm-evaluation-harness is not installed")
TASKS = """
task: gsm8k_here
include: {gsm8k}
tag: null
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {data}/gsm8k_train.jsonl, test: {data}/gsm8k_test.jsonl}}}}
===
task: choices_here
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of the harness on local files."""
    if not (DATA / "gsm8k_train.jsonl").is_file():
        pytest.skip("GSM8K is not in $FDLLM_DATA")
    folder = tmp_path_factory.mktemp("tasks")
    assert HARNESS is not None and HARNESS.origin is not None
    gsm8k = Path(HARNESS.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    for i, text in enumerate(TASKS.format(gsm8k=gsm8k, data=DATA.resolve(), folder=folder).split("===")):
        (folder / f"{i}.yaml").write_text(text)
    row = {"question": "2 + 2?", "choices": ["4", "22"], "label": 0}
    (folder / "choices.jsonl").write_text(f"{json.dumps(row)}\n")
    return folder


def command(folder: Path, output: Path, *arguments: str, **model: Any) -> subprocess.CompletedProcess[str]:
    given = ",".join(f"{name}={value}" for name, value in {**ARGUMENTS, **model}.items())
    words = f"-m fdllm_jax.lm_eval --model fdllm --model_args {given} --tasks gsm8k_here,choices_here --limit 2".split()
    return subprocess.run(
        [sys.executable, *words, *arguments, "--include_path", folder, "--log_samples", "--output_path", output],
        env=os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


def samples(output: Path, task: str) -> list[dict[str, Any]]:
    (file,) = output.rglob(f"samples_{task}_*.jsonl")
    found = {row["doc_id"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    return [found[i] for i in sorted(found)]


def strict_scores(output: Path) -> float:
    (file,) = output.rglob("results_*.json")
    return json.loads(file.read_text(encoding="utf-8"))["results"]["gsm8k_here"]["exact_match,strict-match"]


@with_harness
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_the_harness_has_the_evaluation_s_responses_and_scores(
    folder: Path, tmp_path: Path, llm: LLM, chat: bool
) -> None:
    options = ["--apply_chat_template", "--fewshot_as_multiturn", "false"] if chat else []
    done = command(folder, tmp_path / "theirs", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    given = f"--task gsm8k --data {DATA} --limit 2 --gen-length 32 --block-length 8 --slots 2 --dtype float32".split()
    assert evaluate.main([*given, "--output", str(tmp_path / "ours"), *(["--chat-template"] if chat else [])]) == 0
    ours = [json.loads(line) for line in (tmp_path / "ours" / "samples.jsonl").read_text().splitlines()]
    ours.sort(key=lambda sample: sample["index"])
    theirs = samples(tmp_path / "theirs", "gsm8k_here")
    assert [sample["resps"][0][0] for sample in theirs] == [sample["text"] for sample in ours]
    assert all(sample["text"] for sample in ours)
    mean = sum(sample["scores"]["strict-match"] for sample in ours) / 2
    assert strict_scores(tmp_path / "theirs") == mean
    (choice,) = samples(tmp_path / "theirs", "choices_here")
    prompt, space = llm.tokenizer.encode_chat("Question: 2 + 2?\nAnswer:"), "" if chat else " "
    pairs = [
        (prompt, llm.tokenizer.encode_raw(text)) if chat else pair_of(llm.tokenizer, "Question: 2 + 2?\nAnswer:", text)
        for text in (f"{space}4", f"{space}22")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "ROWS", 4096)
        found = dict(likelihoods(llm, pairs, samples=4))
    assert choice["resps"] == [[[str(value) for value in found[i]]] for i in range(2)]


@with_harness
def test_bad_model_arguments_are_one_message(folder: Path, tmp_path: Path) -> None:
    done = command(folder, tmp_path, gama=0.8, threshold=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fdllm_jax.lm_eval: --model_args: 'gama': expected model, slots, ")
    assert "threshold=2: expected a number in (0, 1]" in last
