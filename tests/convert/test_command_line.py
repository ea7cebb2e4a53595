"""`python -m convert`: exit codes, one message, nothing left behind, and the memory that it takes."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import write_checkpoint
from convert import orbax_files, safetensors_files
from convert.__main__ import main
from convert.interrupts import Interrupts
from convert.table import layout
from tests.convert.checkpoints import SMALL, make, raw, rewrite

ROOT = Path(__file__).parents[2]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "convert", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def test_there_and_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", shards=True)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["--to-safetensors", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert raw(tmp_path / "c") == raw(tmp_path / "a")
    assert capfd.readouterr() == ("", "")  # no progress where there is no terminal


def test_an_id_without_a_network_is_one_message(tmp_path: Path) -> None:
    process = start("some-organisation/some-model", tmp_path / "b")
    output, message = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert message.startswith(
        "error: no such directory: some-organisation/some-model, and the Hugging Face hub could not"
    )
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_jax() -> None:
    code = "import sys, convert, convert.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def truncated(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_nan(directory: Path) -> None:
    rewrite(directory, {"model.transformer.ln_f.weight": np.full(16, np.nan, np.float32)})


def misshapen(directory: Path) -> None:
    rewrite(directory, {"model.transformer.ln_f.weight": np.ones(15, np.float32), "more": np.ones(1, np.float32)})


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [without_config, truncated, with_nan, misshapen, without_weights])
def test_bad_input_is_one_message_and_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Any) -> None:
    damage(make(tmp_path / "a"))
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    output, message = capfd.readouterr()
    assert output == ""
    assert message.startswith("error: ")
    assert "Traceback" not in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_bad_source_or_destination_is_one_message_and_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "a")
    assert main([str(tmp_path / "x"), str(tmp_path / "b")]) == 2
    assert capfd.readouterr().err.startswith("error: no such directory")
    assert main([str(tmp_path / "a"), str(tmp_path)]) == 2
    assert capfd.readouterr().err == f"error: {tmp_path} exists: give a new destination, or remove it first\n"
    below = tmp_path / "a" / "config.json"
    assert main([str(tmp_path / "a"), str(below / "b" / "c")]) == 2
    message = f"error: {below / 'b' / 'c'}: {below} is a file: give a destination in a folder\n"
    assert capfd.readouterr().err == message


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("back", [False, True])
def test_an_interrupt_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
    back: bool,
) -> None:
    make(tmp_path / "a")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    files = orbax_files if back else safetensors_files
    check, interrupts = files.check_finite, Interrupts()

    def interrupt(name: str, values: np.ndarray) -> None:
        check(name, values)
        if "blocks.2" in name:
            interrupts.note(number)

    monkeypatch.setattr(files, "check_finite", interrupt)
    chosen = ["--to-safetensors", str(tmp_path / "b")] if back else [str(tmp_path / "a")]
    assert main([*chosen, str(tmp_path / "c")], interrupts=interrupts) == code
    assert capfd.readouterr() == ("", "interrupted: nothing was kept\n")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "b"}


# 0.9 GB in tensors of up to 24 MB.
LARGE = dataclasses.replace(
    SMALL, vocab_size=4096, embedding_size=4096, d_model=2048, n_layers=8, n_heads=16, n_kv_heads=16, mlp_size=6144
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "a"
    write_checkpoint(directory, LARGE, dtype="bfloat16", seed=3, shard_bytes=2**28)
    return directory


def peak_anonymous(process: subprocess.Popen[str]) -> int:
    """Bytes of anonymous memory that the process held at most, asked every 2 ms until it ends."""
    peak = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        peak = max(peak, 1024 * int(lines.get("RssAnon", "0 kB").split()[0]))
        time.sleep(0.002)
    return peak


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is where Linux says what memory a process holds")
def test_memory_is_bounded_by_the_largest_tensor(large: Path) -> None:
    sizes = [2 * math.prod(part.shape) for parts in layout(LARGE).values() for part in parts]
    limit = 2 * max(sizes) + 512 * 10**6
    assert sum(sizes) > 1.5 * limit  # holding the whole would be seen
    there = start(large, large.parent / "b")
    peak_there = peak_anonymous(there)
    assert there.communicate() == ("", "")
    back = start("--to-safetensors", large.parent / "b", large.parent / "c")
    peak_back = peak_anonymous(back)
    assert back.communicate() == ("", "")
    assert (peak_there < limit, peak_back < limit) == (True, True), (peak_there, peak_back, limit)
    assert (there.returncode, back.returncode) == (0, 0)
    for name in ("model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"):
        assert (large / name).read_bytes() == (large.parent / "c" / name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_interrupt_leaves_nothing(large: Path, number: int) -> None:
    process = start(large, large.parent / "interrupted")
    while not list(large.parent.glob(".interrupted.*.partial/parameters/*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.communicate() == ("", "interrupted: nothing was kept\n")
    assert process.returncode == 128 + number
    assert not list(large.parent.glob("*interrupted*"))
