"""Convert a checkpoint from safetensors to Orbax, and back, bit for bit."""

import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from convert.buffers import scratch
from convert.checkpoint import COMPANIONS, Checkpoint, is_orbax, is_safetensors, part_nbytes
from convert.loading import open_checkpoint
from convert.orbax_files import item_of, write_orbax
from convert.safetensors_files import write_safetensors
from convert.staging import staged
from convert.tensors import TensorInfo

Advance = Callable[[int, int], None]
"""Told after each parameter: the bytes done, and the bytes in all."""


def to_orbax(source: Path, destination: Path, advance: Advance) -> None:
    """Write the safetensors checkpoint `source` as an Orbax checkpoint: `destination`, which must not exist.

    A layer at a time, held in a nameless file beside `destination` and not in anonymous memory. Raises
    FileNotFoundError or ValueError, and leaves nothing behind.
    """
    if is_orbax(source) and not is_safetensors(source):
        raise ValueError(f"{source} is an Orbax checkpoint already (--to-safetensors converts it back)")
    checkpoint = open_checkpoint(source, scratch(destination.parent))
    item_nbytes = max(sum(_nbytes(checkpoint, path) for path in paths) for _, paths in _items(checkpoint))
    with staged(destination, checkpoint.nbytes + item_nbytes) as folder:
        _copy_companions(source, folder)
        read = _reader(checkpoint, advance)
        write_orbax(
            folder, ((item, {item_of(path)[1]: read(path) for path in paths}) for item, paths in _items(checkpoint))
        )


def to_safetensors(source: Path, destination: Path, advance: Advance) -> None:
    """Write the Orbax checkpoint `source` as a safetensors checkpoint: `destination`, which must not exist.

    A parameter at a time. Raises FileNotFoundError or ValueError, and leaves nothing behind.
    """
    if is_safetensors(source):
        raise ValueError(f"{source} is a safetensors checkpoint already (without --to-safetensors it becomes Orbax)")
    checkpoint = open_checkpoint(source)
    infos = {
        part.name: TensorInfo(dtype=checkpoint.dtypes[path].name, shape=part.shape)
        for path, parts in checkpoint.layout.items()
        for part in parts
    }
    with staged(destination, checkpoint.nbytes) as folder:
        _copy_companions(source, folder)
        write_safetensors(folder, infos, _unpacked(checkpoint, advance))


def _unpacked(checkpoint: Checkpoint, advance: Advance) -> Iterator[np.ndarray]:
    """The tensors of each parameter: consecutive rows of it."""
    read = _reader(checkpoint, advance)
    for path, parts in checkpoint.layout.items():
        packed = read(path)
        start = 0
        for part in parts:
            yield packed[start : start + part.shape[0]]
            start += part.shape[0]


def _reader(checkpoint: Checkpoint, advance: Advance) -> Callable[[str], np.ndarray]:
    """`checkpoint.read` that reports its progress."""
    done = 0

    def read(path: str) -> np.ndarray:
        nonlocal done
        array = checkpoint.read(path)
        done += array.nbytes
        advance(done, checkpoint.nbytes)
        return array

    return read


def _items(checkpoint: Checkpoint) -> Iterator[tuple[str, list[str]]]:
    """Each Orbax item and the parameters in it."""
    for item, paths in groupby(checkpoint.layout, key=lambda path: item_of(path)[0]):
        yield item, list(paths)


def _nbytes(checkpoint: Checkpoint, path: str) -> int:
    return sum(part_nbytes(part, checkpoint.dtypes[path]) for part in checkpoint.layout[path])


def _copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
