"""Samples on disk: what survives an end at any byte, and what is refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdllm_jax.evaluation.samples import Sample, Samples

SETTINGS = {"task": "gsm8k", "model": "m", "method": {"gamma": 0.8, "stop": ("a", "b")}, "chat_template": False}


def sample(index: int, text: str = "four", **more: object) -> Sample:
    given = {
        "key": str(index),
        "prompt": "2 + 2?\n",
        "tokens": 3,
        "steps": 2,
        "forwards": 4,
        "seconds": 0.5,
        "slots": 2,
    }
    return Sample(**given | {"index": index, "text": text, "stop_reason": "eos", "scores": {"pass@1": 1.0}} | more)


def test_samples_come_back_by_index(tmp_path: Path):
    written = [sample(i, text) for i, text in ((2, "b\u2028\r\n\x00"), (0, "\ud800"), (1, "α"))]
    with Samples(tmp_path / "new" / "folder", SETTINGS) as samples:
        for one in written:
            samples.append(one)
        assert samples.done == {0, 1, 2}
    with Samples(tmp_path / "new" / "folder", SETTINGS) as samples:
        assert samples.all == sorted(written, key=lambda one: one.index)
        with pytest.raises(ValueError, match="item 1 has a sample already"):
            samples.append(sample(1))
        with pytest.raises(ValueError, match="not JSON compliant"):
            samples.append(sample(3, seconds=float("nan")))
        samples.append(sample(3))
    lines = (tmp_path / "new/folder/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [2, 0, 1, 3]


@settings(max_examples=40)
@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=4), data=st.data())
def test_a_file_cut_at_any_byte_keeps_its_whole_lines(
    texts: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("cut")
    with Samples(folder, SETTINGS) as samples:
        for index, text in enumerate(texts):
            samples.append(sample(index, text))
    path = folder / "samples.jsonl"
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    with Samples(folder, SETTINGS) as samples:
        assert samples.all == [sample(i, text) for i, text in enumerate(texts[:whole])]
        samples.append(sample(99))
    assert path.read_bytes().startswith(content[: content[:cut].rfind(b"\n") + 1])
    with Samples(folder, SETTINGS) as samples:
        assert samples.done == {*range(whole), 99}


# Forks a child that is killed within its n-th call of a function, after so many bytes of the line: then the folder is
# opened again, and has what `append` had returned from, or that line as well.
KILLED = """
import os, signal, sys, json
from pathlib import Path
from fdllm_jax.evaluation import samples as module
from fdllm_jax.evaluation.samples import Sample, Samples

def sample(index):
    return Sample(index=index, key="k", prompt="p", text="t\\n", tokens=1, steps=1, forwards=1, seconds=1.0, slots=1,
                  stop_reason="eos", scores={"m": 1.0})

def die(): os.kill(os.getpid(), signal.SIGKILL)

def session(folder, function, call, size):
    true, calls = getattr(os, function), 0
    def fatal(*arguments):
        nonlocal calls
        calls += 1
        if calls == call:
            if function == "write":
                true(arguments[0], bytes(arguments[1])[:size])
            elif size:
                true(*arguments)
            die()
        return true(*arguments)
    setattr(os, function, fatal)
    with Samples(folder, {"a": 1}) as samples:
        for index in sorted(set(range(3)) - samples.done):
            samples.append(sample(index))
            os.pwrite(report, bytes([1 + index]), 0)
    os._exit(0)

root = Path(sys.argv[1])
length = len(json.dumps({name: getattr(sample(0), name) for name in Sample.__slots__})) + 1
report = os.open(root / "report", os.O_RDWR | os.O_CREAT)
cases = [("write", call, size) for call in (1, 2, 3) for size in {*range(call, length, 5), 0, length - 1, length}]
cases += [(name, call, size) for name in ("fsync", "replace") for call in range(1, 7) for size in (0, 1)]
killed = 0
for n, case in enumerate(cases):
    folder = root / str(n)
    os.pwrite(report, b"\\0", 0)
    child = os.fork()
    if not child:
        session(folder, *case)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    confirmed = os.pread(report, 1, 0)[0]
    with Samples(folder, {"a": 1}) as samples:
        assert samples.done in (set(range(confirmed)), set(range(confirmed + 1))), case
        for index in set(range(3)) - samples.done:
            samples.append(sample(index))
    with Samples(folder, {"a": 1}) as samples:
        assert samples.all == [sample(0), sample(1), sample(2)], case
