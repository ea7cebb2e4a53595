"""RMSNorm, and the kernel that adds an update to the residual stream and normalises it in one launch."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import triton as plgpu

WARPS = 4
INTERPRETED_ROWS = 16  # of a program: interpreted, one costs about as much whatever it holds


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*rows d"]:
    """RMSNorm with statistics in fp32; the weight is applied in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def _kernel(update_ref, residual_ref, norm_ref, new_ref, normed_ref, *, parts: int, eps: float, tile: int):
    """Whole rows: a sum over d is one program's."""
    rows, d = residual_ref.shape
    row, column = pl.program_id(0) * tile + jnp.arange(tile), jnp.arange(pl.next_power_of_2(d))
    mask = (row < rows)[:, None] & (column < d)[None]

    def load(ref: jax.Ref, first: int = 0) -> jax.Array:
        return plgpu.load(ref.at[first + row[:, None], column[None]], mask=mask, other=0).astype(jnp.float32)

    total = load(update_ref)
    for part in range(1, parts):
        total += load(update_ref, part * rows)
    new = (load(residual_ref) + total).astype(new_ref.dtype)
    plgpu.store(new_ref.at[row[:, None], column[None]], new, mask=mask)
    x = new.astype(jnp.float32)
    normed = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / d + eps)).astype(new.dtype)
    weight = plgpu.load(norm_ref.at[column], mask=column < d, other=0)
    plgpu.store(normed_ref.at[row[:, None], column[None]], normed * weight[None], mask=mask)


def add_and_norm_pallas(
    update: Float[Array, "parts_rows d"],
    residual: Float[Array, "rows d"],
    norm: Float[Array, "d"],
    *,
    eps: float,
    interpret: bool,
    tile: int | None = None,
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Residual + update, whose parts of as many rows stand one below the other, and its RMSNorm, in residual's dtype.

    tile: rows of a program, a power of two.
    """
    rows, tile = residual.shape[0], tile or (INTERPRETED_ROWS if interpret else 1)
    out = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    new, normed = pl.pallas_call(
        functools.partial(_kernel, parts=update.shape[0] // rows, eps=eps, tile=tile),
        out_shape=(out, out),
        grid=(pl.cdiv(rows, tile),),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="add_and_norm",
    )(update, residual, norm)
    return new, normed
