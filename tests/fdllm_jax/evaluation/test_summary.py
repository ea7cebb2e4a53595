"""The figures of a summary against sums by hand."""

import json
from pathlib import Path

import pytest

from fdllm_jax.evaluation import summary
from fdllm_jax.report import wilson
from tests.fdllm_jax.evaluation.test_samples import sample

SAMPLES = [
    sample(0, scores={"a": 1.0, "b": 0.0}, tokens=10, steps=4, forwards=8, seconds=2.0),
    sample(1, scores={"a": 1.0, "b": 1.0}, tokens=0, steps=1, forwards=2, seconds=0.5, stop_reason="length"),
    sample(
        2, scores={"a": 0.0, "b": 0.0}, tokens=20, steps=5, forwards=10, seconds=2.5, slots=8, stop_reason="refused"
    ),
]


def test_figures(tmp_path: Path):
    summary.write(tmp_path, {"seed": 3}, {"task": "t"}, SAMPLES, complete=True)
    report = json.loads((tmp_path / "summary.json").read_text())
    assert (
        report["settings"] == {"seed": 3, "slots": [2, 8]}
        and {"hardware", "versions", "command", "date"} <= report.keys()
    )
    found = {(row["metric"], row["case"].get("score")): row for row in report["rows"]}
    values = {key: row["median"] for key, row in found.items()}
    assert values == {
        ("accuracy", "a"): pytest.approx(2 / 3),
        ("accuracy", "b"): pytest.approx(1 / 3),
        ("tokens", None): 30,
        ("forwards", None): 20,
        ("tokens_per_step", None): 3,
        ("tokens_per_forward", None): 1.5,
        ("tokens_per_second", None): 6,
        ("ended", None): pytest.approx(1 / 3),
        ("refused", None): pytest.approx(1 / 3),
    }
    accuracy = found["accuracy", "a"]
    assert (accuracy["low"], accuracy["high"]) == pytest.approx(wilson(2 / 3, 3)) and accuracy["repeats"] == 3
    assert all(row["case"]["task"] == "t" for row in report["rows"])
    assert not any(row["metric"] == "tokens_per_second" for row in summary.rows({}, SAMPLES, complete=False))


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        summary.rows({}, [], complete=True)
