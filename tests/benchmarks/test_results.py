"""The committed results are whole, and the documents' tables are made from them."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from benchmarks import report, roofline, tables
from benchmarks.tables import DOCUMENTS, filled
from fdllm_jax import command_line

ROW = {"case", "metric", "unit", "median", "low", "high", "repeats", "floor", "baseline"}


@pytest.mark.parametrize("file", sorted(report.RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_results_hold_what_is_needed_to_repeat_them(file: Path) -> None:
    results = json.loads(file.read_text(encoding="utf-8"))
    assert set(results) == {"command", "date", "hardware", "versions", "settings", "rows"}
    assert results["command"].startswith(("python -m benchmarks.", "python -m fdllm_jax.compare ")) and results["rows"]
    for row in results["rows"]:
        assert set(row) == ROW
        assert row["low"] <= row["median"] <= row["high"] and row["repeats"] >= 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.parent.name))
def test_tables_are_those_of_the_results(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert "<!-- table:" in text
    assert filled(text) == text


def test_results_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "README.md"
    document.write_text("<!-- table: methods -->\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(tables, "DOCUMENTS", [document])
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.main([]) == 2 and "small_model.json: No such file" in capsys.readouterr().err
    (tmp_path / "small_model.json").write_text('{"rows": [', encoding="utf-8")
    assert tables.main([]) == 2 and "small_model.json: expected a benchmark's results" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("command", ["decoding", "small_model.evaluate"])
def test_ctrl_c_ends_a_command_that_imports(command: str) -> None:
    with subprocess.Popen([sys.executable, "-m", f"benchmarks.{command}"], stderr=subprocess.PIPE) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "jaxlib" not in maps.read_text():  # among the first that it imports, however slow the machine
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130) and b"Traceback" not in err


def test_a_table_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"task": "word_problems", "method": "a:b=1"}
    rows = {
        "small_model": [report.proportion(case, "accuracy", 3, 4),
                        report.row(case, "tokens_per_step", "tokens", 3.14159),
                        report.row(case, "tokens_per_forward", "tokens", 2.5),
                        report.row(case, "accuracy_difference", "fraction", -0.5, baseline={"name": "other"}),
                        report.row(case, "accuracy_difference", "fraction", -0.031, low=-0.042, high=0.01,
                                   baseline={"name": "llada"}),
                        report.proportion(case | {"task": "functions"}, "accuracy", 1, 4)],
        "methods": [report.row({"name": "a:b=1", "batch": 8}, "tokens_per_second", "tokens/s", 12345.6),
                    report.row({"name": "other", "batch": 32}, "tokens_per_second", "tokens/s", 1.0)],
    }  # fmt: skip
    monkeypatch.setattr(tables, "rows_of", rows.__getitem__)
    assert tables.methods().splitlines() == [
        "| method | accuracy | against `llada`, points | tokens per step | per forward | tokens/s, batch 8 "
        "| tokens/s, batch 32 |",
        "|---|---|---|---|---|---|---|",
        "| `a:b=1` | 75.0% | -3.1 (-4.2 to +1.0) | 3.14 | 2.50 | 12,346 | - |",
    ]


def test_a_table_of_gains_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for task, tokens in (("word_problems", 4.0), ("functions", 5.0)):
        for method, factor in (("flash-cache", 1.0), ("a", 1.5)):
            case = {"task": task, "method": method}
            rows += [report.row(case, f"tokens_per_{per}", "tokens", tokens * factor) for per in ("step", "forward")]
        for name in ("flash-cache", "llada"):
            beside = {"name": name}
            rows.append(
                report.row(case, "accuracy_difference", "fraction", 0.01, low=-0.02, high=0.03, baseline=beside)
            )
    monkeypatch.setattr(tables, "rows_of", lambda name: rows)
    assert tables.against().splitlines()[2:] == [
        "| `a` | +1.0 (-2.0 to +3.0) | 1.50x | 1.50x | +1.0 (-2.0 to +3.0) | 1.50x | 1.50x |"
    ]


def test_a_table_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"name": "flash-dllm", "batch": 8, "mask_window": 64, "track_budget": 64, "verify_rows": 32}
    floor = tables.floor_of_products(case)
    rows = [report.row(case | {"part": "iteration"}, "time", "s", 2 * floor)]
    for kernel, share in (("nvjet_a", 0.5), ("qkv_rope_cache", 0.75), ("rope_cache", 0.1), ("loop_fusion", 0.05)):
        rows.append(report.row(case | {"kernel": kernel}, "device_time", "s", share * floor))
    rows.append(report.row(case | {"name": "quality", "kernel": "nvjet_a"}, "device_time", "s", 1.0))
    monkeypatch.setattr(tables, "rows_of", lambda name: rows)
    (cells,) = (line.strip("| ").split(" | ") for line in tables.kernels_of_iteration().splitlines()[2:])
    assert cells[:2] == ["8", "`flash-dllm`"] and cells[4].endswith(" (1.25x)")
    assert cells[2:4] == [f"{1e3 * floor * share:.1f}" for share in (2, 1.4)]
    assert cells[5:] == ["0.0", "0.0", "0.0", f"{100 * floor:.1f}", "0.0", f"{50 * floor:.1f}"]


def test_the_floor_of_an_iterations_products() -> None:
    a_pass = {"mask_window": 32, "track_budget": 32, "block_length": 16, "batch": 32}
    one_pass = tables.floor_of_products(a_pass | {"plain_threshold": None})
    assert one_pass == pytest.approx(2 * 32 * 96 * 32 * roofline.LLADA_8B.layer_weights / 790e12)
    both = tables.floor_of_products(a_pass | {"verify_rows": 32})
    assert both == pytest.approx(one_pass)  # 64 + 32 rows, all of them bound by operations


def test_an_unfinished_run_replaces_nothing(tmp_path: Path) -> None:
    file, row = tmp_path / "x.json", report.row({}, "time", "s", 1.0)
    report.write(file, settings={}, rows=[row, row])
    report.write_part(file, settings={}, rows=[row])
    assert len(json.loads(file.read_text())["rows"]) == 2
    assert report.part(file).name == f"x.{os.getpid()}.part.json"  # another process has its own
    report.finish(file)
    assert len(json.loads(file.read_text())["rows"]) == 1 and list(tmp_path.iterdir()) == [file]


def test_ctrl_c_says_where_the_figures_are(tmp_path: Path) -> None:
    rows: list[int] = []
    with report.kept(tmp_path / "x.json", rows), report.kept(None, [1]):
        of_none, of_file = reversed(command_line._at_interrupt)
        assert of_none() == of_file() == ""
        rows.append(1)
        assert of_file() == f"what was measured lies in {report.part(tmp_path / 'x.json')}" and of_none() == ""


def test_the_shipped_checkpoint_keeps_its_promises() -> None:
    rows = json.loads((report.RESULTS / "small_model.json").read_text(encoding="utf-8"))["rows"]
    figures = {(r["case"]["task"], r["case"]["method"], r["metric"]): r for r in rows}
    problems = figures["word_problems", "llada", "accuracy"]
    assert problems["median"] >= 0.8 and problems["repeats"] == 2000
    code = figures["functions", "llada", "accuracy"]
    assert code["median"] >= 0.7 and code["repeats"] == 500
    assert 2.5 <= figures["word_problems", "threshold", "tokens_per_step"]["median"] <= 4
    for row in (problems, code):
        settings = row["case"]
        assert settings["steps"] == settings["gen_length"] and settings["block_length"] == 16


def test_refilled_slots_keep_their_promises() -> None:
    rows = tables.rows_of("batching_gsm8k")
    for row in rows:
        match row["metric"]:
            case "speedup":
                assert row["median"] >= 1.3
            case "occupancy":
                assert row["median"] > 0.9
            case "host_share":
                assert row["median"] < 0.05
            case "programs":
                assert row["median"] <= 8
    assert {row["metric"] for row in rows} > {"speedup", "occupancy", "host_share", "programs"}


def test_figures_at_llada_8bs_size_are_whole_and_keep_their_promises() -> None:
    of = tables.of_cases("decoding_8b")
    methods = {"flash-dllm", "flash-dllm:mask_window=32,track_budget=32", "flash-cache", "fast-dllm-dual"}
    assert set(of) == set(product((1, 8, 32), methods | {"quality", "balanced", "fast"}))
    parts = {"iteration", "rest", "prefill", "call", "decode_tokens_per_second", "tokens_per_second", "tokens_per_step"}
    for case in of.values():
        assert set(case) >= parts | {"tokens_per_forward", "accuracy", "planned_memory"}
        settings = case["iteration"]["case"]
        assert settings["synthetic"] and settings["shots"] == 8 and settings["gen_length"] == 256
    speed = {key: case["decode_tokens_per_second"]["median"] for key, case in of.items()}
    assert speed[1, "flash-dllm"] > 500 and speed[32, "flash-dllm"] > 1300 and speed[1, "balanced"] > 800
    shape = roofline.LLADA_8B
    weights = 2 * (shape.layers * shape.layer_weights + 2 * shape.vocab * shape.d_model)
    for batch in (1, 8, 32):
        cache = batch * 1344 * 2 * 2 * shape.layers * shape.heads * shape.head_dim
        assert of[batch, "flash-dllm"]["planned_memory"]["median"] <= 1.1 * (weights + cache)
    assert {batch for (batch,) in tables.of_cases("decoding_8b_batches", "batch")} == {1, 2, 4, 8, 16, 32, 64}


def test_the_grown_checkpoint_is_as_accurate_as_the_small_one() -> None:
    rows = [row for row in tables.rows_of("accuracy_8b") if row["metric"] == "accuracy_difference"]
    differences = [row for row in rows if row["baseline"]["name"] == "small.jsonl"]
    assert {row["case"]["method"] for row in differences} == {"flash-dllm", "balanced"}
    assert all(abs(row["median"]) <= 0.01 and row["repeats"] == 2000 for row in differences)


def test_proportions_have_wilson_intervals(tmp_path: Path) -> None:
    row = report.proportion({"task": "t"}, "accuracy", 81, 263)
    assert (round(row["low"], 3), round(row["high"], 3)) == (0.255, 0.366)  # Newcombe (1998), table I
    assert report.proportion({}, "accuracy", 5, 5)["high"] == 1.0
    report.write(tmp_path / "a" / "x.json", settings={"s": 1}, rows=[row])
    assert json.loads((tmp_path / "a" / "x.json").read_text())["rows"] == [row]
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "x.json"]


def test_a_table_without_an_end_is_no_table() -> None:
    with pytest.raises(ValueError, match="no <!-- end -->"):
        tables.filled("<!-- table: methods -->\nall of this\n<!-- table: against -->\n<!-- end -->\n")
