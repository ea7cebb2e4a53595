"""The paper's tables, on tiny grids: their figures against the engine's, what they write, and what they refuse."""

import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tests.command
from benchmarks import report
from benchmarks.paper import command, figure6, figure7, measure, show, table1, table4, table5, table6
from benchmarks.paper.grid import Asked, Table, cross
from benchmarks.paper.methods import variant
from benchmarks.paper.published import PUBLISHED, SOURCE, baseline
from benchmarks.paper.suites import PAPERS, SUITES, sample
from benchmarks.small_model import word_problems
from fdllm_jax import LLM, Settings, engine
from fdllm_jax.memory import OutOfMemory
from fdllm_jax.tasks import extract_answer
from tests.benchmarks.test_results import ROW

TINY = ["--gen-length", "16", "--batch", "2", "--limit", "2"]
TABLES = {
    "table1": (replace(table1.TABLE, methods=("flash-dllm",)), [*TINY, "--repeats", "2"]),
    "table4": (table4.TABLE, ["--gen-length", "16", "--batch", "2", "--limit", "3", "--seeds", "2"]),
    "table5": (replace(table5.TABLE, methods=("flash-dllm",)), [*TINY, "--repeats", "1"]),
    "table6": (replace(table6.TABLE, methods=("flash-dllm",)), [*TINY, "--repeats", "1"]),
    "figure6": (replace(figure6.TABLE, methods=("flash-dllm",)), [*TINY, "--repeats", "1"]),
    "figure7": (
        replace(figure7.TABLE, methods=("flash-dllm",), cells=partial(cross, options=[{"mask_window": 64}])),
        [*TINY, "--repeats", "1"],
    ),
}  # fmt: skip


GRIDS = {table4: {"BUDGETS": (64,), "GAMMAS": (0.6, 1.0), "THRESHOLDS": (0.5,)}, table5: {"SHOTS": (0, 1)}}


class Done(tests.command.Done):
    """A finished table."""

    def figures(self, **case: Any) -> dict[str, Any]:
        """The rows of a case by metric."""
        return {r["metric"]: r for r in self.results["rows"] if case.items() <= r["case"].items()}


def run(folder: Path, table: Table, *arguments: str) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        for module, constants in GRIDS.items():
            for constant, value in constants.items():
                patch.setattr(module, constant, value)
        return Done(*tests.command.finished(partial(command.main, table), folder, *arguments))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One model for all commands, so that they share compiled programs."""
    one = LLM(dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "LLM", lambda *_, **__: one)
        yield one


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, llm: LLM) -> Callable[[str], Done]:
    """A table's command, run once."""

    @functools.cache
    def of(name: str) -> Done:
        table, arguments = TABLES[name]
        return run(tmp_path_factory.mktemp(name), table, *arguments)

    return of


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_printed_written_and_drawn(name: str, done: Callable[[str], Done]) -> None:
    of = done(name)
    assert of.code == 0, of.err
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert of.files == [f"paper_{name}.json", *[f"paper_{name}.png"] * drawn]
    assert of.results["settings"]["synthetic"][0] == "word_problems" and "synthetic tasks: word_problems" in of.out
    cells = {json.dumps(row["case"]) for row in of.results["rows"] if row["metric"] == "tokens_per_step"}
    assert len(cells) == {"table1": 2, "table4": 3, "table5": 3}.get(name, 1)
    assert len(of.out.splitlines()) == 2 + 1 + 1 + len(cells) and "\x1b" not in of.out
    task = "functions" if name == "table1" else "word_problems"
    assert of.err.splitlines()[-1].startswith(f"benchmarks.paper.{name}: {len(cells)} of {len(cells)}: {task}, ")
    for row in of.results["rows"]:
        assert row.keys() == ROW and row["low"] <= row["median"] <= row["high"]
        assert row["case"]["synthetic"] and row["case"]["task"] in ("word_problems", "functions")


