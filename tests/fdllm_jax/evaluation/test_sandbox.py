"""Generated code in its process: what may run gives its value, and what attacks fails and changes nothing."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdllm_jax.evaluation import sandbox

pytestmark = pytest.mark.usefixtures("layers")
EPERM = 1


def refused(statement: str, setup: str = "") -> int | None:
    """The error number with which a statement fails in the sandbox; 0 where it does not."""
    attempt = f"caught = 0\ntry:\n    {statement}\nexcept OSError as error:\n    caught = error.errno"
    return sandbox.run([f"import os, signal, socket, sys\n{setup}", attempt], "caught")


def test_code_is_judged_by_its_tests():
    jobs = [
        ("def f(x):\n    return x + 1", "assert f(1) == 2"),
        ("def f(x):\n    return x + 1", "assert f(1) == 3"),
        ("def f(x):\n    return (", "assert True"),
        ("def g(x):\n    return x", "assert f(1) == 1"),
        ("def f(x):\n    print('noise')\n    return x", "assert f(1) == 1"),
        ("def f(x):\n    raise SystemExit", "f(1)"),
        ("def f(x):\n    return x", "assert f(1) == 1, 'the test'\n)"),
        ("def f(x):\n    return input()", "f(1)"),
        ("x = '\ud800'", "pass"),
        ("x = 1\0", "pass"),
    ]
    assert sandbox.pass_all(jobs) == [True, False, False, False, True, *[False] * 5]


def test_what_code_commonly_needs_is_there():
    code = """from __future__ import annotations
import asyncio, collections, copy, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools
import json, math, operator, random, re, statistics, string, time, typing, numpy
@dataclasses.dataclass
class Point:
    x: int