print(len(cases), killed)
"""


def test_a_process_killed_at_any_byte_loses_no_finished_sample(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    cases, killed = map(int, done.stdout.split())
    assert cases > 100 and killed == cases - 10  # the folder's settings are put in place once, not six times


WRITES = """
import sys
from pathlib import Path
from fdllm_jax.evaluation.samples import Sample, Samples
with Samples(Path(sys.argv[1]), {"a": 1}) as samples:
    index = len(samples.done)
    while True:
        samples.append(Sample(index=index, key="k", prompt="p" * 9000, text="t", tokens=1, steps=1, forwards=1, slots=1,
                              seconds=1.0, stop_reason="eos", scores={"a": 1.0}))
        print(index, flush=True)
        index += 1
"""


def test_a_process_killed_at_any_time_goes_on_where_it_was(tmp_path: Path):
    confirmed = -1
    for seed in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            first = int(writer.stdout.readline())
            assert first in (confirmed + 1, confirmed + 2)
            time.sleep(random.Random(seed).uniform(0, 0.05))
            writer.kill()
            confirmed = max(first, *map(int, writer.stdout.read().split()), 0)
    with Samples(tmp_path, {"a": 1}) as samples:
        assert samples.done in (set(range(confirmed + 1)), set(range(confirmed + 2)))


def test_other_settings_are_refused_with_what_differs(tmp_path: Path):
    with Samples(tmp_path, SETTINGS) as samples:
        samples.append(sample(0))
    before = (tmp_path / "samples.jsonl").read_bytes()
    other = SETTINGS | {"model": "n", "method": {"gamma": 0.9, "stop": ["a", "b"]}, "seed": 1}
    with pytest.raises(ValueError) as error:
        Samples(tmp_path, other)
    message = str(error.value)
    for part in ('model: "m" there, "n" asked for', "method.gamma: 0.8 there, 0.9 asked for", "seed: null there, 1"):
        assert part in message
    assert "stop" not in message and "task" not in message and "\n" not in message
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="chat_template: false there, 0 asked for"):
        Samples(tmp_path, SETTINGS | {"chat_template": 0})


def test_one_process_at_a_time_holds_a_folder(tmp_path: Path):
    script = "import sys; from pathlib import Path; from fdllm_jax.evaluation.samples import Samples\n"
    script += "with Samples(Path(sys.argv[1]), {}): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="another process is writing there"):
            Samples(tmp_path, {})
        holder.send_signal(signal.SIGKILL)
    with Samples(tmp_path, {}), pytest.raises(ValueError, match="another process"):
        Samples(tmp_path, {})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{}\n", "line 1 is no sample, an object of forwards, index.*remove that line, or give another folder"),
        ("[1]\n", "line 1 is no sample"),
        ("\x00\x00\n", "line 1 is not JSON"),
        ("{line}{line}", "line 2 repeats item 0"),
        ("{line}torn\n{line}", "line 2 is not JSON"),
        ('{line}{"index": -1}\n', "line 2 is no sample"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, lines: str, message: str):
    with Samples(tmp_path, SETTINGS) as samples:
        samples.append(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_text(lines.replace("{line}", path.read_text()))
    with pytest.raises(ValueError, match=message):
        Samples(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scores": {}},
        {"scores": None},
        {"scores": {"a": 7}},
        {"tokens": "x"},
        {"index": -1},
        {"seconds": None},
        {"text": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_changed_sample_is_refused(tmp_path: Path, wrong: dict[str, object]):
    with Samples(tmp_path, SETTINGS) as samples:
        samples.append(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong) + "\n")
    with pytest.raises(ValueError, match="line 1 is no sample"):
        Samples(tmp_path, SETTINGS)


def test_a_folder_without_samples_is_free(tmp_path: Path):
    with Samples(tmp_path, SETTINGS):
        pass
    with Samples(tmp_path, SETTINGS | {"model": "other"}) as samples:
        samples.append(sample(0))
    with pytest.raises(ValueError, match='model: "other" there, "m" asked for'):
        Samples(tmp_path, SETTINGS)


def test_samples_without_settings_and_broken_settings_are_refused(tmp_path: Path):
    with Samples(tmp_path, SETTINGS) as samples:
        samples.append(sample(0))
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings.json: not JSON"):
        Samples(tmp_path, SETTINGS)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"has samples.jsonl without settings.json"):
        Samples(tmp_path, SETTINGS)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    with Samples(tmp_path, SETTINGS) as samples:
        samples.append(sample(0))

        def full(file: int, data: memoryview) -> int:
            if len(data) < 50:
                raise OSError(28, "No space left on device")
            return write(file, data[:20])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            samples.append(sample(1))
        monkeypatch.undo()
        samples.append(sample(1, "again"))
    with Samples(tmp_path, SETTINGS) as samples:
        assert samples.all == [sample(0), sample(1, "again")]
