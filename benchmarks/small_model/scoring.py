"""Scores of answers: the number after `####`, and functions run against their tests."""

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fdllm_jax.tasks import extract_answer

__all__ = ["extract_answer", "pass_all", "passes"]

_RUNNER = """
import json, os, resource, sys
job = json.load(sys.stdin)
seconds = int(job["timeout"]) + 1
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.stdin = open(os.devnull)
output, done = os.dup(1), job.pop("done")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
namespace = {"__name__": "candidate"}
exec(job["code"], namespace)
assert callable(namespace.get(job["entry_point"]))
exec(job["tests"], namespace)
os.write(output, done.encode())
os._exit(0)
"""


def passes(code: str, tests: str, entry_point: str, timeout: float = 3.0, memory: int = 1 << 29) -> bool:
    """Whether `code` defines `entry_point` and all assertions of `tests` hold, run in a process of its own.

    The process gets `timeout` seconds, `memory` bytes, no standard input and cannot write files. It is no sandbox:
    network and file reads are not prevented.
    """
    done = secrets.token_hex(16)
    job = {"code": code, "tests": tests, "entry_point": entry_point, "timeout": timeout, "memory": memory, "done": done}
    command = [sys.executable, "-I", "-S", "-c", _RUNNER]
    try:
        result = subprocess.run(
            command, input=json.dumps(job).encode(), capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0 and result.stdout == done.encode()


def pass_all(jobs: Sequence[tuple[str, str, str]], timeout: float = 3.0, workers: int = 4) -> list[bool]:
    """`passes` of every `(code, tests, entry_point)`, `workers` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda job: passes(*job, timeout=timeout), jobs))
