"""The command line, as a user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from fdllm_jax import Settings, generate
from tests.reference.checkpoint import random_checkpoint

QUESTION = "Tom has 12 apples. He buys 7 more. How many apples does Tom have?"
FAST = ["--method", "threshold", "--gen-length", "48", "--dtype", "float32"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = generate.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_piped_output_is_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, QUESTION, *FAST)
    assert code == 0 and err == ""
    assert re.fullmatch(r"[^\n].*\n#### \d+\n", out, re.DOTALL)


def test_json_has_one_object_a_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(QUESTION, encoding="utf-8")
    trace = tmp_path / "trace.html"
    code, out, err = run(
        capsys, "What is 3 + 4?", "--prompt-file", str(file), "--json", "--trace", str(trace), "--stats", *FAST
    )
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) == 2
    for record in records:
        assert set(record) == {
            "index", "text", "tokens", "prompt_tokens", "steps", "forwards", "tokens_per_step", "seconds",
            "tokens_per_second", "stop_reason", "method", "model", "settings",
        }  # fmt: skip
        assert record["tokens_per_step"] == record["tokens"] / record["steps"]
        assert record["settings"]["threshold"] == 0.9
    assert [r["settings"]["seed"] for r in records] == [0, 1]
    assert "tokens per second" in err and "compile" in err and re.search(r"by rule: \d+ threshold", err)
    page = trace.read_text(encoding="utf-8")
    assert "<html" in page and "What is 3 + 4?" in page


def test_every_setting_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        QUESTION, "--method", "llada", "--gen-length", "24", "--block-length", "8", "--steps", "6", "--temperature",
        "0.5", "--cfg-scale", "0.5", "--seed", "3", "--remasking", "random", "--logits-eos-inf",
        "--confidence-eos-eot-inf", "--stop", "zzz", "--raw", "--kernels", "xla", "--dtype", "float32", "--json",
    ]  # fmt: skip
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert json.loads(out)["settings"] == {
        "gen_length": 24, "block_length": 8, "temperature": 0.5, "seed": 3, "stop": ["zzz"], "steps": 6,
        "remasking": "random", "cfg_scale": 0.5, "logits_eos_inf": True, "confidence_eos_eot_inf": True,
    }  # fmt: skip

    arguments = [
        QUESTION, "--method", "flash-dllm-onepass", "--threshold", "0.8", "--gamma", "0.7", "--mask-window", "20",
        "--track-budget", "30", "--track-layers", "0", "3", "--acceptance", "agreement", "--order", "position",
        "--isolation", "strict", "--no-bonus", "--max-deviation", "0.5", "--plain-threshold", "0.99", "--json",
    ]  # fmt: skip
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    used = json.loads(out)["settings"]
    assert {k: used[k] for k in used.keys() - {"gen_length", "block_length", "temperature", "seed", "stop"}} == {
        "threshold": 0.8, "gamma": 0.7, "mask_window": 20, "track_budget": 30, "track_layers": [0, 3],
        "acceptance": "agreement", "order": "position", "isolation": "strict", "bonus": False, "max_deviation": 0.5,
        "plain_threshold": 0.99,
    }  # fmt: skip
    options = {action.dest for action in generate.parser()._actions}
    assert {field.name for field in fields(Settings)} <= options


BAD = {
    "no prompt": ([], "no prompt"),
    "empty prompt": ([""], "empty prompt"),
    "blank prompt among others": (["a", "  "], "empty prompt: number 1 (from 0) is blank"),
    "stdin twice": (["-", "--prompt-file", "-"], "more than once"),
    "gen_length": (["a", "--gen-length", "0"], "gen_length=0: expected an integer of at least 1"),
    "steps": (["a", "--method", "llada", "--steps", "-3"], "steps=-3: expected an integer of at least 1"),
    "method": (["a", "--method", "magic"], "method='magic' is unknown: expected one of flash-dllm, "),
    "option of another method": (["a", "--steps", "5"], "not an option of method 'flash-dllm', only of llada"),
    "preset of another method": (
        ["a", "--preset", "fast", "--method", "llada"],
        "fast is of flash-dllm-onepass, not of",
    ),
    "preset": (["a", "--preset", "magic"], "preset='magic' is unknown: expected one of gsm8k, "),
    "contradiction": (["a", "--block-length", "20", "--verify-rows", "5"], "use at least 39"),
    "too long": (["a", "--gen-length", "4096"], "more than the model's context, 4096"),
    "missing model": (["a", "--model", "/no/such/place"], "/no/such/place"),
    "missing file": (["a", "--prompt-file", "/no/such/file"], "/no/such/file"),
    "temperature": (["a", "--temperature", "1e300"], "temperature=1e+300: expected a number in [0, 10000]"),
    "no integer": (["a", "--seed", "1e99"], "argument --seed: invalid int value: '1e99'"),
    "unknown option": (["a", "--bogus"], "unrecognized arguments: --bogus"),
    "trace to a stream": (["a", "--trace", "-"], "--trace '-': expected the name of a file"),
    "trace nowhere": (["a", "--trace", "/no/such/folder/t.html"], "/no/such/folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, message = BAD[case]
    try:
        code = generate.main(arguments)
    except SystemExit as exit_:  # argparse's own
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err and err.startswith("fdllm_jax.generate: ") and err.count("\n") == 1


def test_prompt_file_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    code, _, err = run(capsys, "--prompt-file", str(file))
    assert code == 2 and "not UTF-8" in err


def test_tokenizer_of_another_checkpoint_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from fdllm_jax.engine import SHIPPED

    random_checkpoint(tmp_path, seed=0, tokenizer_from=SHIPPED)
    code, _, err = run(capsys, "a", "--model", str(tmp_path))
    assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--block-length", "--steps"])
def test_more_than_there_is_to_decode_is_the_same_as_all_of_it(capsys: pytest.CaptureFixture[str], option: str) -> None:
    few = ["--method", "llada", "--gen-length", "8", "--dtype", "float32"]
    assert run(capsys, QUESTION, *few, option, "8") == run(capsys, QUESTION, *few, option, str(10**12))


@pytest.mark.parametrize(
    ("closed", "arguments", "message"),
    [(1, ["a"], "standard output is closed"), (0, ["-"], "standard input, which is closed")],
)
def test_closed_streams_are_refused(closed: int, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", sys.executable, "-m", "fdllm_jax.generate", *arguments],
        stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_no_device_is_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fdllm_jax.generate", "a"], env=os.environ | {"JAX_PLATFORMS": "tpu"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "JAX finds no device to run on; JAX_PLATFORMS=tpu" in done.stderr and "Traceback" not in done.stderr


def wait_until_caught(process: subprocess.Popen) -> None:
    """Until Ctrl-C is no longer Python's own, which takes as long as the machine needs to start Python."""
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.findall(r"SigBlk:\t(\w+)", status.read_text())[0], 16) & 1 << signal.SIGINT - 1:
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("delay", [0.0, 1.0, 5.0])
def test_ctrl_c_ends_at_once(delay: float) -> None:
    """While it imports, while it loads and compiles, and in the middle of a long piped generation."""
    command = [sys.executable, "-m", "fdllm_jax.generate", QUESTION, "--method", "llada"]
    command += ["--gen-length", "3000", "--logits-eos-inf"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until_caught(process)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and err.endswith("fdllm_jax.generate: interrupted\n")
    assert "Traceback" not in err and time.monotonic() - sent < 5


def test_module_runs_from_standard_input_with_nothing_in_the_environment() -> None:
    """No HOME, no terminal, a pipe on every stream; and a reader that goes away is no error."""
    command = [sys.executable, "-m", "fdllm_jax.generate", "-", *FAST]
    done = subprocess.run(
        command,
        input=QUESTION,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        timeout=120,
        check=True,
    )
    assert "####" in done.stdout and done.stderr == ""


def test_ctrl_c_ends_whatever_thread_it_reaches() -> None:
    script = """
import signal, threading, time
from fdllm_jax import command_line
other = threading.Thread(target=time.sleep, args=(60,))
other.start()
command_line.exit_on_ctrl_c("generate")
signal.pthread_kill(other.ident, signal.SIGINT)
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 130 and done.stderr == "generate: interrupted\n"


def test_ctrl_c_prints_what_has_finished() -> None:
    """The signal comes when one of two responses has."""
    script = """
import os, signal, time
from fdllm_jax import command_line
command_line.exit_on_ctrl_c("generate")
from fdllm_jax import LLM, generate
stream = LLM.stream
def interrupted(*arguments, **options):
    yield next(stream(*arguments, **options))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
LLM.stream = interrupted
generate.main(["One?", "--gen-length", "8", "Two?", "--json"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130 and done.stderr.endswith("interrupted: 1 of 2 responses had finished\n")
    result = json.loads(done.stdout)
    assert result["index"] in (0, 1) and result["settings"]["gen_length"] == 8
