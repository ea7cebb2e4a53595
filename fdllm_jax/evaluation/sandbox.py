"""Generated code, run in a process of its own that can only compute (`confinement` says what holds it).

What it does not hold against: code that sets out to forge a pass can, as its tests run in the same interpreter: it may
return objects that equal everything, or find the word of success in the runner's memory. Ending the process, catching
everything or replacing builtins is no such way. Where `isolation` names neither a user namespace nor Landlock, it can
read what its user can, the environment of the process that started it included; it has nowhere to send it.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_CONFINEMENT = Path(__file__).with_name("confinement.py")
_START = 60.0  # seconds in which Python must have started, on however busy a machine
_LONGEST = 1 << 20  # bytes of an answer
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(sources: Sequence[str], result: str = "True", *, seconds: float = 3.0, memory: int = 1 << 30) -> Any:
    """The value of the expression `result` (JSON's types) after the sources have run in one module, or None.

    None stands for any failure: an exception, an end of the process, more than `seconds` of CPU time (rounded up to
    whole ones) or thrice as many of wall-clock time, more than `memory` bytes. Installed packages can be imported.
    There is no input, and output is dropped.

    Raises:
        ValueError: code cannot be confined on this system.
        RuntimeError: the confined process did not start.

    """
    return _ask(sources, result, seconds, memory)[1]


def passes(code: str, tests: str, *, seconds: float = 3.0) -> bool:
    """Whether the tests, run after the code, raise nothing; `seconds` as in `run`, with its errors."""
    return run([code, tests], seconds=seconds) is True


def pass_all(jobs: Sequence[tuple[str, str]]) -> list[bool]:
    """`passes` of every `(code, tests)`, one at a time on each core."""
    with pool() as threads:
        return list(threads.map(lambda job: passes(*job), jobs))


def pool() -> ThreadPoolExecutor:
    """A thread for each core: the limits of time suppose that a process has one."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def isolation() -> str:
    """The layers that hold code on this system: "seccomp" and, where there are, "user namespace" and "landlock".

    Raises ValueError where code cannot be confined.
    """
    return _ask(["pass"], "True", 3.0, 1 << 30)[0]


def _ask(sources: Sequence[str], result: str, seconds: float, memory: int) -> tuple[str, Any]:
    """The layers of confinement, and the value of `run`."""
    if sys.platform != "linux":
        raise ValueError(f"generated code is run on Linux only: {sys.platform} has no means to confine it")
    token = secrets.token_hex(16)
    packages = [entry for entry in sys.path if entry.endswith("-packages") and os.path.isdir(entry)]
    job = {"sources": list(sources), "result": result, "token": token, "packages": packages}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job | {"seconds": seconds, "memory": memory}).encode())
        file.seek(0)
        with _process(file) as process:
            assert process.stdout is not None
            with _killed_after(process, _START):
                word, _, rest = process.stdout.readline(_LONGEST).decode(errors="replace").rstrip("\n").partition(" ")
            if word == "cannot":
                raise ValueError(f"generated code is not run on this system, as it cannot be confined: {rest}")
            if word != "confined":
                raise RuntimeError("the process for generated code did not start: is there memory left?")
            with _killed_after(process, 3 * seconds):
                answer = process.stdout.read(_LONGEST).decode(errors="replace")
    if not answer.startswith(token):
        return rest, None
    try:
        return rest, json.loads(answer.removeprefix(token))
    except ValueError:
        return rest, None


@contextmanager
def _process(job: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The confined process, in a session of its own and without our environment; it is killed in the end."""
    command = [sys.executable, "-I", "-S", "-B", str(_CONFINEMENT)]
    process = subprocess.Popen(
        command,
        stdin=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_ONE_THREAD,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
