"""What an evaluation has so far, in a folder that survives an end at any moment.

`settings.json` says what is evaluated and how; `samples.jsonl` gets a line for each finished item, on disk before the
next one begins. A folder that is opened again goes on where it stopped.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fdllm_jax.tasks import parse_line

SAMPLES, SETTINGS = "samples.jsonl", "settings.json"
_GO_ON = "the file was changed: remove that line, or give another folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished item.

    index: its place among the task's items, from 0. key: its name. text: the response. tokens: generated ones, up to
    and including the first EOS, after the cut at a stop string. steps, forwards: as in the engine's results. seconds:
    what went by since the sample before it was finished, compilation not included; they add up to the run's time.
    slots: how many sequences were decoded side by side. stop_reason: "eos", "length", "stop", or "refused" for a prompt
    that does not fit. scores: by metric, in [0, 1].
    """

    index: int
    key: str
    prompt: str
    text: str
    tokens: int
    steps: int
    forwards: int
    seconds: float
    slots: int
    stop_reason: str
    scores: Mapping[str, float]


class Samples:
    """The samples of a folder, which is made where it is not there; a context manager that one process may hold.

    settings: what decides the samples (JSON's types). Raises ValueError where the folder is of other settings, is held
    by another process, or is no such folder, and OSError where it cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / SAMPLES
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            content = self._content()
            whole = content.rfind(b"\n") + 1
            _check_settings(folder, json.loads(json.dumps(settings)), begun=bool(content))
            self._samples = dict(_parsed(self._path, content[:whole]))
            if whole < len(content):  # a line that was being written when the process ended
                os.ftruncate(self._file, whole)
                os.fsync(self._file)
            self._size = whole
            _sync_folder(folder)
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except BlockingIOError as error:
            raise ValueError(f"{self._path.parent}: another process is writing there; give another folder") from error

    def _content(self) -> bytes:
        with open(self._file, "rb", closefd=False) as file:
            return file.read()

    @property
    def done(self) -> frozenset[int]:
        """Indices of the items that have a sample."""
        return frozenset(self._samples)

    @property
    def all(self) -> list[Sample]:
        """The samples, by index."""
        return [self._samples[index] for index in sorted(self._samples)]

    def append(self, sample: Sample) -> None:
        """Write a sample; it is on disk when this returns. Raises ValueError for an item that has one, and OSError."""
        if sample.index in self._samples:
            raise ValueError(f"item {sample.index} has a sample already")
        line = (json.dumps(asdict(sample), allow_nan=False) + "\n").encode()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # of a full disk's half a line nothing stays
            raise
        self._size += len(line)
        self._samples[sample.index] = sample

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._file)

    def __enter__(self) -> Self:
        """The samples."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _parsed(path: Path, content: bytes) -> Iterator[tuple[int, Sample]]:
    seen = set()
    names = {field.name for field in fields(Sample)}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = parse_line(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is {error}; {_GO_ON}") from error
        if not isinstance(row, dict) or row.keys() != names or not _is_sound(row):
            raise ValueError(f"{path}: line {number} is no sample, an object of {', '.join(sorted(names))}; {_GO_ON}")
        if row["index"] in seen:
            raise ValueError(f"{path}: line {number} repeats item {row['index']}; {_GO_ON}")
        seen.add(row["index"])
        yield row["index"], Sample(**row)


def _is_sound(row: Mapping[str, Any]) -> bool:
    counts, texts, scores = ("index", "tokens", "steps", "forwards", "slots"), ("key", "prompt", "text"), row["scores"]
    return (
        all(type(row[name]) is int and row[name] >= 0 for name in counts)
        and all(isinstance(row[name], str) for name in (*texts, "stop_reason"))
        and isinstance(row["seconds"], int | float)
        and isinstance(scores, dict)
        and bool(scores)
        and all(isinstance(score, int | float) and 0 <= score <= 1 for score in scores.values())
    )


def _check_settings(folder: Path, asked: Any, *, begun: bool) -> None:
    """Compare the settings of the folder's samples with those asked for; write these where there are no samples."""
    path = folder / SETTINGS
    if not begun:
        _write_whole(path, asked)
        return
    if not path.exists():
        raise ValueError(f"{folder}: it has {SAMPLES} without {SETTINGS}; give another folder")
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}): the file was changed; give another folder") from error
    if faults := list(_differences("", there, asked)):
        raise ValueError(
            f"{folder}: its samples are of other settings ({'; '.join(faults)}): ask for the same, or give another "
            "folder"
        )


def _differences(name: str, there: Any, asked: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(asked, dict):
        for key in sorted({*there, *asked}):
            yield from _differences(f"{name}.{key}" if name else key, there.get(key), asked.get(key))
    elif there != asked or type(there) is not type(asked):
        yield f"{name}: {json.dumps(there)} there, {json.dumps(asked)} asked for"


def _write_whole(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
