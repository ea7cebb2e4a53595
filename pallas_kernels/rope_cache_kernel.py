"""The Pallas (Triton) kernel behind `qkv_rope_cache` at many rows: rotation and cache write of a finished product.

There the product is XLA's, and what follows it costs its reading and writing: once each here, in one launch.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton as plgpu
from pallas_kernels.qkv_rope_cache_kernel import cos_sin, launch
from pallas_kernels.weight_product import store_rows

ROWS, HEADS, WARPS = 16, 8, 4  # of a program: rows, heads that share their angles, warps


def _kernel(
    packed_ref, frequency_ref, position_ref, cache_row_ref, _k_cache_in, _v_cache_in, q_ref, k_cache_ref, v_cache_ref,
    k_ref=None, v_ref=None, *, n_heads: int, n_kv_heads: int, head_dim: int, heads: int,
):  # fmt: skip
    rows, half = packed_ref.shape[0], head_dim // 2
    row = pl.program_id(0) * ROWS + jnp.arange(ROWS)
    real = row < rows
    first = pl.program_id(1) * heads  # this program's heads are all of q, of k or of v
    column = jnp.arange(half)

    def load(at: jax.Array) -> jax.Array:
        mask = jnp.broadcast_to(real[:, None], (ROWS, half))
        return plgpu.load(packed_ref.at[row[:, None], at[None, :]], mask=mask, other=0)

    def halves(head: jax.Array) -> tuple[jax.Array, jax.Array]:
        return load(head * head_dim + column), load(head * head_dim + half + column)

    def store(ref, index: jax.Array, head: jax.Array, mask: jax.Array, values: tuple[jax.Array, jax.Array]) -> None:
        for i, value in enumerate(values):
            store_rows(ref, index, head * head_dim + i * half + column, value, mask[:, None])

    def store_kv(cache_ref, returned_ref, head: jax.Array, values: tuple[jax.Array, jax.Array]) -> None:
        cache_row = plgpu.load(cache_row_ref.at[row], mask=real, other=cache_ref.shape[0])
        write = real & (cache_row < cache_ref.shape[0])
        # Interpreted, a masked element is written with its old value: it must not name a row that another one writes.
        store(cache_ref, jnp.where(write, cache_row, cache_ref.shape[0]), head, write, values)
        if returned_ref is not None:
            store(returned_ref, row, head, real, values)

    def rotated(head: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        low, high = (x.astype(jnp.float32) for x in halves(head))
        return low * cos - high * sin, high * cos + low * sin

    @pl.when(first < n_heads + n_kv_heads)
    def _():
        position = plgpu.load(position_ref.at[row], mask=real, other=0).astype(jnp.float32)
        cos, sin = cos_sin(position[:, None] * plgpu.load(frequency_ref.at[column])[None, :])

        @pl.when(first < n_heads)
        def _():
            for head in range(heads):
                store(q_ref, row, first + head, real, rotated(first + head, cos, sin))

        @pl.when(first >= n_heads)
        def _():
            for head in range(heads):
                store_kv(k_cache_ref, k_ref, first + head - n_heads, rotated(first + head, cos, sin))

    @pl.when(first >= n_heads + n_kv_heads)
    def _():
        for head in range(heads):
            store_kv(v_cache_ref, v_ref, first + head - n_heads - n_kv_heads, halves(first + head))


def rope_cache_pallas(
    packed: jax.Array,
    frequency: jax.Array,
    position: jax.Array,
    cache_row: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    n_heads: int,
    returning: bool,
    interpret: bool,
) -> list[jax.Array]:
    """q, k_cache, v_cache and, if `returning`, k and v, from packed [rows, qkv]; see `qkv_rope_cache`."""
    _, n_kv_heads, head_dim = k_cache.shape
    heads = math.gcd(n_heads, n_kv_heads, HEADS)
    return launch(
        functools.partial(_kernel, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, heads=heads),
        packed,
        (frequency, position, cache_row),
        (k_cache, v_cache),
        grid=(pl.cdiv(len(packed), ROWS), (n_heads + 2 * n_kv_heads) // heads),
        n_heads=n_heads,
        returning=returning,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="rope_cache",
    )
