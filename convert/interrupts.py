"""Ctrl-C and SIGTERM, noted when they come and acted on where it is safe."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM (`number`), as an exception, so that what was begun is cleared away."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Interrupts:
    """The first interrupt, kept until `check` raises it.

    An exception out of nowhere crashes the import of some extension modules, and in some callbacks it is lost.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._at_once = False

    def install(self) -> None:
        """Take the signals of this process over, for good: clearing away is not interrupted a second time."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """The signals' handler."""
        if self._number is None:
            self._number = number
            if self._at_once:
                self.check()

    def check(self) -> None:
        """Raise Interrupted if there was an interrupt."""
        if self._number is not None:
            raise Interrupted(self._number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise Interrupted wherever the program is: for waits that have no place for `check`."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False
