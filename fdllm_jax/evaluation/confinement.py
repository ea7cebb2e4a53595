"""The child's side of `sandbox`: it reads a job from standard input, gives up all it does not need, and runs the job.

Run as a script with `python -I -S`; it imports nothing of ours. What holds it:

- seccomp: of the system calls those that a computation needs are allowed, and files are opened for reading only. So it
  writes, deletes and changes no file, makes no process or thread, sends no signal and opens no socket.
- Landlock, where the kernel has it: it reads Python's own directories and the system's libraries, nothing else.
- a user namespace of its own, where one may be made: other processes' memory and environment are closed to it.
- limits of CPU time, address space and file size; `sandbox` adds one of wall-clock time.

Numbers are those of Linux's headers: linux/seccomp.h, linux/landlock.h, linux/filter.h, asm/unistd.h.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import socket
import struct
import sys
import types

_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _DIE_WITH_PARENT = 38, 22, 1  # of prctl
_CLONE_NEWUSER = 0x10000000

# Allowed whatever their arguments; the second number is that of AArch64, None where it has no such call.
_CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "ppoll": (271, 73), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "exit": (60, 93),
    "uname": (63, 160), "getcwd": (79, 17), "readlink": (89, None), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "set_robust_list": (273, 99),
    "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
_OPEN, _OPENAT, _IOCTL, _FCNTL, _PRLIMIT64 = (2, None), (257, 56), (16, 29), (72, 25), (302, 261)
_WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY and O_RDWR, O_CREAT, O_TRUNC
# TCGETS, FIOCLEX and FIONCLEX; F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC: none sends signals or input.
_IOCTLS, _FCNTLS = (0x5401, 0x5451, 0x5450), (0, 1, 2, 3, 1030)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ALL_ACCESS, _READ_FILE, _READ_DIRECTORY = (1 << 13) - 1, 1 << 2, 1 << 3
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")


def limit(seconds: float, memory: int) -> None:
    """Set the limits of CPU time in seconds (rounded up) and of address space in bytes; no file grows."""
    whole = int(-(-seconds // 1)) + 1  # one more for Python's own start
    limits = {
        resource.RLIMIT_CPU: whole,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def confine(readable: list[str]) -> list[str]:
    """Give up what the module's docstring names; the layers that hold. Raises OSError without seccomp."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(f"its system calls are not known on {machine}, only on {', '.join(_ARCHITECTURES)}")
    _must(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    layers = ["seccomp"]
    if _LIBC.unshare(_CLONE_NEWUSER) == 0:
        layers.append("user namespace")
    _LIBC.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0)  # a new namespace takes it back
    if _read_only([*_READABLE, *readable]):
        layers.append("landlock")
    _filter_calls(*_ARCHITECTURES[machine])
    for attempt in (lambda: os.open("/dev/null", os.O_WRONLY), socket.socket):
        try:
            attempt()
        except PermissionError:
            continue
        raise OSError("the filter of system calls is set, but does not hold")
    return layers


def _must(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"no seccomp: {os.strerror(ctypes.get_errno())}")


def _read_only(paths: list[str]) -> bool:
    """Restrict this process to reading below the paths; whether the kernel can."""
    attribute = struct.pack("<Q", _ALL_ACCESS)
    rules = _LIBC.syscall(_CREATE_RULESET, attribute, len(attribute), 0)
    if rules < 0:
        return False
    for path in filter(os.path.exists, paths):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = _READ_FILE | (_READ_DIRECTORY if os.path.isdir(path) else 0)
        _LIBC.syscall(_ADD_RULE, rules, 1, struct.pack("<Qi", access, place), 0)
        os.close(place)
    restricted = _LIBC.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return restricted


def _filter_calls(column: int, architecture: int) -> None:
    """Set the filter: an instruction is (code, jump if true, jump if false, operand), jumps count from the next."""

    def load(offset: int) -> tuple[int, int, int, int]:
        return (0x20, 0, 0, offset)

    def argument(index: int) -> int:
        return 16 + 8 * index  # its lower half

    def equal(value: int, skip: int) -> tuple[int, int, int, int]:
        return (0x15, 0, skip, value)

    def give(action: int) -> tuple[int, int, int, int]:
        return (0x06, 0, 0, action)

    program = [load(4), (0x15, 1, 0, architecture), give(_KILL), load(0)]

    def allow(call: tuple[int | None, ...], *body: tuple[int, int, int, int]) -> None:
        number = call[column]
        if number is not None:
            body = body or (give(_ALLOW),)
            program.extend([equal(number, len(body)), *body])

    for call in _CALLS.values():
        allow(call)
    for call, flags in ((_OPEN, 1), (_OPENAT, 2)):
        allow(call, load(argument(flags)), (0x45, 0, 1, _WRITING), give(_REFUSE), give(_ALLOW))
    for call, commands in ((_IOCTL, _IOCTLS), (_FCNTL, _FCNTLS)):
        tests = [step for command in commands for step in (equal(command, 1), give(_ALLOW))]
        allow(call, load(argument(1)), *tests, give(_REFUSE))
    # Limits may be read: the pointer to new ones is null, in both halves.
    halves = [step for half in (0, 4) for step in (load(argument(2) + half), (0x15, 1, 0, 0), give(_REFUSE))]
    allow(_PRLIMIT64, *halves, give(_ALLOW))
    program.append(give(_REFUSE))

    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    _must(_LIBC.prctl(_SET_SECCOMP, 2, header, 0, 0))


def main() -> None:
    """Run the job: confined, then the sources one after the other in one module, then the result's expression."""
    job = json.load(sys.stdin)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    pipe = os.dup(1)
    os.dup2(null, 1)
    # What comes after the code is taken now: it may replace builtins and what modules hold.
    token, execute, value, dumps, write, leave = job["token"], exec, eval, json.dumps, os.write, os._exit
    try:
        sys.path += job["packages"]
        limit(job["seconds"], job["memory"])
        layers = confine([sys.prefix, sys.base_prefix, *sys.path])
    except OSError as error:
        write(pipe, f"cannot {error.strerror or error}\n".encode())
        leave(1)
    write(pipe, f"confined {', '.join(layers)}\n".encode())
    codes = [compile(source, "<candidate>", "exec") for source in job["sources"]]
    result = compile(job["result"], "<candidate>", "eval")
    del job
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    for code in codes:
        execute(code, module.__dict__)
    write(pipe, (token + dumps(value(result, module.__dict__))).encode())
    leave(0)


if __name__ == "__main__":
    main()
