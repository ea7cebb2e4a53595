"""Orbax checkpoints: one item a layer under `parameters/`, so that a layer at a time is written and a parameter read.

Orbax and TensorStore are imported on first use: a safetensors checkpoint is loaded without them.
"""

import errno
import json
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.checkpoint import ITEMS_FOLDER, Checkpoint
from convert.table import Part
from convert.tensors import DTYPES, TensorInfo, check_finite, check_tensors, listing
from fdllm_jax.config import ModelConfig

_CHUNK_BYTES = 64 * 2**20  # of an array in a file: bounds what is in flight, and such blocks go back to the system


def item_of(path: str) -> tuple[str, str]:
    """The item that holds a parameter, and its name there: layers.3.qkv -> (layers.3, qkv); head -> (head, head)."""
    item, dot, leaf = path.rpartition(".")
    return (item, leaf) if dot else (path, path)


def open_orbax(directory: Path, config: ModelConfig, layout: dict[str, tuple[Part, ...]]) -> Checkpoint:
    """Check the arrays of all items against `layout`.

    Raises ValueError that lists every damaged item, or every fault of the parameters.
    """
    folder = (directory / ITEMS_FOLDER).absolute()
    arrays: dict[str, Any] = {}
    damaged: list[str] = []
    for item in sorted(entry.name for entry in folder.iterdir() if entry.is_dir()):
        try:
            arrays |= {
                item if leaf == item else f"{item}.{leaf}": array for leaf, array in _arrays(folder / item).items()
            }
        except Exception as error:  # TensorStore has many for a damaged file
            damaged.append(f"{item} ({_first_line(error)})")
    if damaged:
        raise ValueError(f"{folder} holds items that cannot be read:" + listing({"damaged": damaged}))
    found = {path: TensorInfo(dtype=array.dtype.name, shape=array.shape) for path, array in arrays.items()}
    check_tensors(str(directory), {path: _shape(parts) for path, parts in layout.items()}, found)

    def read(path: str) -> np.ndarray:
        try:
            packed = arrays[path].read().result()
        except Exception as error:
            raise ValueError(f"{folder / item_of(path)[0]} is damaged: {_first_line(error)}") from error
        start = 0
        for part in layout[path]:
            check_finite(part.name, packed[start : start + part.shape[0]])
            start += part.shape[0]
        return packed

    return Checkpoint(
        directory=directory,
        config=config,
        layout=layout,
        dtypes={path: DTYPES[found[path].dtype] for path in layout},
        read=read,
    )


def _arrays(item: Path) -> dict[str, Any]:
    """The arrays of an Orbax item by name, opened but not read.

    An item is an OCDBT database of zarr arrays, and read as such: Orbax reports a damaged one from stray threads.
    """
    import tensorstore as ts

    json.loads((item / "_METADATA").read_text(encoding="utf-8"))  # what makes it Orbax's
    context = ts.Context({"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 2}})
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    keys = ts.KvStore.open(store, context=context).result().list().result()
    names = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
    if not names:
        raise ValueError("no arrays in it")
    spec = {"driver": "zarr", "fill_missing_data_reads": False}
    return {
        name: ts.open(spec | {"kvstore": store | {"path": f"{name}/"}}, open=True, read=True, context=context).result()
        for name in names
    }


def write_orbax(directory: Path, items: Iterable[tuple[str, Mapping[str, np.ndarray]]]) -> None:
    """Write each item (its name, and its arrays by name) as an Orbax checkpoint of its own; holds one at a time.

    Arrays aligned as `convert.buffers` makes them are written without a copy. Raises OSError if the disk is full.
    """
    import orbax.checkpoint as ocp

    folder, cpu = (directory / ITEMS_FOLDER).absolute(), jax.devices("cpu")[0]
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)  # hardly compressible
    # In a thread, so that an interrupted program waits for the item in hand and finds nothing still being written.
    with ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(max_workers=1) as writer:
        for item, arrays in items:
            save = ocp.args.PyTreeSave(
                {name: jax.device_put(array, cpu) for name, array in arrays.items()},
                save_args={name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays},
                ocdbt_target_data_file_size=_CHUNK_BYTES,
            )
            del arrays
            try:
                writer.submit(checkpointer.save, folder / item, args=save).result()
            except Exception as error:
                if shutil.disk_usage(directory).free < _CHUNK_BYTES or "No space left" in str(error):
                    raise OSError(errno.ENOSPC, _first_line(error)) from error
                raise
            del save  # before the next item is read


def _shape(parts: tuple[Part, ...]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
