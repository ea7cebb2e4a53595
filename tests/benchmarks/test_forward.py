"""The benchmark of whole forwards, at a tiny shape."""

import json
from pathlib import Path

import pytest

from benchmarks import forward


def test_a_tiny_run_writes_whole_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "forward.json"
    parts = ["draft", "verify", "one-pass"]
    assert forward.main(["--tiny", "--slots", "2", "--repeats", "1", "--parts", *parts, "--output", str(file)]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in rows] == [{"part": part, "kernels": "xla", "batch": 2} for part in parts]
    assert all(row["unit"] == "s" and row["low"] <= row["median"] <= row["high"] for row in rows)
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--kernels", "pallas"], "leave --kernels out"), (["--output", "none/x.json"], "none/x.json")],
)
def test_what_cannot_be_is_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        forward.main(["--tiny", *given])
    assert message in capsys.readouterr().err
