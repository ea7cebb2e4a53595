"""The Pallas (Triton) kernel of `qkv_rope_cache`: projection, bias, rotation and cache write in one launch.

A program computes a tile of rows times one head, or the matching columns of both halves of a head, so that it holds
both elements of every pair that turns. k and v go from the registers to their cache rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton as plgpu
from pallas_kernels.weight_product import Case, Tiles, product_tile, store_rows

LAST_OF_HALF_PI = math.pi / 2 - 201 / 2**7 - 253 / 2**19 - 170 / 2**27
MANY = Tiles(rows=128, columns=128, inner=64, warps=8, stages=5)
# A small model's weight costs nothing to read: there one launch in place of XLA's eight counts at any number of rows.
CASES = (
    Case(rows=16, tiles=Tiles(rows=16, columns=64, inner=128, warps=4, stages=4)),
    Case(rows=32, tiles=Tiles(rows=32, columns=64, inner=128, warps=4, stages=4)),
    Case(rows=64, tiles=Tiles(rows=64, columns=64, inner=128, warps=4, stages=3)),
    Case(rows=128, tiles=MANY),
    Case(k=512, tiles=MANY),
)


def cos_sin(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of fp32 angles in [0, 10^5) radians, to about one unit in the last place.

    The library's pair costs a loop per element, for angles without bound. Here the nearest multiple of pi/2 is taken
    off in four steps, and the rest, at most pi/4, goes into the Taylor series. The first three factors have 8 bits, so
    that their products with a multiple below 2^16 are exact, fused with the subtraction or not.
    """
    turns = jnp.floor(angle * (2 / math.pi) + 0.5)
    x = angle - turns * (201 / 2**7) - turns * (253 / 2**19) - turns * (170 / 2**27) - turns * LAST_OF_HALF_PI
    x2 = x * x
    sin = x + x * x2 * (-1 / 6 + x2 * (1 / 120 + x2 * (-1 / 5040 + x2 / 362880)))
    cos = 1 + x2 * (-1 / 2 + x2 * (1 / 24 + x2 * (-1 / 720 + x2 / 40320)))
    quarter = turns.astype(jnp.int32) & 3
    swap = (quarter & 1) == 1
    cos, sin = jnp.where(swap, sin, cos), jnp.where(swap, cos, sin)
    return jnp.where((quarter == 1) | (quarter == 2), -cos, cos), jnp.where(quarter >= 2, -sin, sin)


def _kernel(
    x_ref,
    weight_ref,
    bias_ref,
    frequency_ref,
    position_ref,
    cache_row_ref,
    _k_cache_in,
    _v_cache_in,
    q_ref,
    k_cache_ref,
    v_cache_ref,
    k_ref=None,
    v_ref=None,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    tiles: Tiles,
):
    rows, half, width = x_ref.shape[0], head_dim // 2, tiles.columns // 2
    parts = half // width
    column_tile = pl.program_id(1)
    head, part = jax.lax.div(column_tile, parts), jax.lax.rem(column_tile, parts)
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    real = row < rows
    source = jnp.minimum(row, rows - 1)
    column = part * width + jnp.arange(width)  # of the lower half; its partner is at column + half
    both = jnp.arange(tiles.columns)
    both = part * width + jax.lax.div(both, width) * half + jax.lax.rem(both, width)
    low, high = jnp.split(product_tile(x_ref, weight_ref, row, head * head_dim + both, tiles=tiles), 2, axis=1)
    if bias_ref is not None:
        low += plgpu.load(bias_ref.at[head * head_dim + column]).astype(jnp.float32)[None, :]
        high += plgpu.load(bias_ref.at[head * head_dim + half + column]).astype(jnp.float32)[None, :]

    def rotate() -> tuple[jax.Array, jax.Array]:
        position = plgpu.load(position_ref.at[source]).astype(jnp.float32)
        angle = position[:, None] * plgpu.load(frequency_ref.at[column])[None, :]
        cos, sin = cos_sin(angle)
        return low * cos - high * sin, high * cos + low * sin

    low, high = jax.lax.cond(head < n_heads + n_kv_heads, rotate, lambda: (low, high))

    def store(ref, index: jax.Array, first_head: int, mask: jax.Array) -> None:
        first = (head - first_head) * head_dim + column
        store_rows(ref, index, first, low, mask[:, None])
        store_rows(ref, index, first + half, high, mask[:, None])

    def store_kv(cache_ref, returned_ref, first_head: int) -> None:
        cache_row = plgpu.load(cache_row_ref.at[source])
        write = real & (cache_row < cache_ref.shape[0])
        # Interpreted, a masked element is written with its old value: it must not name a row that another one writes.
        store(cache_ref, jnp.where(write, cache_row, cache_ref.shape[0]), first_head, write)
        if returned_ref is not None:
            store(returned_ref, row, first_head, real)

    @pl.when(head < n_heads)
    def _():
        store(q_ref, row, 0, real)

    @pl.when((head >= n_heads) & (head < n_heads + n_kv_heads))
    def _():
        store_kv(k_cache_ref, k_ref, n_heads)

    @pl.when(head >= n_heads + n_kv_heads)
    def _():
        store_kv(v_cache_ref, v_ref, n_heads + n_kv_heads)


def qkv_rope_cache_pallas(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    frequency: jax.Array,
    position: jax.Array,
    cache_row: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    n_heads: int,
    returning: bool,
    interpret: bool,
    tiles: Tiles,
) -> list[jax.Array]:
    """q, k_cache, v_cache and, if `returning`, k and v; shapes as in `qkv_rope_cache`, frequency [head_dim / 2].

    The columns of `tiles` are cut to what divides head_dim.
    """
    (_, n_kv_heads, head_dim), columns = k_cache.shape, weight.shape[0]
    tiles = dataclasses.replace(tiles, columns=math.gcd(tiles.columns, head_dim))
    return launch(
        functools.partial(_kernel, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, tiles=tiles),
        x,
        (weight, bias, frequency, position, cache_row),
        (k_cache, v_cache),
        grid=(pl.cdiv(x.shape[0], tiles.rows), columns // tiles.columns),  # row tiles share a weight tile
        n_heads=n_heads,
        returning=returning,
        interpret=interpret,
        compiler_params=tiles.compiler_params(),
        name="qkv_rope_cache_returning" if returning else "qkv_rope_cache",
    )


def launch(
    kernel: Callable, x: jax.Array, more: tuple[jax.Array | None, ...], caches: tuple[jax.Array, jax.Array], *,
    n_heads: int, returning: bool, **how: Any,
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over the rows of x. It takes refs of x, of `more`, and of the caches, which it writes in place.

    Its outputs: q, the caches and, if `returning`, k and v, the heads of a row side by side. how: of `pallas_call`.
    """
    cache_rows, n_kv_heads, head_dim = caches[0].shape
    flat_cache = jax.ShapeDtypeStruct((cache_rows, n_kv_heads * head_dim), caches[0].dtype)
    q, k = (jax.ShapeDtypeStruct((len(x), n * head_dim), x.dtype) for n in (n_heads, n_kv_heads))
    first_cache = 1 + sum(one is not None for one in more)
    outputs = pl.pallas_call(
        kernel,
        out_shape=[q, flat_cache, flat_cache, *[k, k] * returning],
        input_output_aliases={first_cache: 1, first_cache + 1: 2},
        **how,
    )(x, *more, *(cache.reshape(flat_cache.shape) for cache in caches))
    return [value.reshape(len(value), -1, head_dim) for value in outputs]
