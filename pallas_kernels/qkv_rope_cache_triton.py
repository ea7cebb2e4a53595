"""The kernel of `qkv_rope_cache` in plain Triton, for when JAX no longer has the Pallas Triton backend.

It does what `qkv_rope_cache_kernel.py` does, step by step, with that kernel's tiles. Triton is needed to import this
file, and jax_triton to call the kernel from JAX.
"""

# Neither need be installed, and pyright takes the triton.py beside this file for Triton.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
import math
from typing import Any, no_type_check

import jax
import triton
import triton.language as tl
from jax.experimental import pallas as pl

from pallas_kernels import qkv_rope_cache_kernel
from pallas_kernels.weight_product import Tiles

Shaped = jax.Array | jax.ShapeDtypeStruct
LAST_OF_HALF_PI = tl.constexpr(qkv_rope_cache_kernel.LAST_OF_HALF_PI)
QUARTERS = tl.constexpr(2 / math.pi)  # of a turn, per radian


# Triton reads a kernel's source: nothing may wrap the function, as a run-time check of its annotations would.
@triton.jit
@no_type_check
def _cos_sin(angle):
    """`qkv_rope_cache_kernel.cos_sin`."""
    turns = tl.floor(angle * QUARTERS + 0.5)
    x = angle - turns * (201 / 2**7) - turns * (253 / 2**19) - turns * (170 / 2**27) - turns * LAST_OF_HALF_PI
    x2 = x * x
    sin = x + x * x2 * (-1 / 6 + x2 * (1 / 120 + x2 * (-1 / 5040 + x2 * (1 / 362880))))
    cos = 1 + x2 * (-1 / 2 + x2 * (1 / 24 + x2 * (-1 / 720 + x2 * (1 / 40320))))
    quarter = turns.to(tl.int32) & 3
    swap = (quarter & 1) == 1
    cos, sin = tl.where(swap, sin, cos), tl.where(swap, cos, sin)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where(quarter >= 2, -sin, sin)


@triton.jit
@no_type_check
def _product_tile(
    x, weight, row, weight_row, d_model: tl.constexpr, tile_rows: tl.constexpr, columns: tl.constexpr,
    inner: tl.constexpr,
):  # fmt: skip
    """`weight_product.product_tile`."""
    total = tl.full((tile_rows, columns), 0.0, tl.float32)
    for first in range(0, d_model, inner):
        column = first + tl.arange(0, inner)
        x_pointers = x + row[:, None] * d_model + column[None, :]
        weight_pointers = weight + weight_row[:, None] * d_model + column[None, :]
        if d_model % inner == 0:
            x_tile, weight_tile = tl.load(x_pointers), tl.load(weight_pointers)
        else:
            mask = column[None, :] < d_model
            x_tile, weight_tile = tl.load(x_pointers, mask, 0.0), tl.load(weight_pointers, mask, 0.0)
        total = tl.dot(x_tile, tl.trans(weight_tile), total, input_precision="ieee")
    return total


