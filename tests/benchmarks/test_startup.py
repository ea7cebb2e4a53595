"""The benchmark of starting up, with the shipped checkpoint."""

import json
from pathlib import Path

import pytest

from benchmarks import startup


def test_a_run_with_an_empty_and_a_filled_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "startup.json"
    assert startup.main(["--method", "threshold", "--gen-length", "8", "--repeats", "1", "--output", str(file)]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    seconds = {(row["case"]["compilation_cache"], row["case"]["part"]): row["median"] for row in rows}
    assert {cache for cache, _ in seconds} == {"empty", "filled"}
    for cache in ("empty", "filled"):
        parts = ("Python and imports", "load", "compile", "first response")
        assert sum(seconds[cache, part] for part in parts) == pytest.approx(seconds[cache, "all"])
    assert capsys.readouterr().out.count(" s\n") == len(rows) == 10


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["--model", "/not/there"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.startup: no such directory: '/not/there'")
    assert startup.main(["--once", "--output", "x.json"]) == 2
    assert "leave one out" in capsys.readouterr().err
