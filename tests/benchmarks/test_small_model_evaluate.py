"""The small model's evaluation, on a few items."""

import json
from pathlib import Path

import pytest

from benchmarks.small_model import evaluate


def test_a_small_run_is_paired_with_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--methods", "threshold", "--presets", "--gen-length", "48", "--slots", "4", "--functions", "1"]
    samples, file = tmp_path / "samples.jsonl", tmp_path / "results.json"
    evaluate.main([*given, "--problems", "4", "--samples", str(samples), "--output", str(tmp_path / "other.json")])
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert [line["task"] for line in lines] == ["word_problems"] * 4 + ["functions"]
    lines[0]["right"] = not lines[0]["right"]  # as if the other model had judged it otherwise
    samples.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    assert evaluate.main([*given, "--problems", "2", "--first", "1", "--against", str(samples)]) == 2
    assert "1 of 1 functions have no sample" in capsys.readouterr().err  # and both of the problems have one
    evaluate.main([*given, "--problems", "2", "--against", str(samples), "--output", str(file)])
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    found = {(row["case"]["task"], row["metric"]): row for row in rows}
    accuracy, difference = (found["word_problems", name] for name in ("accuracy", "accuracy_difference"))
    assert accuracy["repeats"] == difference["repeats"] == 2 and difference["baseline"]["name"] == str(samples)
    assert abs(difference["median"]) == 0.5 and found["functions", "accuracy_difference"]["median"] == 0
    both = found["together", "accuracy"]
    assert both["repeats"] == 3
    parts = [found[task, "accuracy"] for task in ("word_problems", "functions")]
    assert both["median"] * 3 == pytest.approx(sum(of["median"] * of["repeats"] for of in parts))
    assert min(of["median"] for of in parts) <= both["median"] <= max(of["median"] for of in parts)
    assert difference["baseline"]["slots"] == 4 and difference["baseline"]["dtype"] == "float32"
    shorter = [line | {"settings": line["settings"] | {"gen_length": 16}} for line in lines]

    for content, message in (
        ("\n".join(map(json.dumps, lines[1:])), "1 of 2 word_problems have no sample of threshold there"),
        ("\n".join(map(json.dumps, shorter)), "had gen_length=16 there, and has 48 here"),
        ("{}\n", "line 1 is '{}'"),
    ):
        samples.write_text(content, encoding="utf-8")
        assert evaluate.main([*given, "--problems", "2", "--against", str(samples)]) == 2
        assert message in capsys.readouterr().err
    assert evaluate.main([*given, "--against", str(tmp_path / "none")]) == 2
    before = samples.read_text(encoding="utf-8")
    assert evaluate.main([*given, "--against", str(samples), "--samples", str(samples)]) == 2
    assert "--against has that name too" in capsys.readouterr().err and samples.read_text(encoding="utf-8") == before