time.sleep(0.01)
found = [Point(3).x, hashlib.md5(b'').hexdigest()[:4], float(numpy.linalg.det(2 * numpy.eye(3)))]
"""
    assert sandbox.run([code], "found") == [3, "d41d", pytest.approx(8)]


@settings(max_examples=15)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )
)
def test_a_value_comes_back_as_it_is(value: object):
    assert sandbox.run(["inf = float('inf')", f"value = {value!r}"], "value") == value


def test_code_that_does_not_end_is_ended():
    endless = [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
        "10 ** 10 ** 10",
        "import os\nwhile True: os.write(1, b'x' * 100_000)",
    ]
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda code: sandbox.run([code], seconds=0.3), endless)) == [None] * len(endless)
    assert time.monotonic() - start < 60


def test_memory_is_bounded():
    assert sandbox.run(["x = [0] * 10 ** 9"]) is None
    assert sandbox.run(["x = bytearray(2 ** 28)"], "len(x)", memory=1 << 29) == 2**28
    assert sandbox.run(["x = bytearray(2 ** 28)"], "len(x)", memory=1 << 28) is None
    assert sandbox.run(["import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()"], memory=1 << 27) is None
    assert sandbox.run(["x = []\nwhile True: x.append([0] * 10 ** 6)"]) is None


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import builtins\nbuiltins.AssertionError = type('Fine', (BaseException,), {})",
        "import sys, os\nsys.exit = os._exit = os.abort = print",
        "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *_: True",
        "import os, json\nos.write = json.dumps = lambda *_: b'True'",
        "import sys\nsys.excepthook = lambda *_: None",
        "import os\nos.close(1)\nfor n in range(3, 50):\n    try: os.close(n)\n    except OSError: pass",
        "import os\nfor n in range(1, 50):\n    try: os.write(n, b'True' * 10_000_000)\n    except OSError: pass",
    ],
)
def test_there_is_no_easy_way_to_pass_tests_that_fail(code: str):
    assert not sandbox.passes(code, "assert False", seconds=1.0)


@pytest.mark.parametrize(
    "statement",
    [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "os.system('true') == 0 or os.fork()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "os.setsid()",
        "os.nice(1)",
    ],
)
def test_there_are_no_more_processes(statement: str):
    assert refused(statement) == EPERM


def test_there_are_no_threads():
    code = (
        "import threading\ntry:\n    threading.Thread(target=print).start()\nexcept RuntimeError as e:\n    e = str(e)"
    )
    assert sandbox.run([code + "\n    found = e"], "found") == "can't start new thread"


@pytest.mark.parametrize(
    "statement",
    [
        "os.remove(path)",
        "os.rename(path, path + 'x')",
        "os.replace('/dev/null', path)",
        "os.truncate(path, 0)",
        "open(path, 'w')",
        "open(path, 'r+')",
        "open(path, 'a')",
        "os.open(path, os.O_RDONLY | os.O_TRUNC)",
        "os.open(path + 'x', os.O_RDONLY | os.O_CREAT)",
        "os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR)",
        "os.chmod(path, 0)",
        "os.chown(path, 65534, 65534)",
        "os.utime(path)",
        "os.setxattr(path, 'user.x', b'1')",
        "os.link(path, path + 'x')",
        "os.symlink(path, path + 'x')",
        "os.mkdir(path + 'x')",
        "os.rmdir(os.path.dirname(path) + '/empty')",
        "os.mkfifo(path + 'x')",
        "os.mknod(path + 'x')",
        "os.chroot('/')",
        "os.memfd_create('x')",
    ],
)
def test_files_stay_as_they_are(statement: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("precious")
    path.chmod(0o666)
    (tmp_path / "empty").mkdir()
    before = path.stat()
    assert refused(statement, f"path = {str(path)!r}") == EPERM
    after = path.stat()
    assert path.read_text() == "precious" and sorted(os.listdir(tmp_path)) == ["empty", "file"]
    assert (before.st_mode, before.st_uid, before.st_mtime_ns) == (after.st_mode, after.st_uid, after.st_mtime_ns)


def test_nothing_is_written_at_home_or_in_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (str(tmp_path / "x"), os.path.expanduser("~root") + "/x", "x", "/tmp/x", "/dev/shm/x"):
        assert refused(f"open({place!r}, 'w')") == EPERM
    assert sandbox.run(["import tempfile\ntempfile.TemporaryFile()"]) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "statement",
    [
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair()",
        "socket.create_connection(address)",
        "import urllib.request; urllib.request.urlopen('http://%s:%d' % address)",
    ],
)
def test_there_is_no_network(statement: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = refused(statement, f"address = {server.getsockname()!r}")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert found == EPERM or "urllib" in statement


@pytest.mark.parametrize(
    "statement",
    [
        "os.kill(os.getppid(), 9)",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 9)",
        "os.killpg(os.getpgid(os.getppid()), 15)",
        "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        "import fcntl; fcntl.fcntl(os.dup(0), fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.fcntl(3, fcntl.F_SETFL, os.O_ASYNC)",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
    ],
)
def test_other_processes_are_left_alone(statement: str):
    """Also that a signal cannot be sent by way of a file's owner, and no input be typed into a terminal."""
    assert refused(statement) == EPERM


def test_limits_are_not_lifted():
    code = "import resource\nfound = []\nfor k in (resource.RLIMIT_CPU, resource.RLIMIT_AS):\n"
    code += "    try: resource.setrlimit(k, (-1, -1))\n"
    code += "    except (OSError, ValueError): found.append(resource.getrlimit(k))"
    assert sandbox.run([code], "found", seconds=2.0, memory=1 << 29) == [[3, 3], [1 << 29, 1 << 29]]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls of x86-64")