@triton.jit
@no_type_check
def _store(pointer, row, column, low, high, mask, heads: tl.constexpr, head_dim: tl.constexpr):
    """Store both halves of a tile of one head in rows of [rows, heads * head_dim]."""
    pointers = pointer + row[:, None] * (heads * head_dim) + column[None, :]
    tl.store(pointers, low.to(pointer.dtype.element_ty), mask[:, None])
    tl.store(pointers + head_dim // 2, high.to(pointer.dtype.element_ty), mask[:, None])


@triton.jit
@no_type_check
def kernel(
    x, weight, bias, frequency, position, cache_row, k_cache, v_cache,
    q, k_cache_again, v_cache_again, k, v,
    rows: tl.constexpr, cache_rows: tl.constexpr, d_model: tl.constexpr, n_heads: tl.constexpr,
    n_kv_heads: tl.constexpr, head_dim: tl.constexpr, biased: tl.constexpr, returning: tl.constexpr,
    tile_rows: tl.constexpr, columns: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """One program's tile of rows and columns, as in `qkv_rope_cache_kernel`; the caches are written where they are.

    k and v are None unless `returning`; `k_cache_again` and `v_cache_again` are not used. Without a bias, `bias` is any
    pointer. Arrays are row-major, 32-bit offsets reach all of each.
    """
    half: tl.constexpr = head_dim // 2
    width: tl.constexpr = columns // 2
    parts: tl.constexpr = half // width
    column_tile = tl.program_id(1)
    head, part = column_tile // parts, column_tile % parts
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    real = row < rows
    source = tl.minimum(row, rows - 1)
    column = part * width + tl.arange(0, width)  # of the lower half; its partner is at column + half
    both = tl.arange(0, columns)
    both = part * width + both // width * half + both % width
    total = _product_tile(x, weight, row % rows, head * head_dim + both, d_model, tile_rows, columns, inner)
    low, high = tl.split(tl.permute(tl.reshape(total, (tile_rows, 2, width)), (0, 2, 1)))
    if biased:
        low += tl.load(bias + head * head_dim + column).to(tl.float32)[None, :]
        high += tl.load(bias + head * head_dim + half + column).to(tl.float32)[None, :]

    if head < n_heads + n_kv_heads:
        angle = tl.load(position + source).to(tl.float32)[:, None] * tl.load(frequency + column)[None, :]
        cos, sin = _cos_sin(angle)
        low, high = low * cos - high * sin, high * cos + low * sin

    if head < n_heads:
        _store(q, row, head * head_dim + column, low, high, real, n_heads, head_dim)
    else:
        to = tl.load(cache_row + source)
        write = real & (to < cache_rows)
        if head < n_heads + n_kv_heads:
            column += (head - n_heads) * head_dim
            _store(k_cache, to, column, low, high, write, n_kv_heads, head_dim)
            if returning:
                _store(k, row, column, low, high, real, n_kv_heads, head_dim)
        else:
            column += (head - n_heads - n_kv_heads) * head_dim
            _store(v_cache, to, column, low, high, write, n_kv_heads, head_dim)
            if returning:
                _store(v, row, column, low, high, real, n_kv_heads, head_dim)


def launch(
    x: Shaped, weight: Shaped, bias: Shaped | None, k_cache: Shaped, *, returning: bool, tiles: Tiles
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of `kernel` and its static arguments.

    The columns of `tiles` are cut to what divides head_dim.
    """
    (rows, d_model), (cache_rows, n_kv_heads, head_dim) = x.shape, k_cache.shape
    outputs, columns = weight.shape[0], math.gcd(tiles.columns, head_dim)
    return (pl.cdiv(rows, tiles.rows), outputs // columns), {
        "rows": rows,
        "cache_rows": cache_rows,
        "d_model": d_model,
        "n_heads": outputs // head_dim - 2 * n_kv_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "biased": bias is not None,
        "returning": returning,
        "tile_rows": tiles.rows,
        "columns": columns,
        "inner": tiles.inner if x.dtype.itemsize == 2 else max(16, tiles.inner // 2),
        **({} if returning else {"k": None, "v": None}),
    }


def qkv_rope_cache_triton(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    frequency: jax.Array,
    position: jax.Array,
    cache_row: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    returning: bool,
    tiles: Tiles,
) -> list[jax.Array]:
    """`qkv_rope_cache_kernel.qkv_rope_cache_pallas` through jax_triton, 0.3 or 0.4."""
    import jax_triton  # not above: without it the kernel can still be compiled, and interpreted

    grid, statics = launch(x, weight, bias, k_cache, returning=returning, tiles=tiles)
    call = functools.partial(
        jax_triton.triton_call,
        *(x, weight, x if bias is None else bias, frequency, position, cache_row),
        kernel=kernel,
        grid=grid,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        name="qkv_rope_cache_returning" if returning else "qkv_rope_cache",
        **statics,
    )
    cache = jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype)
    rows, n_kv_heads, head_dim = x.shape[0], *k_cache.shape[1:]
    q = jax.ShapeDtypeStruct((rows, statics["n_heads"], head_dim), x.dtype)
    k_and_v = [jax.ShapeDtypeStruct((rows, n_kv_heads, head_dim), x.dtype)] * 2 if returning else []
    if jax_triton.__version_info__ < (0, 4):  # an output has a pointer of its own, even where it is an input
        return call(k_cache, v_cache, out_shape=[q, cache, cache, *k_and_v], input_output_aliases={6: 1, 7: 2})
    caches = jax.new_ref(k_cache), jax.new_ref(v_cache)
    q, *k_and_v = call(
        *caches,
        k_cache_again=None,
        v_cache_again=None,
        out_type=[q, *k_and_v],
        backend_options={"enable_fp_fusion": True},  # as in 0.3; Triton 3.9 warns where nothing is said
    )
    return [q, *map(jax.freeze, caches), *k_and_v]
