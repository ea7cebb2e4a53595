"""Scheduled attention of aligned blocks by cuDNN's flash attention, which reads the cache where it lies."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import flash

try:
    # What jax.nn.dot_product_attention calls; that one rounds the log-sum-exp to q's dtype, too coarse for scores.
    from jax._src.cudnn import fused_attention_stablehlo as fused
except ImportError:  # it is private, and may move: then the Triton kernel runs
    fused: Any = None

TILE_ROWS = 128  # query rows of one of cuDNN's programs
MOST_HEAD_DIM = 128
CAPABILITY = "9.0"  # on older GPUs cuDNN has no better instructions than Triton


@functools.cache
def available() -> bool:
    """Whether the default backend is an NVIDIA GPU that this is for, with cuDNN."""
    if fused is None or jax.default_backend() != "gpu":
        return False
    try:
        fused.check_cudnn_version()
    except RuntimeError:
        return False
    return fused.check_compute_capability(CAPABILITY)


def preferred(q: Float[Array, "rows heads head_dim"], *, blocks: int, block_rows: int) -> bool:
    """Whether cuDNN can attend aligned blocks, and is faster than the Triton kernel (`flash.CUDNN_ROWS`, ...)."""
    heads, head_dim = q.shape[1:]
    takes = q.dtype == jnp.bfloat16 and head_dim <= MOST_HEAD_DIM and head_dim % 8 == 0  # fp16 might overflow to inf
    programs = pl.cdiv(block_rows, TILE_ROWS) * heads * blocks
    enough = block_rows >= flash.CUDNN_ROWS and programs >= flash.CUDNN_PROGRAMS
    return takes and enough and available()


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    *,
    with_lse: bool,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"] | None]:
    """Attended values and, if asked for, log-sum-exp (base 2) of every query row; block i is aligned to slot i.

    Every row of a block must see a key. Rows in no block mean nothing, and may be NaN.
    """
    q, k, v = (x.reshape(len(block_table), -1, *x.shape[1:]) for x in (q, k_cache, v_cache))
    kv_length, rows = block_table[:, 1].astype(jnp.int32), block_table[:, 3].astype(jnp.int32)
    out: Any = fused.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=jnp.maximum(rows, 1),  # of no length cuDNN makes NaN, or an error: that depends on its version
        kv_seqlen=jnp.maximum(kv_length, 1),
        scale=q.shape[-1] ** -0.5,
        mask_type=fused.MaskType.PADDING,
        return_residual=with_lse,
    )
    values, lse = out if with_lse else (out, None)
    values = values.reshape(-1, *q.shape[2:])
    if lse is None:
        return values, None
    lse *= math.log2(math.e)  # [slots, heads, rows of a slot]
    return values, jnp.swapaxes(lse, 1, 2).reshape(-1, q.shape[2])
