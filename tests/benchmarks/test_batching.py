"""The benchmark of continuous batching, on a few prompts."""

import json
from pathlib import Path

import pytest

from benchmarks import batching


def test_batching(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(9)]
    lines = "".join(json.dumps(example) + "\n" for example in examples)
    for name in ("train", "test"):
        (tmp_path / f"gsm8k_{name}.jsonl").write_text(lines, encoding="utf-8")
    few = ["--prompts", "5", "--slots", "2", "--gen-length", "4", "--repeats", "2", "--methods", "threshold"]
    assert batching.main([*few, "--data", str(tmp_path), "--output", str(tmp_path / "batching.json")]) == 0
    rows = json.loads((tmp_path / "batching.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["case"].get("batching"), row["metric"]): row for row in rows}
    assert found[None, "programs"]["median"] == 1
    for kind in ("continuous", "longest first"):
        assert found[kind, "occupancy"]["median"] == 1.0 and 0 < found[kind, "host_share"]["median"] < 1
        assert {found[kind, metric]["repeats"] for metric in ("speedup", "occupancy", "host_share")} == {2}
    assert ("whole batches", "tokens_per_second") in found and ("whole batches", "speedup") not in found
    assert "threshold continuous" in capsys.readouterr().out
    assert batching.main([*few, "--prompts", "1"]) == 0  # of word problems, and written nowhere
    assert batching.main(["--data", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
