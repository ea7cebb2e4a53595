"""What the tests of both attention kernels share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

BFLOAT16_ERROR, FLOAT32_ERROR = 1e-2, 1e-5


def error(a, b) -> float:
    """max |a - b| over max |b|; NaN is an error of infinity."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    found = np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)
    return found if np.isfinite(found) else np.inf


def in_blocks(values: Array, block_table: Int[Array, "blocks 4"]) -> Array:
    """`values` [rows, ...] with 0 in the rows of no block, which mean nothing."""
    row = jnp.arange(len(values))[:, None]
    first, rows = block_table[None, :, 2], block_table[None, :, 3]
    inside = jnp.any((row >= first) & (row < first + rows), axis=1)
    return jnp.where(inside.reshape(-1, *(1,) * (values.ndim - 1)), values, 0)


def jitted(attention: Callable[..., Any], table: int) -> Callable[..., Any]:
    """The operation, jitted, with 0 in the rows of no block; argument `table` is the block table."""

    def run(*inputs, **call):
        out = attention(*inputs, **call)
        if isinstance(out, tuple):
            return in_blocks(out[0], inputs[table]), *out[1:]
        return in_blocks(out, inputs[table])

    return jax.jit(run, static_argnames=("capacity", "block_rows", "aligned", "most_scored", "kernels"))
