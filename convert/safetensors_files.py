"""Safetensors checkpoints, single-file or sharded: read straight into place, written tensor by tensor.

Format (https://github.com/huggingface/safetensors): 8 bytes of length, little-endian; a JSON header; the tensors.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.buffers import Allocate
from convert.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from convert.table import Part
from convert.tensors import DTYPES, TensorInfo, check_finite, check_tensors, listing
from fdllm_jax.config import ModelConfig

_WORDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NAMES = {word: name for name, word in _WORDS.items()}
_LENGTH = 8  # bytes before the header
_BLOCK = 1 << 19  # bytes read and checked at a time: they stay in the processor's cache
SHARD_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Where a tensor's bytes are."""

    file: Path
    start: int
    info: TensorInfo


def open_safetensors(
    directory: Path, config: ModelConfig, layout: dict[str, tuple[Part, ...]], allocate: Allocate
) -> Checkpoint:
    """Check every header against `layout`; parameters are then read into what `allocate` gives.

    Raises ValueError that lists every fault of the files, or of the tensors.
    """
    stored = _stored(directory)
    parts = [part for parts in layout.values() for part in parts]
    check_tensors(
        str(directory), {part.name: part.shape for part in parts}, {name: item.info for name, item in stored.items()}
    )
    dtypes = {path: [stored[part.name].info.dtype for part in parts] for path, parts in layout.items()}
    mixed = [
        " + ".join(f"{part.name} {dtype}" for part, dtype in zip(layout[path], names, strict=True))
        for path, names in dtypes.items()
        if len(set(names)) > 1
    ]
    if mixed:
        raise ValueError(
            f"tensors of {directory} that are packed together differ in dtype:" + listing({"mixed": mixed})
        )

    def read(path: str) -> np.ndarray:
        parts, dtype = layout[path], DTYPES[dtypes[path][0]]
        rows = sum(part.shape[0] for part in parts)
        packed = allocate(rows * math.prod(parts[0].shape[1:]) * dtype.itemsize)
        start = 0
        for part in parts:
            nbytes = math.prod(part.shape) * dtype.itemsize
            _read_into(packed[start : start + nbytes], part.name, stored[part.name], dtype)
            start += nbytes
        return packed.view(dtype).reshape(rows, *parts[0].shape[1:])

    return Checkpoint(
        directory=directory,
        config=config,
        layout=layout,
        dtypes={path: DTYPES[names[0]] for path, names in dtypes.items()},
        read=read,
    )


def _read_into(target: np.ndarray, name: str, stored: _Stored, dtype: np.dtype) -> None:
    """Fill `target` (uint8) from the file, and check each block while it is in the cache."""
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.start)
        for start in range(0, target.size, _BLOCK):
            block = target[start : start + _BLOCK]
            filled = 0
            while filled < block.size:
                count = file.readinto(block[filled:].data)
                if not count:
                    raise ValueError(f"{stored.file} ended within {name}: it was cut while being read")
                filled += count
            check_finite(name, block.view(dtype))


def _stored(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the directory's files; the single file wins over an index, as in transformers."""
    if (directory / SINGLE_FILE).exists():
        return _read_header(directory / SINGLE_FILE)
    index = directory / INDEX_FILE
    weight_map = _read_index(index)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).exists()]
    if absent:
        raise FileNotFoundError(f"{index} names files that are not there:" + listing({"missing files": absent}))
    shards = {file: _read_header(directory / file) for file in files}
    lost = [f"{name} in {file}" for name, file in weight_map.items() if name not in shards[file]]
    twice = [name for file in files for name in shards[file] if weight_map.get(name, file) != file]
    if lost or twice:
        raise ValueError(
            f"{index} does not fit its files:" + listing({"tensors not there": lost, "tensors in another file": twice})
        )
    return {name: item for shard in shards.values() for name, item in shard.items()}


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from a tensor's name to the file that holds it."""
    expected = "expected JSON with a weight_map from tensors to file names"
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = all(Path(file).name == file for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read: {expected}") from error
    if not plain:
        raise ValueError(f"{index} names files outside its directory: {expected}")
    return weight_map


def _read_header(file: Path) -> dict[str, _Stored]:
    """The tensors that a safetensors file says it holds, checked against the file's size."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(_LENGTH)
            base = _LENGTH + int.from_bytes(prefix, "little")
            text = stream.read(base - _LENGTH) if base <= size else b""
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if prefix.startswith(b"version"):
        raise ValueError(f"{file} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
    if len(prefix) < _LENGTH or base > size:
        raise ValueError(f"{file} is truncated or no safetensors file: {size} bytes do not hold its header")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(file, base, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has a damaged header: {error}") from error
    end = base
    for start, stop in sorted(entry["data_offsets"] for entry in header.values()):
        if base + start != end:
            raise ValueError(f"{file} has a damaged header: its tensors overlap or leave gaps")
        end += stop - start
    if end != size:
        fault = "truncated" if end > size else "damaged"
        raise ValueError(f"{file} is {fault}: its header speaks of {end} bytes, the file has {size}")
    return tensors


def _tensor(file: Path, base: int, entry: Mapping[str, Any]) -> _Stored:
    (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (start, stop, *shape)):
        raise ValueError(f"shape {shape} or offsets {start}, {stop} are not whole numbers")
    dtype = _NAMES.get(entry["dtype"], str(entry["dtype"]))
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{stop - start} bytes for shape {list(shape)} of {dtype}")
    return _Stored(file=file, start=base + start, info=TensorInfo(dtype=dtype, shape=shape))


def write_safetensors(
    directory: Path, infos: Mapping[str, TensorInfo], tensors: Iterable[np.ndarray], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `tensors`, which come in the order of `infos`, as one file or as shards of `shard_bytes` and an index.

    A tensor larger than `shard_bytes` has a shard of its own. Raises OSError.
    """
    shards: list[dict[str, TensorInfo]] = []
    room = 0
    for name, info in infos.items():
        if not shards or _nbytes(info) > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = info
        room -= _nbytes(info)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(files) > 1 else [SINGLE_FILE]
    stream = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        with (directory / file).open("wb") as out:
            out.write(_header(shard))
            for info in shard.values():
                tensor = next(stream)
                assert tensor.shape == info.shape and tensor.dtype == DTYPES[info.dtype]
                out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    if len(files) > 1:
        total = sum(_nbytes(info) for info in infos.values())
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * DTYPES[info.dtype].itemsize


def _header(shard: Mapping[str, TensorInfo]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, info in shard.items():
        stop = start + _nbytes(info)
        header[name] = {"dtype": _WORDS[info.dtype], "shape": list(info.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text
