"""Command line: `python -m convert SOURCE DESTINATION`, and `--to-safetensors` for the way back."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType


def main(arguments: Sequence[str] | None = None, *, check: Callable[[], None] = lambda: None) -> int:
    """Convert, and return the exit code: 0; 2 with one message on stderr; 130 or 143 if interrupted or terminated.

    `check` is called after each parameter, and may raise Interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m convert", description="Convert a LLaDA checkpoint from safetensors to Orbax, or back."
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint's directory, or its id on the Hugging Face hub")
    parser.add_argument("destination", metavar="DESTINATION", type=Path, help="the directory to make; must not exist")
    parser.add_argument("--to-safetensors", action="store_true", help="from Orbax to safetensors")
    chosen = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what is raised as well
    try:
        _convert(chosen.source, chosen.destination, chosen.to_safetensors, check)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as interrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 128 + interrupt.number
    return 0


def _convert(source: str, destination: Path, back: bool, check: Callable[[], None]) -> None:
    from rich.console import Console  # imported here, so that an interrupt and --help need not wait for JAX
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from convert.buffers import give_back_freed_memory
    from convert.conversion import to_orbax, to_safetensors
    from convert.source import resolve
    from convert.staging import check_new

    check_new(destination)
    give_back_freed_memory()
    directory = resolve(source)
    console = Console(stderr=True)
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")

        def advance(done: int, total: int) -> None:
            check()
            progress.update(bar, completed=done, total=total)

        (to_safetensors if back else to_orbax)(directory, destination, advance)


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM, as an exception, so that what was begun is cleared away."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class _Handler:
    """Raises Interrupted at the first signal and again at `check`: in a callback of the interpreter it may be lost."""

    def __init__(self) -> None:
        self.number: int | None = None
        sys.unraisablehook = self.report
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:  # clearing away is not interrupted
            self.number = number
            self.check()

    def check(self) -> None:
        if self.number is not None:
            raise Interrupted(self.number)

    @staticmethod
    def report(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, Interrupted):
            sys.__unraisablehook__(lost)


if __name__ == "__main__":
    handler = _Handler()
    os.environ["JAX_PLATFORMS"] = "cpu"  # a conversion leaves the GPU alone
    sys.exit(main(check=handler.check))