def test_system_calls_by_number_are_refused(tmp_path: Path):
    """fork, vfork, clone, clone3, execve, unlink, ptrace, prctl, socket, io_uring_setup, process_vm_writev, bpf,
    mount, unshare, openat2, prlimit64 of the parent, and two by the numbers of the x32 interface."""
    file = tmp_path / "file"
    file.touch()
    path = f"ctypes.c_char_p({str(file).encode()!r})"
    parent = "os.getppid()"
    calls = [
        "57", "58", "56, 17, 0, 0, 0, 0", "435, 0, 0", f"59, {path}, 0, 0", f"87, {path}", f"101, 16, {parent}, 0, 0",
        "157, 38, 0, 0, 0, 0", "41, 2, 1, 0", "425, 8, 0", f"311, {parent}, 0, 0, 0, 0, 0", "321, 0, 0, 0",
        "165, 0, 0, 0, 0, 0", "272, 0", f"437, -100, {path}, 0, 24",
        f"302, {parent}, 9, ctypes.byref(ctypes.create_string_buffer(16)), 0", f"0x40000057, {path}", "0x40000039",
    ]  # fmt: skip
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += f"found = [libc.syscall(*call) or ctypes.get_errno() for call in [{', '.join(f'({c},)' for c in calls)}]]"
    code = code.replace("or ctypes", "== -1 and ctypes")
    assert sandbox.run([code], "found") == [EPERM] * len(calls) and file.exists()


def test_our_environment_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_SECRET", "hidden")
    assert "A_SECRET" not in (sandbox.run(["import os"], "dict(os.environ)") or "A_SECRET")


def test_other_files_and_processes_are_not_read(tmp_path: Path, layers: str):
    """The environment of the process that started it as well."""
    if "landlock" not in layers:
        pytest.skip("this kernel has no Landlock")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    for path in (repr(str(secret)), "'/etc/passwd'", "f'/proc/{os.getppid()}/environ'", "'/proc/1/environ'"):
        assert refused(f"open({path})") == 13
    assert refused("os.listdir('/')") == 13
    assert sandbox.run(["import json"], "len(open(json.__file__).read()) > 0") is True


def test_a_user_namespace_is_enough_for_our_environment(layers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where the kernel has no Landlock; other files can be read there."""
    if "user namespace" not in layers:
        pytest.skip("no user namespace can be made here")
    source = Path(sandbox.__file__).with_name("confinement.py").read_text()
    without = tmp_path / "confinement.py"
    without.write_text(source.replace("_RESTRICT_SELF = 444", "_RESTRICT_SELF = 9999"))
    monkeypatch.setattr(sandbox, "_CONFINEMENT", without)
    assert sandbox.isolation() == "seccomp, user namespace"
    assert refused("open(f'/proc/{os.getppid()}/environ')") == 13 and refused("open('/etc/passwd')") == 0


def test_code_ends_with_the_process_that_started_it():
    script = "import os; from fdllm_jax.evaluation import sandbox\n"
    script += "sandbox.run(['import os, time\\nwhile True: time.sleep(0.01)'], seconds=100.0)"
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        children = Path(f"/proc/{parent.pid}/task")
        found: list[str] = []
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            time.sleep(0.05)
            found = [c for task in children.glob("*/children") for c in task.read_text().split()]
        time.sleep(0.3)
        parent.kill()
    (child,) = found
    while (alive := _runs(child)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_system_without_confinement_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="Linux only: darwin"):
        sandbox.isolation()
    monkeypatch.undo()
    broken = tmp_path / "confinement.py"
    source = Path(sandbox.__file__).with_name("confinement.py").read_text()
    monkeypatch.setattr(sandbox, "_CONFINEMENT", broken)
    for change, error, message in (
        (("platform.machine()", "'vax'"), ValueError, "not known on vax, only on x86_64, aarch64"),
        (("22, 1  # of prctl", "99, 1  # of prctl"), ValueError, "no seccomp: Invalid argument"),
        (("give(_REFUSE)", "give(_ALLOW)"), ValueError, "is set, but does not hold"),
        (("def main", "def other"), RuntimeError, "did not start"),
    ):
        assert change[0] in source
        broken.write_text(source.replace(*change))
        with pytest.raises(error, match=message):
            sandbox.passes("pass", "pass")
