"""A directory that appears whole or not at all."""

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_new(destination: Path) -> None:
    """Raise ValueError if `destination` exists (nothing is overwritten), or a file is where its folder would be."""
    if in_the_way := next((folder for folder in destination.parents if folder.is_file()), None):
        raise ValueError(f"{destination}: {in_the_way} is a file: give a destination in a folder")
    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{destination} exists: give a new destination, or remove it first")


@contextmanager
def staged(destination: Path, nbytes: int) -> Iterator[Path]:
    """A temporary sibling of `destination`, renamed to it at the end and removed if anything stops the work.

    `nbytes`: what will be written, checked against the free space. Raises ValueError if `destination` exists, or the
    disk is or becomes full.
    """
    check_new(destination)
    made = [folder for folder in (destination.parent, *destination.parent.parents) if not folder.exists()]
    temporary = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(destination.parent).free
        if free < nbytes:
            raise OSError(errno.ENOSPC, f"{nbytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
        temporary.mkdir()
        yield temporary
        check_new(destination)
        temporary.rename(destination)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # not made, or in use by something else
                folder.rmdir()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ValueError(f"the disk is too full for {destination}: {error.strerror}; nothing was kept") from error
        raise
