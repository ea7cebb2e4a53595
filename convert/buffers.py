"""Where a tensor lives while it is on its way: memory that JAX takes over without a copy, or a file's pages."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

Allocate = Callable[[int], np.ndarray]
_M_MMAP_THRESHOLD = -3  # of malloc.h
_ALIGNMENT = 64  # bytes; what the CPU client of JAX needs to take a buffer over as it is


def aligned(nbytes: int) -> np.ndarray:
    """Uninitialised bytes [nbytes] (uint8) of anonymous memory, aligned to 64 bytes."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


def scratch(directory: Path) -> Allocate:
    """An allocator of bytes [nbytes] (uint8) in the pages of nameless files in `directory`.

    The kernel can write such pages out, so what is held there is no anonymous memory. Raises OSError if the
    disk is full.
    """

    def allocate(nbytes: int) -> np.ndarray:
        with tempfile.TemporaryFile(dir=directory) as file:
            if hasattr(os, "posix_fallocate"):  # where a full disk is an error here, not a signal later
                os.posix_fallocate(file.fileno(), 0, nbytes)
            file.truncate(nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)

    return allocate


def give_back_freed_memory() -> None:
    """Have this process return every freed block of 1 MB or more to the system at once.

    glibc would keep up to 64 MB a thread, and Orbax writes from many threads. Does nothing with another C library.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
