"""The command line that compares methods, against decoding with the engine."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fdllm_jax import LLM, Result, Settings, compare
from tests.benchmarks.test_results import ROW
from tests.command import Done, finished

TASKS = (
    ("Maya is 24 years old. Mina is 19 years younger than Maya. How old is Mina?", "24 - 19 = 5\n#### 5"),
    ("A tower has 4 floors of 6 flats. How many flats are there?", "24"),
    ("There are 19 seeds in each of Olga's 4 baskets. How many seeds does Olga have?", "#### 1,000"),
)
TINY = {"gen_length": 24, "block_length": 8}
FAST = ["--gen-length", "24", "--block-length", "8", "--dtype", "float32", "--repeats", "1"]


run = partial(finished, compare.main)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in TASKS), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Done:
    """Two thresholds of two methods and llada at a batch that does not divide the prompts, with gold."""
    arguments = ["--tasks", str(tasks), "--methods", "flash-cache", "threshold", "llada", "--batch", "2"]
    arguments += ["--sweep", "threshold", "0.5", "0.9", "--track-budget", "24", *FAST]
    return run(tmp_path_factory.mktemp("done") / "made" / "here", *arguments)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(slots=2, dtype="float32")


def test_the_figures_are_those_of_the_engine(done: Done, llm: LLM) -> None:
    assert done.code == 0
    decoded: dict[tuple[str, float | None], list[Result]] = {}
    for method, threshold, own in (
        *((m, t, o) for t in (0.5, 0.9) for m, o in (("flash-cache", {"track_budget": 24}), ("threshold", {}))),
        ("llada", None, {}),
    ):
        settings = Settings(method=method, threshold=threshold, **own, **TINY)
        decoded[method, threshold] = llm.generate([question for question, _ in TASKS], settings)
    found = {(r["case"]["method"], r["case"].get("threshold"), r["metric"]): r for r in done.results["rows"]}
    assert {key[:2] for key in found} == decoded.keys()
    for (method, threshold), results in decoded.items():
        right = [f"#### {gold}" in r.text for r, gold in zip(results, ("5", "24", "1000"), strict=True)]
        assert found[method, threshold, "accuracy"]["median"] == sum(right) / 3
        tokens = sum(len(r.token_ids) for r in results)
        steps, forwards = sum(r.steps for r in results), sum(r.forwards for r in results)
        assert found[method, threshold, "tokens_per_step"]["median"] == tokens / steps
        assert found[method, threshold, "tokens_per_forward"]["median"] == tokens / forwards
        assert found[method, threshold, "tokens_per_second"]["median"] > 0
        if method == "llada":
            assert (method, threshold, "agreement") not in found
            continue
        pairs = list(zip(results, decoded["threshold", threshold], strict=True))
        equal = sum(a == b for r, u in pairs for a, b in zip(r.token_ids, u.token_ids, strict=False))
        of = sum(max(len(r.token_ids), len(u.token_ids)) for r, u in pairs)
        assert found[method, threshold, "agreement"]["median"] == pytest.approx(equal / of)
    assert found["llada", None, "accuracy"]["median"] > 0
    assert found["threshold", 0.9, "agreement"]["median"] == 1


def test_the_results_file_can_be_repeated(done: Done, tasks: Path) -> None:
    assert done.results.keys() == {"command", "date", "hardware", "versions", "settings", "rows"}
    assert all(row.keys() == ROW for row in done.results["rows"])
    settings = {"model": "fdllm-9m", "dtype": "float32", "kernels": "auto", "raw": False, "prompts": 3}
    assert done.results["settings"] == settings | {"tasks": str(tasks)}
    assert {row["case"]["batch"] for row in done.results["rows"]} == {2}
    assert {row["case"]["gen_length"] for row in done.results["rows"]} == {24}


def test_the_table_is_plain_text_with_advice_at_its_end(done: Done) -> None:
    lines = done.out.splitlines()
    assert "\x1b" not in done.out and len(lines) == 1 + 5 + 1
    headings = ["method", "batch", "accuracy", "agreement", "tokens/step", "tokens/forward", "tokens/s"]
    assert lines[0].split() == headings  # no memory: a CPU does not count it
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "flash-cache threshold=0.5", "flash-cache threshold=0.9", "threshold threshold=0.5", "threshold threshold=0.9",
        "llada",
    ]  # fmt: skip
    assert lines[-1].startswith("No advice: 3 prompts cannot tell the methods apart; 5 are the least")
    note, *progress = done.err.splitlines()
    assert note == "fdllm_jax.compare: --track-budget is not an option of threshold, llada: left out there"
    assert len(progress) == 5 and progress[-1].startswith("fdllm_jax.compare: llada, batch 2: ")
    assert progress[-1].endswith(" tokens/s, 5 of 5")


def test_nothing_is_left_behind_and_the_plot_is_there(done: Done) -> None:
    pytest.importorskip("matplotlib")
    assert sorted(file.name for file in done.folder.iterdir()) == ["compare.json", "compare.png"]


def test_prompts_without_gold_fill_the_batch_and_need_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uncached decoding runs though it was not asked for."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(tmp_path, TASKS[0][0], "--methods", "flash-cache", "--track-budget", "24", "--batch", "2", *FAST)
    assert done.code == 0 and [file.name for file in tmp_path.iterdir()] == ["compare.json"]
    notes = done.err.splitlines()
    assert notes[0].endswith("fewer prompts (1) than a batch of 2: repeated to fill it, scored once")
    assert "no compare.png: " in notes[2] and notes[2].endswith("pip install 'fdllm-jax[plot]'") and len(notes) == 3
    rows = done.results["rows"]
    assert {row["metric"] for row in rows} == {
        "agreement", "tokens_per_step", "tokens_per_forward", "tokens_per_second",
    }  # fmt: skip
    assert all(row["repeats"] == 1 for row in rows)
    assert len(done.out.splitlines()) == 2  # one method: no advice


def test_a_method_that_needs_too_much_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def short(self: LLM, prompts: Any, settings: Settings, **more: Any) -> list[Result]:
        if settings.method == "threshold":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 byte")
        return generate(self, prompts, settings, **more)

    monkeypatch.setattr(LLM, "generate", short)
    arguments = [TASKS[0][0], "--track-budget", "24", "--batch", "2", *FAST]
    done = run(tmp_path, *arguments, "--methods", "flash-cache", "threshold")
    assert done.code == 0
    assert "threshold at batch 2: out of memory, left out\n" in done.err
    assert "out of memory, so no agreement with it\n" in done.err
    assert {row["case"]["method"] for row in done.results["rows"]} == {"flash-cache"}
    done = run(tmp_path / "b", TASKS[0][0], "--methods", "threshold", "--batch", "2", *FAST)
    assert done.code == 2 and "out of memory: give a smaller --batch" in done.err
    assert not list((tmp_path / "b").iterdir())


def test_peak_memory_is_a_runs_own_only_where_it_raised_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([100, 3_000_000_000, 3_000_000_000, 3_000_000_000])
    monkeypatch.setattr(compare, "_peak_memory", lambda: next(peaks))
    done = run(tmp_path, TASKS[1][0], "--methods", "threshold", "--batch", "2", "1", *FAST)
    agreements = [(r["case"]["batch"], r["median"]) for r in done.results["rows"] if r["metric"] == "agreement"]
    assert agreements == [(1, 1.0), (2, 1.0)]  # both with the larger batch
    assert [r["median"] for r in done.results["rows"] if r["metric"] == "peak_memory"] == [3_000_000_000]
    lines = done.out.splitlines()
    assert lines[0].endswith("peak memory") and lines[1].endswith("3.00 GB") and lines[2].endswith("-")
    assert lines[3].startswith("Peak memory is the whole process's")


BAD = {
    "method": (["a", "--methods", "magic"], "--methods magic: 'magic' is unknown: expected one of flash-dllm, "),
    "preset": (["a", "--presets", "magic"], "argument --presets: invalid choice: 'magic'"),
    "option of none": (["a", "--methods", "threshold", "--gamma", "0.5"], "--gamma is not an option of any"),
    "sweep": (["a", "--sweep", "steps", "3"], "--sweep steps: expected one of threshold, gamma, track_budget"),
    "value of a sweep": (["a", "--sweep", "gamma", "3"], "flash-dllm: gamma=3.0: expected a number in (0, 1]"),
    "huge batch": (["a", "--batch", "100000000"], "argument --batch: '100000000': expected at most 4096"),
    "batch": (["a", "--batch", "0"], "argument --batch: '0': expected an integer of at least 1"),
    "limit": (["--limit", "x"], "argument --limit: 'x': expected an integer of at least 1"),
    "blank prompt": (["a", " "], "empty prompt: number 1 (from 0) is blank"),
    "missing tasks": (["--tasks", "/no/such/file"], "--tasks /no/such/file: No such file"),
    "tasks and prompts": (["a", "--tasks", "x.jsonl"], "expected one of the two"),
    "tasks amiss": (["--tasks", __file__], f"--tasks {__file__}: line 1: not JSON"),
    "missing model": (["a", "--model", "/no/such/place"], "/no/such/place"),
    "too long": (["a", "--gen-length", "4096"], "prompt 0 has "),
    "unknown option": (["a", "--bogus"], "unrecognized arguments: --bogus"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message_and_exit_code_2(tmp_path: Path, case: str) -> None:
    arguments, message = BAD[case]
    done = run(tmp_path / "new", *arguments, *([] if "--batch" in arguments else ["--batch", "1"]))
    assert (done.code, done.out) == (2, "")
    assert message in done.err and done.err.startswith("fdllm_jax.compare: ") and done.err.count("\n") == 1
    assert not list(tmp_path.glob("new/*"))


def test_an_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = run(file, "a", "--batch", "1")
    assert done.code == 2 and done.err == f"fdllm_jax.compare: {file}: File exists\n"
