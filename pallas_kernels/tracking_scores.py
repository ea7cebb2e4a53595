"""Tracking scores for Pallas' Triton backend: a second pass over the keys that writes no values.

Once the log-sum-exp of every query row is known, the attention probability of a key is one product away. One program
takes a tile of a block's query rows, one head and a part of the keys, and writes for every key the probability summed
over the rows that are marked. Where none is it reads no key. The sums over tiles and heads have a fixed order, so the
result is deterministic.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import triton as plgpu
from pallas_kernels.flash import Program, Tiles, load_rows, scale, shares, splits_for, this_program, tiles_for
from pallas_kernels.implementation import precision_of


def marked_log_sums(here: Program, lse: jax.Ref, score_rows: jax.Ref) -> jax.Array:
    """The log-sum-exp of a program's rows; inf, which makes every probability 0, unless it is marked and saw a key."""
    log_sum = plgpu.load(lse.at[here.row, here.head], mask=here.mask, other=-jnp.inf)
    marked = plgpu.load(score_rows.at[here.row], mask=here.mask, other=0) != 0
    return jnp.where(marked & (log_sum > -jnp.inf), log_sum, jnp.inf)


def _kernel(block_table, q_ref, k_cache, lse, score_rows, out, *, capacity: int, tiles: Tiles, splits: int):
    """Scores of a program's part of the cache, 0 beyond kv_length, in `out` [blocks, row tiles, heads, keys]."""
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    log_sum = marked_log_sums(here, lse, score_rows)
    q = load_rows(q_ref, here.row, here.head, here.mask)

    def store(i: jax.Array, scores: Callable[[jax.Array], jax.Array]) -> None:
        key = i * tiles.keys + jnp.arange(tiles.keys)
        plgpu.store(out.at[here.block, here.tile, here.head, key], scores(key), mask=key < capacity)

    def of_keys(key: jax.Array) -> jax.Array:
        at = jnp.minimum(here.slot * capacity + key, k_cache.shape[0] - 1)
        k = load_rows(k_cache, at, here.kv_head, None)
        product = plgpu.dot(k, q, trans_b=True, precision=precision_of(q.dtype))
        probability = jnp.exp2(product * scale(q.shape[1]) - log_sum[None])
        return jnp.where(key < here.kv_length, jnp.sum(probability, axis=1), 0.0)

    all_tiles = pl.cdiv(capacity, tiles.keys)
    ((first, last),) = shares(here, splits, all_tiles)
    to_read = jnp.where(jnp.min(log_sum) < jnp.inf, pl.cdiv(here.kv_length, tiles.keys), 0)
    read = jnp.clip(to_read, first, last)
    jax.lax.fori_loop(first, read, lambda i, _: store(i, of_keys), None)
    jax.lax.fori_loop(read, last, lambda i, _: store(i, lambda key: jnp.zeros(key.shape, jnp.float32)), None)


def tracking_scores(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    lse: Float[Array, "rows heads"],
    block_table: Int[Array, "blocks 4"],
    score_rows: Bool[Array, "rows"],
    *,
    capacity: int,
    block_rows: int,
    interpret: bool,
) -> Float[Array, "blocks capacity"]:
    """Attention probability of the cache rows of every block, summed over its marked rows and over heads."""
    heads, blocks = q.shape[1], block_table.shape[0]
    tiles = tiles_for(q, blocks=1, block_rows=block_rows)  # narrow: more rows without a mark are skipped
    row_tiles, splits = pl.cdiv(block_rows, tiles.rows), splits_for(heads * blocks, pl.cdiv(capacity, tiles.keys))
    parts = pl.pallas_call(
        functools.partial(_kernel, capacity=capacity, tiles=tiles, splits=splits),
        grid=(row_tiles * splits, heads, blocks),
        out_shape=jax.ShapeDtypeStruct((blocks, row_tiles, heads, capacity), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="tracking_scores",
    )(block_table, q, k_cache, lse, score_rows.astype(jnp.int8))
    return jnp.sum(parts, axis=(1, 2))