@pytest.mark.parametrize("name", [name for name in TABLES if name != "table4"])
def test_figures_are_those_of_the_engine(name: str, done: Callable[[str], Done], llm: LLM) -> None:
    of = done(name)
    problems = [word_problems.make(i, split="test") for i in range(2)]
    llm.slots = 2
    results = llm.generate([problem.question for problem in problems], Settings(gen_length=16))
    figures = of.figures(task="word_problems", method="flash-dllm", shots=0)
    if name == "table6":  # one example before the question, as the model was trained
        shots = [word_problems.make(i, split="train") for i in range(2)]
        prompts = [
            f"Question: {shot.question}\nAnswer: {shot.answer}\n\nQuestion: {problem.question}\nAnswer:"
            for shot, problem in zip(shots, problems, strict=True)
        ]
        results = llm.generate(prompts, Settings(gen_length=16))
        figures = of.figures(task="word_problems", method="flash-dllm", shots=1)
        assert figures["planned_memory"]["median"] > 2 * llm.plan.cache
    right = [extract_answer(r.text) == str(p.gold) for r, p in zip(results, problems, strict=True)]
    assert figures["accuracy"]["median"] == sum(right) / 2
    tokens, steps = sum(len(r.token_ids) for r in results), sum(r.steps for r in results)
    assert figures["tokens_per_step"]["median"] == pytest.approx(tokens / steps)
    assert figures["tokens_per_second"]["repeats"] == (2 if name == "table1" else 1)
    assert figures["tokens_per_second"]["case"]["prompt_tokens"] == round(sum(len(r.prompt_ids) for r in results) / 2)
    if name == "figure6":
        rows = of.results["rows"]
        shares = {r["case"]["tokens"]: r["median"] for r in rows if r["metric"] == "share_of_steps"}
        assert sum(shares.values()) == pytest.approx(1)
        assert sum(n * share for n, share in shares.items()) == pytest.approx(tokens / steps)
        course = {r["case"]["tenth"]: r["median"] for r in rows if r["metric"] == "tokens_of_a_step"}
        assert course[1] == sum(r.step_of.count(0) for r in results) / 2  # fewer than ten steps: the first alone


def test_seeds_draw_the_items_and_their_spread_is_told(done: Callable[[str], Done], llm: LLM) -> None:
    of = done("table4")
    items = SUITES["word_problems"].items(None, 12)
    shares = []
    for seed in range(2):
        drawn = sample(items, 3, seed)
        assert len({item.key for item in drawn}) == 3
        llm.slots = 2
        results = llm.generate([item.prompt for item in drawn], Settings(gen_length=16, gamma=0.6))
        shares.append(sum(len(r.token_ids) for r in results) / sum(r.steps for r in results))
    figure = of.figures(gamma=0.6, sweep="gamma")["tokens_per_step"]
    assert sample(items, 3, 0) != sample(items, 3, 1) and figure["repeats"] == 2
    assert (figure["low"], figure["high"]) == pytest.approx((min(shares), max(shares)))
    assert of.results["settings"]["seeds"] == [0, 1]


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([measure.decode])

    def decode(*arguments: Any) -> Any:
        one = next(calls, None)
        if one is None:
            raise KeyboardInterrupt
        return one(*arguments)

    monkeypatch.setattr(measure, "decode", decode)
    table, arguments = TABLES["table5"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, table, *arguments)
    assert [file.name for file in tmp_path.iterdir()] == [report.part(tmp_path / "paper_table5.json").name]
    rows = json.loads(report.part(tmp_path / "paper_table5.json").read_text(encoding="utf-8"))["rows"]
    assert {row["case"]["sweep"] for row in rows} == {"gen_length"}


def test_what_does_not_fit_the_memory_is_left_out(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(llm: LLM, ids: Any, variant: Any, batch: int, repeats: int) -> Any:
        if variant.settings.method == "llada" or batch == 1:
            raise OutOfMemory("out of memory: this takes 1 TB")
        return measured(llm, ids, variant, batch, repeats)

    measured = measure.decode
    monkeypatch.setattr(measure, "decode", decode)
    monkeypatch.setattr(llm, "compile", lambda *_: None)
    table, arguments = TABLES["table6"]
    done = run(tmp_path / "a", table, *arguments, "--methods", "llada", "flash-dllm")
    assert done.code == 0 and "benchmarks.paper.table6: llada at batch 2: out of memory, left out" in done.err
    assert {row["case"]["method"] for row in done.results["rows"]} == {"flash-dllm"}
    done = run(tmp_path / "b", table, *arguments, "--batch", "1")
    assert done.code == 2 and done.files == []
    assert done.err.splitlines()[-1].startswith("benchmarks.paper.table6: out of memory: give a smaller --batch")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("table1", ["--tasks", "gsm8k"], "task gsm8k is read from local files: give their folder as --data"),
        ("table1", ["--tasks", "gsm8k", "--data", "/no/such"], "/no/such: there is no such file or folder"),
        ("table1", ["--model", "/some/model"], "task gsm8k is read from local files"),
        ("figure6", ["--data", "/no/such"], "/no/such: there is no such file or folder"),
        ("table1", ["--methods", "sampling"], "argument --methods: invalid choice: 'sampling'"),
        ("table1", ["--limit", "0"], "argument --limit: '0': expected an integer of at least 1"),
        ("table4", ["--repeats", "2"], "unrecognized arguments: --repeats 2"),
        ("figure7", ["--methods", "llada"], "llada: mask_window=64 is not an option of method 'llada'"),
    ],
)
def test_errors_are_one_message(tmp_path: Path, name: str, arguments: list[str], message: str) -> None:
    done = run(tmp_path, TABLES[name][0], *arguments)
    assert done.code == 2 and done.out == "" and done.files == []
    assert len(done.err.splitlines()) == 1 and done.err.startswith(f"benchmarks.paper.{name}: ") and message in done.err


