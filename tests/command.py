"""Running a command line in this process."""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    """A finished command, and its folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def files(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())

    @property
    def results(self) -> dict[str, Any]:
        """Of the folder's one results file."""
        return json.loads(next(self.folder.glob("*.json")).read_text(encoding="utf-8"))


def finished(main: Callable[[Sequence[str]], int], folder: Path, *arguments: str) -> Done:
    """Run a command with its own arguments and `--output folder`."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main([*arguments, "--output", str(folder)])
        except SystemExit as exit_:  # argparse's own
            assert isinstance(exit_.code, int)
            code = exit_.code
    return Done(code, out.getvalue(), err.getvalue(), folder)
