"""The evaluation's command line, against decoding with the engine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fdllm_jax import LLM, Settings, evaluate
from fdllm_jax.tasks import EXAMPLES, extract_answer
from tests import command

OPTIONS = ["--task", "word_problems", "--gen-length", "32", "--block-length", "8", "--dtype", "float32", "--slots", "2"]


class Done(command.Done):
    """A finished evaluation."""

    @property
    def samples(self) -> list[dict[str, Any]]:
        lines = (self.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda sample: sample["index"])

    @property
    def figures(self) -> dict[str, Any]:
        rows = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))["rows"]
        return {row["metric"]: row for row in rows}


def run(folder: Path, data: Path, *arguments: str) -> Done:
    return Done(*command.finished(evaluate.main, folder, *OPTIONS, "--data", str(data), *arguments))


def write(file: Path, questions: list[tuple[str, str]]) -> Path:
    lines = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in questions)
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "problems.jsonl", [(t.question, t.gold) for t in EXAMPLES[:5]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Done:
    return run(tmp_path_factory.mktemp("whole"), data, "--temperature", "0.5", "--seed", "7")


def test_samples_are_what_the_engine_decodes(whole: Done) -> None:
    assert whole.code == 0
    llm = LLM(slots=2, dtype="float32")
    common = {"gen_length": 32, "block_length": 8, "temperature": 0.5}
    results = [llm.generate(t.question, Settings(**common, seed=7 + i))[0] for i, t in enumerate(EXAMPLES[:5])]
    assert [sample["text"] for sample in whole.samples] == [result.text for result in results]
    assert [sample["steps"] for sample in whole.samples] == [result.steps for result in results]
    right = [extract_answer(result.text) == task.gold for result, task in zip(results, EXAMPLES, strict=False)]
    assert [sample["scores"]["exact_match"] == 1 for sample in whole.samples] == right
    figures = whole.figures
    assert figures["accuracy"]["median"] == sum(right) / 5 and figures["accuracy"]["repeats"] == 5
    assert figures["tokens"]["median"] == sum(len(result.token_ids) for result in results)
    assert figures["accuracy"]["case"]["chat_template"] is True
    assert "accuracy (exact_match)" in whole.out


def texts(done: Done) -> list[str]:
    return [sample["text"] for sample in done.samples]


def test_a_limit_is_gone_on_from(tmp_path: Path, data: Path, whole: Done) -> None:
    sampled = ("--temperature", "0.5", "--seed", "7")
    first = run(tmp_path, data, "--limit", "2", *sampled)
    assert (first.code, len(first.samples)) == (0, 2)
    before = (tmp_path / "samples.jsonl").read_bytes()
    second = run(tmp_path, data, *sampled)
    assert second.code == 0 and (tmp_path / "samples.jsonl").read_bytes().startswith(before)
    assert texts(second) == texts(whole)
    assert run(tmp_path, data, *sampled).figures["tokens"] == second.figures["tokens"]  # nothing is left to do


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_and_loses_nothing(tmp_path: Path, data: Path, whole: Done, sent: signal.Signals) -> None:
    sampled = ("--temperature", "0.5", "--seed", "7")
    command = [sys.executable, "-m", "fdllm_jax.evaluate", *OPTIONS, "--data", str(data), "--output", str(tmp_path)]
    process = subprocess.Popen([*command, *sampled], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    samples = tmp_path / "samples.jsonl"
    while not (samples.exists() and samples.read_bytes().count(b"\n") >= 1) and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, sent)
    _, said = process.communicate()
    kept = [line for line in samples.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert kept
    if sent == signal.SIGINT:
        assert process.returncode == 130
        told = re.search(r"interrupted: (\d) of 5 items are finished and kept, the same command goes on\n$", said)
        assert told and int(told[1]) in (len(kept), len(kept) - 1)  # one may just be on its way to the disk
    done = run(tmp_path, data, *sampled)
    assert done.code == 0 and texts(done) == texts(whole)
    assert samples.read_bytes().startswith(b"".join(kept))


def test_a_prompt_that_does_not_fit_counts_as_wrong(tmp_path: Path) -> None:
    questions = [(EXAMPLES[0].question, EXAMPLES[0].gold), ("How many? " * 1500, "3"), ("Two and two?", "4")]
    done = run(tmp_path / "out", write(tmp_path / "problems.jsonl", questions))
    assert done.code == 0
    assert "item 1: " in done.err and "1 prompts do not fit and count as wrong: 1\n" in done.err
    again = run(done.folder, tmp_path / "problems.jsonl")
    assert "1 prompts do not fit and count as wrong: 1\n" in again.err
    assert again.figures["refused"]["median"] == pytest.approx(1 / 3)
    assert [sample["stop_reason"] == "refused" for sample in done.samples] == [False, True, False]
    assert done.samples[1]["scores"] == {"exact_match": 0.0} and done.figures["accuracy"]["repeats"] == 3


def test_other_data_is_refused(tmp_path: Path, whole: Done) -> None:
    """Also beyond a limit: the samples that are there are of other items."""
    other = write(tmp_path / "problems.jsonl", [(t.question, t.gold) for t in EXAMPLES[1:6]])
    done = run(whole.folder, other, "--temperature", "0.5", "--seed", "7")
    assert done.code == 2 and "data_sha256" in done.err and done.err.count("\n") == 1


def test_the_speed_of_a_part_of_a_run_is_not_told(whole: Done, tmp_path: Path, data: Path) -> None:
    sampled = ("--temperature", "0.5", "--seed", "7")
    first = run(tmp_path, data, *sampled, "--slots", "3")
    settings = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["settings"]
    assert settings["slots"] == [3] and "tokens_per_second" in first.figures
    assert "tokens_per_second" not in run(tmp_path, data, *sampled, "--limit", "2").figures


def test_a_response_longer_than_the_context_is_refused_and_binds_nothing(tmp_path: Path, data: Path) -> None:
    done = run(tmp_path, data, "--gen-length", "4096")
    assert done.code == 2 and "--gen-length 4096 leaves no room for a prompt: the model has 4096 positions" in done.err
    done = run(tmp_path, data, "--limit", "1", "--slots", "9")
    assert done.code == 0 and [sample["slots"] for sample in done.samples] == [1]  # no more than there are items


BAD = {
    "task": (["--task", "magic"], "invalid choice: 'magic'"),
    "data": (["--data", "/nowhere/a.jsonl"], "/nowhere/a.jsonl"),
    "limit": (["--limit", "0"], "expected an integer of at least 1"),
    "slots": (["--slots", "x"], "expected an integer of at least 1"),
    "settings": (["--gamma", "2"], "gamma=2.0"),
    "output": (["--output", ""], "expected the name of a folder"),
    "other settings": (["--temperature", "0.9"], "its samples are of other settings (seed: 7 there, 0 asked for; temp"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_message_and_exit_code_2(
    whole: Done, data: Path, arguments: list[str], message: str
) -> None:
    before = {file.name: file.read_bytes() for file in whole.folder.iterdir()}
    done = run(whole.folder, data, *arguments)
    assert done.code == 2 and not done.out
    assert message in done.err and done.err.count("\n") == 1
    assert {file.name: file.read_bytes() for file in whole.folder.iterdir()} == before
