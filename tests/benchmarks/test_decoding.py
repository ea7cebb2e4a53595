"""The benchmark of decoding, on a few prompts of the shipped checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import decoding, replay
from benchmarks.decoding_batch import timed
from benchmarks.decoding_profile import Profile, profile_of
from benchmarks.expansion import Shape
from fdllm_jax import LLM, Settings


def test_a_small_run_writes_whole_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--methods", "flash-dllm", "--presets", "--batch", "2", "--gen-length", "32", "--shots", "0"]
    assert decoding.main([*given, "--problems", "3", "--repeats", "1", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "decoding.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["metric"], row["case"].get("part")): row for row in rows}
    assert {part for metric, part in found if metric == "time"} == {
        "prefill", "call", "iteration", "draft", "verify", "rest",
    }  # fmt: skip
    share = found["share_of_iterations", "verify"]["median"]
    times = {part: found["time", part]["median"] for part in ("iteration", "draft", "verify", "rest")}
    assert 0 < share <= 1
    assert times["draft"] + share * times["verify"] + times["rest"] == pytest.approx(times["iteration"])
    assert found["accuracy", None]["repeats"] == 3 and found["accuracy", None]["case"]["synthetic"] is True
    assert (tmp_path / "decoding.png").read_bytes().startswith(b"\x89PNG")
    assert "decode tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--task", "gsm8k"], "--data"),
        (["--data", "somewhere"], "--data somewhere: task word_problems is made, not read"),
        (["--shots", "-1"], "--shots: '-1': expected an integer"),
        (["--shots", "4", "99999999"], "--shots 99999999: the model's context of"),
        (["--problems", "3", "--batch", "4"], "3 problems are too few for --batch 4"),
        (["--gen-length", "32", "5000"], "more than the model's context"),
        (["--methods", "--presets"], "no methods"),
        (["--profile"], "--profile: the device's time is that of an NVIDIA GPU, and JAX runs on cpu"),
        (["--random", "64,2,2,96,4096", "--schedule", "1", "1", "--model", "somewhere"], "one of the two"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = decoding.main(given)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2 and message in printed.err and not printed.out


def test_a_task_of_its_own_examples_takes_no_other_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = {"task_id": "HumanEval/0", "prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1\n"}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(item | {"entry_point": "one", "canonical_solution": ""}))
    given = ["--task", "humaneval", "--data", str(tmp_path), "--problems", "1", "--batch", "1", "--gen-length", "16"]
    assert decoding.main([*given, "--shots", "3"]) == 2
    assert "have their own number of examples" in capsys.readouterr().err
    run = ["--methods", "flash-cache", "--presets", "--repeats", "1", "--output", str(tmp_path)]
    assert decoding.main([*given, *run]) == 0
    rows = json.loads((tmp_path / "decoding.json").read_text(encoding="utf-8"))["rows"]
    assert {row["case"]["shots"] for row in rows} == {0}


def test_a_batch_begun_together_is_what_the_engine_decodes() -> None:
    llm, settings = LLM(slots=2, dtype="float32"), Settings(gen_length=32)
    prompts = [llm.tokenizer.encode_chat("What is 3 + 4?"), llm.tokenizer.encode_chat("Two times 6?")]
    found = timed(llm.compile(prompts, settings), llm, prompts, settings)
    expected = llm.generate(prompts, settings)
    assert [r.token_ids for r in found.results] == [r.token_ids for r in expected]
    assert found.steps == min(r.steps for r in expected) - 1  # all are live until the first ends
    assert found.tokens == sum(1 <= step <= found.steps for r in expected for step in r.step_of) > 0


def test_second_passes_are_counted() -> None:
    """Of one slot, all of whose steps behind the first are timed."""
    llm, settings = LLM(slots=1, dtype="float32"), Settings(gen_length=32)
    prompts = [llm.tokenizer.encode_chat("What is 3 + 4?")]
    found = timed(llm.compile(prompts, settings), llm, prompts, settings)
    of_all = found.results[0].forwards - found.results[0].steps
    assert of_all - found.verified == pytest.approx(round(of_all - found.verified)) and of_all > 1
    assert 0 <= of_all - found.verified <= 1  # the first step's
    alone = Settings(gen_length=32, method="flash-cache")
    assert timed(llm.compile(prompts, alone), llm, prompts, alone).verified == 0


def test_replays_verify_in_lockstep() -> None:
    engine = replay.engine(
        Shape(64, 2, 2, 96, 4096), replay.Schedule(3, 3), block_length=16, dtype="float32", kernels="xla"
    )
    prompts, settings, shares = [[5] * 9], Settings(gen_length=32), []
    for slots in (1, 4):
        llm = engine(slots)
        found = timed(llm.compile(prompts * slots, settings), llm, prompts * slots, settings, lockstep=True)
        shares.append((found.steps, found.verified))
    assert shares[0] == shares[1] == (5, 4)  # nothing is left to verify in the last step


def test_device_time_is_summed_by_kernel() -> None:
    def event(name: str, start: int, duration: int) -> Any:
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    def plane(name: str, **lines: list[Any]) -> Any:
        return SimpleNamespace(name=name, lines=[SimpleNamespace(name=n, events=e) for n, e in lines.items()])

    events = [event("fusion_12", 100, 10), event("attention", 115, 40), event("fusion.3", 160, 20)]
    gpu = plane("/device:GPU:0", **{"Stream #7": events, "XLA Ops": [event("fusion", 0, 1000)]})
    found = profile_of([plane("/host:CPU", python=[event("call", 0, 500)]), gpu], steps=2)
    assert found is not None and found.span == pytest.approx(40e-9)
    assert found.kernels == {"fusion": pytest.approx((15e-9, 1.0)), "attention": pytest.approx((20e-9, 0.5))}
    assert profile_of([plane("/host:CPU")], steps=2) is None


def test_small_kernels_are_shown_together() -> None:
    kernels = {"a": (0.002, 1.0), "b": (0.1, 2.0), "c": (0.003, 3.0), "d": (0.9, 4.0)}
    found = Profile(span=2.0, kernels=kernels).largest()
    assert list(found) == ["d", "b", "others"] and found["others"] == pytest.approx((0.005, 4.0))
    assert Profile(span=2.0, kernels={"a": (1.0, 1.0)}).largest() == {"a": (1.0, 1.0)}


def test_random_weights_commit_by_the_schedule_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--random", "64,2,2,96,4096", "--schedule", "2", "3", "--presets", "balanced", "--batch", "2"]
    given += ["--gen-length", "60", "--shots", "0", "--problems", "3", "--repeats", "1"]
    given += ["--output", str(tmp_path)]
    methods = ["--methods", "flash-dllm", "flash-cache", "fast-dllm-dual"]
    assert decoding.main([*given, *methods]) == 0
    printed = capsys.readouterr()
    assert (
        printed.out.count(" (replayed), batch 2") == 3 and "fast-dllm-dual cannot be replayed: left out" in printed.err
    )
    results = json.loads((tmp_path / "decoding.json").read_text(encoding="utf-8"))
    assert "2 drafted and 3 verified a step" in results["settings"]["model"]
    assert all(row["case"]["replayed"] == [2, 3] and row["metric"] != "accuracy" for row in results["rows"])
    per_step = {r["case"]["name"]: r["median"] for r in results["rows"] if r["metric"] == "tokens_per_step"}
    assert per_step == {"flash-dllm": 5.0, "flash-cache": 2.0, "balanced": pytest.approx(60 / 21)}  # the first drafts 2

    for wrong in (
        ["--random", "llada-8b"],
        ["--schedule", "1", "1"],
        *([*given[:3], *x] for x in (["0", "2"], ["9", "8"])),
    ):
        assert decoding.main([*wrong, "--batch", "1"]) == 2
        assert "--schedule" in capsys.readouterr().err
    assert decoding.main(["--random", "64,2,2,96,512", "--schedule", "1", "1"]) == 2
    assert "512 ids are fewer than the shipped tokenizer's 4096" in capsys.readouterr().err