def test_samples_that_would_all_be_the_same_are_refused() -> None:
    items = SUITES["word_problems"].items(None, 4)
    with pytest.raises(ValueError, match="4 items and samples of 4: each seed would draw the same ones"):
        sample(items, 4, 0)
    assert sample(items, 3, None) == items[:3]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six questions a split."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}?", "answer": f"so\n\n#### {i}"} for i in range(6)]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


def test_a_benchmark_is_read_from_its_files(tmp_path: Path, gsm8k: Path, llm: LLM) -> None:
    done = run(tmp_path, TABLES["table1"][0], *TINY, "--tasks", "gsm8k", "--data", str(gsm8k), "--repeats", "1")
    assert done.code == 0 and "synthetic" not in done.out and done.results["settings"]["tasks"]["gsm8k"]["shots"] == 5
    items = SUITES["gsm8k"].items(gsm8k, None)[:2]
    settings = Settings.preset("gsm8k", gen_length=16, stop=SUITES["gsm8k"].task.stop)
    llm.slots = 2
    results = llm.generate([item.prompt for item in items], settings, raw=True)
    figures = done.figures(task="gsm8k", synthetic=False)
    share = sum(len(r.token_ids) for r in results) / sum(r.steps for r in results)
    assert figures["tokens_per_step"]["median"] == pytest.approx(share)
    scores = [SUITES["gsm8k"].task.score(i, r.text)["strict-match"] for i, r in zip(items, results, strict=True)]
    assert figures["accuracy"]["median"] == sum(scores) / 2


def test_shots_of_gsm8k(gsm8k: Path) -> None:
    """Fewer are a prompt's first ones, more are its own and then those of the items after it."""
    suite = SUITES["gsm8k"]
    items = suite.items(gsm8k, None)[:2]
    assert suite.with_shots is not None
    assert [item.prompt for item in suite.with_shots(items, 5)] == [item.prompt for item in items]
    one, seven = (suite.with_shots(items, shots)[0].prompt for shots in (1, 7))
    assert one.count("Question: train") == 1 and items[0].prompt.startswith(one.split("Question: test")[0])
    assert seven.count("Question: train") == 7 and seven.endswith("\n\nQuestion: test 0?\nAnswer:")
    assert seven.startswith(items[0].prompt.split("Question: test")[0])
    with pytest.raises(ValueError, match="2 items have 10 shots, not 11: give a larger --limit"):
        suite.with_shots(items, 11)


def test_every_figure_of_the_paper_stands_beside_one_of_ours() -> None:
    found = set()
    suites = [SUITES[name] for name in PAPERS]
    for table, its in ((table1.TABLE, suites), (table4.TABLE, suites[:1]), (table6.TABLE, suites[:1])):
        for cell in table.cells(Asked(suites=its, methods=table.methods)):
            for batch in table.batches:
                settings = cell.variant.settings
                case = cell.case | {"method": settings.method, "batch": batch, **settings.used()}
                found |= {
                    (n, metric)
                    for n, (_, figures) in enumerate(PUBLISHED)
                    for metric in figures
                    if (figure := baseline(case, metric)) and figure["median"] == figures[metric]
                }
    assert found == {(n, metric) for n, (_, figures) in enumerate(PUBLISHED) for metric in figures}


def test_the_papers_figures_are_told_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    case = {"task": "gsm8k", "gen_length": 512, "batch": 32, "name": "flash-dllm"}
    paper = {"name": SOURCE, "median": 210.6}
    speed = report.row(case, "tokens_per_second", "tokens/s", 4321.0, baseline=paper)
    other = report.row(case | {"name": "fast"}, "tokens_per_second", "tokens/s", 5000.0)
    show.print_table(table1.TABLE, [speed, other], "title")
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["title"],
        ["gsm8k,", "gen_length", "512,", "batch", "32"],
        ["name", "tokens/s", "paper's"],
        ["flash-dllm", "4,321", "210.6"],
        ["fast", "5,000", "-"],
        f"paper's: {SOURCE}".split(),
    ]


def test_block_lengths_and_presets_are_those_of_the_task() -> None:
    """The paper's Table 3, and Fast-dLLM's own block."""
    mbpp, humaneval = (SUITES[name] for name in ("mbpp", "humaneval"))
    assert variant(mbpp, "flash-dllm", 512).settings == Settings.preset("mbpp", gen_length=512, stop=mbpp.task.stop)
    assert variant(humaneval, "flash-dllm", 256).settings.gamma == 0.85
    assert variant(mbpp, "flash-cache", 512).settings.track_budget == 48
    assert [variant(mbpp, name, 512).settings.block_length for name in ("fast-dllm-dual", "balanced")] == [32, 16]
