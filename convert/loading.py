"""Load a checkpoint of either format onto the default device, one parameter at a time."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.buffers import Allocate, aligned
from convert.checkpoint import INDEX_FILE, ITEMS_FOLDER, SINGLE_FILE, Checkpoint, is_orbax, is_safetensors
from convert.orbax_files import open_orbax
from convert.safetensors_files import open_safetensors
from convert.table import layout
from fdllm_jax.config import ModelConfig


def open_checkpoint(directory: Path, allocate: Allocate = aligned) -> Checkpoint:
    """Open and check a checkpoint of either format; a safetensors one is read into what `allocate` gives.

    Raises FileNotFoundError if the directory, its config.json or its weights are missing, ValueError for what is in
    them.
    """
    config = ModelConfig.from_directory(directory)
    if is_safetensors(directory):
        return open_safetensors(directory, config, layout(config), allocate)
    if is_orbax(directory):
        return open_orbax(directory, config, layout(config))
    raise FileNotFoundError(
        f"no weights in {directory}: looked for {SINGLE_FILE}, {INDEX_FILE} (safetensors) and {ITEMS_FOLDER}/ (Orbax)"
    )


def load(directory: Path, *, dtype: DTypeLike | None = None) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """The configuration and the parameters (path -> array, as `fdllm_jax.model.parameter_shapes` declares them).

    `dtype`: cast to it; None keeps what is stored. Host memory holds at most two parameters on their way to another
    device. Raises FileNotFoundError or ValueError as `open_checkpoint`, and ValueError for weights that are NaN
    or infinite, or become so in `dtype`.
    """
    checkpoint = open_checkpoint(Path(directory))
    parameters: dict[str, jax.Array] = {}
    finite: dict[str, jax.Array] = {}
    previous = None
    for path in checkpoint.layout:
        array = jax.device_put(checkpoint.read(path))
        if dtype is not None and array.dtype != dtype:
            array, finite[path] = _cast(array, dtype=jnp.dtype(dtype))
        jax.block_until_ready(previous)  # bounds the buffers in flight
        parameters[path] = previous = array
    overflown = [part.name for path, flag in finite.items() if not flag for part in checkpoint.layout[path]]
    if overflown:
        raise ValueError(f"weights of {directory} are beyond the range of {jnp.dtype(dtype)}: {', '.join(overflown)}")
    return checkpoint.config, parameters


@partial(jax.jit, static_argnames="dtype")
def _cast(array: jax.Array, *, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The array in `dtype`, and whether it is finite there."""
    cast = array.astype(dtype)
    return cast, jnp.isfinite(cast).all()
