"""Data sets from local files, and each task's file names and fields."""

import gzip
import json
from pathlib import Path

import pytest

from fdllm_jax.evaluation.data import find, read
from fdllm_jax.evaluation.tasks import TASKS

GOOD = {
    "gsm8k": {"question": "q", "answer": "#### 1"},
    "math": {"problem": "p", "solution": r"$\boxed{1}$", "level": "Level 1", "type": "Algebra"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass"},
    "mbpp": {"task_id": 11, "text": "t", "code": "", "test_list": ["assert True"] * 3},
    "word_problems": {"question": "q", "answer": "#### 1"},
    "functions": {"question": "q", "tests": "assert True"},
}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_file_is_itself_and_a_folder_has_it_under_a_name(tmp_path: Path):
    second, zipped = write(tmp_path / "b.jsonl", {}), write(tmp_path / "a.jsonl.gz", {})
    assert find(second, ("x",)) == second
    assert find(tmp_path, ("x.jsonl", "b.jsonl", "a.jsonl")) == second
    assert find(tmp_path, ("a.jsonl", "b.jsonl")) == zipped
    with pytest.raises(FileNotFoundError, match=r"expected a file x.jsonl or y.jsonl \(or with .gz\) in it"):
        find(tmp_path, ("x.jsonl", "y.jsonl"))
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        find(tmp_path / "nowhere", ("x.jsonl",))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_objects_are_read_whatever_is_in_their_strings(tmp_path: Path, name: str):
    rows = [{"q": "α\u2028β\r\n"}, {"q": "", "more": [1]}]
    assert read(write(tmp_path / name, *rows), {"q": str}) == rows


def test_lines_at_fault_are_named_together(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "1"}\n\n{\n{"q": 1, "r": 2}\n[]\n{}\n')
    with pytest.raises(ValueError) as error:
        read(path, {"q": str})
    message = str(error.value)
    for part in ("a.jsonl: line 3: not JSON (", "line 4: expected q (str); it has q, r", "line 5: expected an object"):
        assert part in message
    assert message.endswith("; and 1 more") and "line 1:" not in message
    for content in (b"\xff\xfe", gzip.compress(b"{}")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="neither UTF-8 text nor"):
            read(path, {})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}" * 100)[:-9])
    with pytest.raises(ValueError, match="neither UTF-8 text nor"):
        read(tmp_path / "a.jsonl.gz", {})
    whole = gzip.compress(b'{"q": "a"}' * 99)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:20] + b"\xff" * 9 + whole[29:])
    with pytest.raises(ValueError, match="neither UTF-8 text nor"):
        read(tmp_path / "a.jsonl.gz", {})
    for line in ("[" * 100_000, "9" * 5_000):
        path.write_text(f"{line}\n")
        with pytest.raises(ValueError, match=r"line 1: not JSON that can be read"):
            read(path, {})
    path.write_text("\n")
    with pytest.raises(ValueError, match="no item in it: expected JSON lines with q"):
        read(path, {"q": str})


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_names_the_fields_that_are_missing(tmp_path: Path, name: str):
    write(tmp_path / "train.jsonl", *[GOOD["gsm8k"]] * 5)
    assert len(TASKS[name].load(write(tmp_path / "good.jsonl", GOOD[name]))) == 1
    for field in GOOD[name].keys() - {"code", "level", "type"}:
        bad = {key: value for key, value in GOOD[name].items() if key != field}
        with pytest.raises(ValueError, match=rf"bad.jsonl: line 2: .*{field}"):
            TASKS[name].load(write(tmp_path / "bad.jsonl", GOOD[name], bad))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gsm8k", "gsm8k_test.jsonl"),
        ("gsm8k", "test.jsonl"),
        ("math", "math_test.jsonl"),
        ("humaneval", "HumanEval.jsonl.gz"),
        ("mbpp", "mbpp.jsonl"),
        ("word_problems", "word_problems.jsonl"),
        ("word_problems", "word_problems.jsonl.gz"),
        ("functions", "functions.jsonl"),
    ],
)
def test_every_task_finds_its_file_in_a_folder(tmp_path: Path, name: str, file: str):
    write(tmp_path / file, GOOD[name])
    if name == "gsm8k":
        with pytest.raises(FileNotFoundError, match=r"gsm8k_train.jsonl or gsm8k/train.jsonl or train.jsonl"):
            TASKS[name].load(tmp_path)
        train = write(tmp_path / file.replace("test", "train"), *[GOOD[name]] * 4)
        with pytest.raises(ValueError, match="4 training examples, expected 5 at least"):
            TASKS[name].load(tmp_path)
        write(train, *[GOOD[name]] * 5)
    assert len(TASKS[name].load(tmp_path)) == 1


def test_a_task_records_what_decides_its_scores():
    assert TASKS["mbpp"].record() == {
        "task": "mbpp",
        "shots": 3,
        "source": "lm-evaluation-harness 0.4.13, mbpp version 1",
        "packages": {},
    }
    for name, task in TASKS.items():
        assert task.name == name and task.chat_template == (name in ("word_problems", "functions"))
