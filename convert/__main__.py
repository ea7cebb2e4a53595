"""Command line: `python -m convert SOURCE DESTINATION`, and `--to-safetensors` for the way back."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from convert.interrupts import Interrupted, Interrupts


def main(arguments: Sequence[str] | None = None, *, interrupts: Interrupts | None = None) -> int:
    """Convert, and return the exit code: 0; 2 with one message on stderr; 130 or 143 if interrupted or terminated."""
    parser = argparse.ArgumentParser(
        prog="python -m convert", description="Convert a LLaDA checkpoint from safetensors to Orbax, or back."
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint's directory, or its id on the Hugging Face hub")
    parser.add_argument("destination", metavar="DESTINATION", type=Path, help="the directory to make; must not exist")
    parser.add_argument("--to-safetensors", action="store_true", help="from Orbax to safetensors")
    chosen = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what is raised as well
    try:
        _convert(chosen.source, chosen.destination, chosen.to_safetensors, interrupts or Interrupts())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as interrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 128 + interrupt.number
    return 0


def _convert(source: str, destination: Path, back: bool, interrupts: Interrupts) -> None:
    from rich.console import Console  # imported here, so that --help need not wait for JAX
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from convert.buffers import give_back_freed_memory
    from convert.conversion import to_orbax, to_safetensors
    from convert.source import resolve
    from convert.staging import check_new

    check_new(destination)
    give_back_freed_memory()
    with interrupts.at_once():
        directory = resolve(source)
    console = Console(stderr=True)
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")

        def advance(done: int, total: int) -> None:
            interrupts.check()
            progress.update(bar, completed=done, total=total)

        (to_safetensors if back else to_orbax)(directory, destination, advance)


if __name__ == "__main__":
    own = Interrupts()
    own.install()
    os.environ["JAX_PLATFORMS"] = "cpu"  # a conversion leaves the GPU alone
    sys.exit(main(interrupts=own))
