"""What the command lines share: prompts, the model's options, one message for a user's error, Ctrl-C."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fdllm_jax.settings import DTYPES


class Parser(argparse.ArgumentParser):
    """A parser of `python -m program` whose errors are one line and exit code 2."""

    def __init__(self, program: str, description: str):
        super().__init__(prog=f"python -m {program}", description=description)
        self.program = program

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, on which options may stand between prompts."""
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with the message."""
        self.exit(2, f"{self.program}: {message} (--help lists the options)\n")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the options that `read_prompts` reads."""
    parser.add_argument("prompt", nargs="*", help="one or more prompts; - reads one from standard input")
    parser.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="a file that holds one prompt (repeatable)"
    )


def folder(text: str) -> Path:
    """The type of an option that is a folder to write to."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected the name of a folder")
    return Path(text)


def made(output: Path) -> Path:
    """The folder of --output, made where it is not there. Raises ValueError and OSError where it cannot be written."""
    output.mkdir(parents=True, exist_ok=True)
    if not os.access(output, os.W_OK):
        raise ValueError(f"--output {output}: the folder is not writable")
    return output


def count(text: str) -> int:
    """The type of an option that is a number of things."""
    try:
        if (number := int(text)) >= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")


def add_model(parser: argparse.ArgumentParser, *, raw: bool = True) -> None:
    """Add the options that say which model runs, and how: --model, --dtype, --kernels, and --raw if asked for."""
    from pallas_kernels.implementation import NAMES  # brings JAX along

    parser.add_argument(
        "--model",
        metavar="PATH",
        help="safetensors or Orbax directory, or hub id (default: the small model that ships)",
    )
    if raw:
        parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="of weights and activations (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument("--kernels", default="auto", choices=NAMES, help="implementation of the GPU operations")


def run(program: str, command: Callable[[], None]) -> int:
    """Run a command; the exit code: 0, or 2 for a user's error, which is one line on standard error."""
    try:
        _check_output()
        command()
        return 0
    except BrokenPipeError:  # the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    except ValueError as error:
        message = str(error)
    except RuntimeError as error:
        from fdllm_jax.memory import OutOfMemory, ran_out

        if not ran_out(error):
            raise
        message = str(error) if isinstance(error, OutOfMemory) else "out of memory: the model does not fit this device"
    print(f"{program}: {message}", file=sys.stderr)
    return 2


def _check_output() -> None:
    if sys.stdout is None:
        raise ValueError("standard output is closed")


def read_prompts(given: Sequence[str], files: Sequence[str]) -> list[str]:
    """The prompts of the arguments, then those of the files; - is standard input. Raises ValueError for a bad one."""
    if [*given, *files].count("-") > 1:
        raise ValueError("- was given more than once: standard input holds one prompt")
    prompts = [_standard_input() if prompt == "-" else prompt for prompt in given]
    prompts += [_standard_input() if file == "-" else read_text("--prompt-file", file) for file in files]
    if blank := [str(i) for i, prompt in enumerate(prompts) if not prompt.strip()]:
        raise ValueError(f"empty prompt: number {', '.join(blank)} (from 0) is blank")
    return prompts


def read_text(option: str, file: str) -> str:
    """The text of the file that an option names. Raises ValueError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}") from error


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("- asks for standard input, which is closed")
    return sys.stdin.read()


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in $JAX_COMPILATION_CACHE_DIR or the user's cache directory."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fdllm_jax")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        if not folder.is_absolute() or not os.access(folder, os.W_OK):
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def check_device() -> None:
    """Raise ValueError where JAX finds nothing to run on."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        hint = f"JAX_PLATFORMS={platforms} asks for what is not here" if platforms else "see JAX's installation guide"
        raise ValueError(f"JAX finds no device to run on; {hint}") from error


_at_interrupt: list[Callable[[], str]] = []


@contextmanager
def at_interrupt(keep: Callable[[], str]) -> Iterator[None]:
    """At Ctrl-C meanwhile, `keep` saves what is finished, on another thread, and says what that is, if anything."""
    _at_interrupt.append(keep)
    try:
        yield
    finally:
        _at_interrupt.pop()


def exit_on_ctrl_c(program: str) -> None:
    """From now on Ctrl-C ends the process at once, with code 130; what is on the terminal stays. See `at_interrupt`.

    A thread waits for the signal: a Python handler would have to wait until XLA gives the main thread back. The signal
    may reach any thread that libraries have begun by now, so it goes on through a pipe. Children have it blocked.
    """
    waiting, arrived = os.pipe()
    os.set_blocking(arrived, False)

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while (number := os.read(waiting, 1)[0]) != signal.SIGINT:
            pass
        terminal = any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
        cursor = "\x1b[?25h\n" if terminal else ""  # a display may have hidden it
        kept = _at_interrupt[-1]() if _at_interrupt else ""
        os.write(2, f"{cursor}{program}: interrupted{': ' * bool(kept)}{kept}\n".encode())
        os._exit(128 + number)

    signal.set_wakeup_fd(arrived)
    signal.signal(signal.SIGINT, lambda *_: None)  # Python's own would raise KeyboardInterrupt beside it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=wait, daemon=True).start()
