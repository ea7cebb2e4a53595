"""The floors are those that the documents print, and the kernels' benchmark runs from end to end on tiny shapes."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks import kernel_cases, kernels, report, roofline
from benchmarks.roofline import H200, LLADA_8B, Work

KEYS = 956
tiny_on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="tiny shapes are the CPU's: noise on a GPU")


def attention(slots: int) -> Work:
    return roofline.scheduled_attention(LLADA_8B, rows=128, slots=slots, kv_length=1280)


def forward(rows: int, slots: int, head_rows: int = 16) -> Work:
    return roofline.forward(LLADA_8B, rows=rows, slots=slots, kv_length=KEYS, head_rows=head_rows)


# (what, work, printed floor in seconds, half a unit of the last printed digit)
FLOORS = [
    ("qkv 128", roofline.qkv_rope_cache(LLADA_8B, rows=128), 24.4e-6, 0.05e-6),
    ("qkv 1024", roofline.qkv_rope_cache(LLADA_8B, rows=1024), 131e-6, 0.6e-6),  # 130.48
    ("qkv 4096", roofline.qkv_rope_cache(LLADA_8B, rows=4096), 522e-6, 0.5e-6),
    ("out 128", roofline.linear_residual(rows=128, k=4096, n=4096), 8.3e-6, 0.05e-6),
    ("down 128", roofline.linear_residual(rows=128, k=12288, n=4096), 24.4e-6, 0.05e-6),
    ("gate+up 128", roofline.product(rows=128, k=4096, n=2 * 12288), 48.5e-6, 0.05e-6),
    ("logits 64", roofline.product(rows=64, k=4096, n=126464), 245e-6, 0.5e-6),
    ("attention 1", attention(1), 5e-6, 0.5e-6),
    ("attention 8", attention(8), 39e-6, 0.5e-6),
    ("attention 32", attention(32), 156e-6, 0.5e-6),
    ("draft 1", forward(128, 1), 3.60e-3, 0.005e-3),
    ("draft 8", forward(128, 8), 18.9e-3, 0.05e-3),
    ("draft 32", forward(128, 32), 75.6e-3, 0.06e-3),  # 75.65
    ("verify 1", forward(32, 1), 3.6e-3, 0.05e-3),
    ("verify 8", forward(32, 8), 4.9e-3, 0.05e-3),
    ("verify 32", forward(32, 32), 19.4e-3, 0.05e-3),
    ("one-pass 1", forward(160, 1, head_rows=48), 3.7e-3, 0.1e-3),  # printed with activations; 3.60 without
    ("one-pass 8", forward(160, 8, head_rows=48), 24e-3, 0.5e-3),
    ("one-pass 32", forward(160, 32, head_rows=48), 96e-3, 0.5e-3),
    ("prefill 1", forward(KEYS, 1), 17.5e-3, 0.05e-3),
    ("prefill 8", forward(KEYS, 8), 140e-3, 0.5e-3),
    ("prefill 32", forward(KEYS, 32), 561e-3, 0.5e-3),
]


@pytest.mark.parametrize(("work", "seconds", "half_unit"), [f[1:] for f in FLOORS], ids=[f[0] for f in FLOORS])
def test_floors_are_the_documents(work: Work, seconds: float, half_unit: float) -> None:
    assert abs(work.floor(H200) - seconds) <= half_unit


@pytest.mark.parametrize(("slots", "gigabytes"), [(1, 16.5), (8, 20.0), (32, 32.1)])
def test_memory_is_the_documents(slots: int, gigabytes: float) -> None:
    assert abs(roofline.memory(LLADA_8B, slots=slots, kv_length=KEYS) / 1e9 - gigabytes) <= 0.05


def test_which_ceiling_binds() -> None:
    """Few rows are bound by the bytes, many by the operations; an extra output costs its bytes."""
    few, many = roofline.gate_up_silu(LLADA_8B, rows=16), roofline.gate_up_silu(LLADA_8B, rows=4096)
    assert few.floor(H200) == few.bytes / H200.bytes_per_second > few.flops / H200.flops
    assert many.floor(H200) == many.flops / H200.flops > many.bytes / H200.bytes_per_second
    scored = roofline.scheduled_attention(LLADA_8B, rows=128, slots=8, kv_length=1280, scores=True)
    assert scored.bytes - attention(8).bytes == 4 * 8 * 1280 and scored.flops == attention(8).flops
    verify = roofline.verify_attention(LLADA_8B, rows=32, slots=8, kv_length=1280)
    assert verify.bytes == 8 * (2 * 2 * 4096 * (1280 + 32) + 1280)
    head = roofline.head_statistics(LLADA_8B, rows=64)
    assert head.bytes == 2 * 4096 * (126464 + 64)


@tiny_on_cpu
def test_a_tiny_run_writes_whole_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    assert kernels.main(["--tiny", "--repeats", "2", "--output", str(file)]) == 0
    results = json.loads(file.read_text(encoding="utf-8"))
    assert set(results) == {"command", "date", "hardware", "versions", "settings", "rows"}
    figures = {(row["case"]["op"], row["case"]["kernels"], row["metric"]): row for row in results["rows"]}
    expected = {(op, *rest) for op in kernels.OPS for rest in
                (("xla", "time"), ("interpret", "time"), ("interpret", "error"))}  # fmt: skip
    assert set(figures) == expected and len(results["rows"]) == len(expected)
    for (_, name, metric), row in figures.items():
        assert set(row) == set(report.row({}, "", "", 0.0))
        assert row["low"] <= row["median"] <= row["high"]
        if metric == "error":
            assert 0 <= row["median"] <= kernels.LIMIT
        else:
            assert row["repeats"] == 2 and (row["baseline"] is None) == (name == "xla")
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(op + " ") for line in lines) for op in kernels.OPS)
    assert lines[-1].endswith("0 failed")


def test_a_failure_is_a_line_and_the_rest_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, kernels: str, **__: object) -> jax.Array:
        raise RuntimeError("out of\nshared memory")

    monkeypatch.setattr(kernel_cases, "gate_up_silu", broken)
    file = tmp_path / "kernels.json"
    chosen = ["--ops", "gate_up_silu", "out", "--repeats", "1", "--output", str(file)]
    assert kernels.main(["--tiny", *chosen]) == 1
    assert "FAILED RuntimeError: out of shared memory" in capsys.readouterr().out
    assert {row["case"]["op"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]} == {"out"}


def test_a_wrong_kernel_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_cases.gate_up_silu
    wrong = {"xla": 1.0, "interpret": 1.05}
    monkeypatch.setattr(
        kernel_cases,
        "gate_up_silu",
        lambda x, weight, *, kernels: right(x, weight) * jax.numpy.asarray(wrong[kernels], x.dtype),
    )
    assert kernels.main(["--tiny", "--ops", "gate_up_silu", "--repeats", "1"]) == 1
    assert "against the fp32 reference" in capsys.readouterr().out


@tiny_on_cpu
def test_plain_triton_has_rows_where_jax_triton_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those of any kernel; XLA stands in for it here."""
    cases = [kernels.OPS[op](kernel_cases.TINY)[0] for op in ("qkv_rope_cache", "out")]
    for installed, expected in (object(), [("pallas", "triton"), ("pallas",)]), (None, [("pallas",)] * 2):
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name, installed=installed: installed)
        assert [kernels.ours(case, "pallas") for case in cases] == expected
        assert [kernels.ours(case, "interpret") for case in cases] == [("interpret",)] * 2
    monkeypatch.undo()
    right = kernel_cases.qkv_rope_cache
    monkeypatch.setattr(kernels, "ours", lambda case, kernel: ("triton",))
    monkeypatch.setattr(
        kernel_cases,
        "qkv_rope_cache",
        lambda *args, kernels, **rest: right(*args, **rest),
    )
    file = tmp_path / "kernels.json"
    chosen = ["--ops", "qkv_rope_cache", "--repeats", "1", "--output", str(file)]
    assert kernels.main(["--tiny", *chosen]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {(row["case"]["kernels"], row["metric"], (row["baseline"] or {}).get("name")) for row in rows} == {
        ("xla", "time", None), ("triton", "time", "xla"), ("triton", "error", None)
    }  # fmt: skip


def test_a_sweep_prints_the_best_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, table, candidates = kernels.SWEEPS["out"]
    monkeypatch.setattr(kernels, "SWEEPS", {"out": (module, table, candidates[:2])})
    before = getattr(module, table)
    assert kernels.main(["--tiny", "--sweep", "--ops", "out", "--repeats", "1"]) == 0
    assert "BEST" in capsys.readouterr().out
    assert getattr(module, table) is before


@pytest.mark.parametrize(
    ("given", "message"), [([], "use --tiny"), (["--tiny", "--rows", "0"], "at least 1"),
                           (["--tiny", "--sweep", "--output", "x"], "leave --output out")],
)  # fmt: skip
def test_bad_options_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit):
        kernels.main(given)
    assert message in capsys.readouterr().err
