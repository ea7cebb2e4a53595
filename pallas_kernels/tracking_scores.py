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
from jaxtyping import Array, Float

from pallas_kernels import triton as plgpu
from pallas_kernels.flash import Program, Tiles, load_rows, not_buffered, scale, splits_for, tiles_for
from pallas_kernels.implementation import precision_of


def marked_log_sums(here: Program, lse: jax.Ref, score_rows: jax.Ref) -> jax.Array:
    """The log-sum-exp of a program's rows; inf, which makes every probability 0, unless it is marked and saw a key."""
    log_sum = plgpu.load(lse.at[here.head, here.row], mask=here.mask, other=-jnp.inf)
    marked = plgpu.load(score_rows.at[here.row], mask=here.mask, other=0) != 0
    return jnp.where(marked & (log_sum > -jnp.inf), log_sum, jnp.inf)


def tiles_to_read(log_sum: jax.Array, keys: jax.Array, tile: int) -> jax.Array:
    """How many tiles `keys` keys are; none where no row is marked."""
    return jnp.where(jnp.min(log_sum) < jnp.inf, pl.cdiv(keys, tile), 0)


def sum_probabilities(k: jax.Array, q: jax.Array, log_sum: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Sum over rows of every key's probability [keys]. `visible` is of shape [keys, rows]; None means all."""
    product = plgpu.dot(k, q, trans_b=True, precision=precision_of(q.dtype))
    probability = jnp.exp2(product * scale(q.shape[1]) - log_sum[None])
    if visible is not None:
        probability = jnp.where(visible, probability, 0.0)
    return jnp.sum(probability, axis=1)


def write_scores(
    here: Program, out: jax.Ref, score: Callable[[jax.Array], jax.Array], *,
    first: jax.Array | int, read: jax.Array, last: jax.Array | int, tile: int,
) -> None:  # fmt: skip
    """Write `score` of the keys [tile] of tiles first .. read - 1, and 0 to those of tiles read .. last - 1.

    `out` is of shape [blocks, row tiles, heads, keys].
    """

    def step(score: Callable[[jax.Array], jax.Array], i: jax.Array, _: None) -> None:
        key = i * tile + jnp.arange(tile)
        plgpu.store(out.at[here.block, here.tile, here.head, key], score(key), mask=key < out.shape[-1])

    jax.lax.fori_loop(first, read, functools.partial(step, score), None)
    jax.lax.fori_loop(read, last, functools.partial(step, lambda _: jnp.zeros((tile,), jnp.float32)), None)


def write_cache_scores(
    here: Program, out: jax.Ref, q: jax.Array, log_sum: jax.Array, k_cache: jax.Ref,
    buffered: jax.Ref | None = None, *, capacity: int, tiles: Tiles, splits: int,
) -> None:  # fmt: skip
    """Write the scores of a program's part of the cache; 0 beyond kv_length and to buffered rows."""

    def score(key: jax.Array) -> jax.Array:
        at = jnp.minimum(here.slot * capacity + key, k_cache.shape[0] - 1)
        scores = sum_probabilities(load_rows(k_cache, at, here.kv_head, None), q, log_sum, None)
        seen, free = key < here.kv_length, not_buffered(buffered, at, None)
        return jnp.where(seen if free is None else seen & free, scores, 0.0)

    all_tiles = pl.cdiv(capacity, tiles.keys)
    a_split = pl.cdiv(all_tiles, splits)
    first, last = here.split * a_split, jnp.minimum((here.split + 1) * a_split, all_tiles)
    read = jnp.clip(tiles_to_read(log_sum, here.kv_length, tiles.keys), first, last)
    write_scores(here, out, score, first=first, read=read, last=last, tile=tiles.keys)


def launch_scores(
    kernel: Callable, operands: tuple[jax.Array, ...], *, name: str, q: jax.Array, keys: tuple[int, ...], blocks: int,
    block_rows: int, capacity: int, interpret: bool,
) -> list[Float[Array, "blocks keys"]]:  # fmt: skip
    """Run a kernel of scores over (row tiles x splits, heads, blocks), and sum over tiles and heads.

    `kernel` takes refs of the operands and of one output [blocks, row tiles, heads, keys] for each number in `keys`,
    all of which it writes, and as keywords capacity, tiles and splits.
    """
    heads = q.shape[1]
    tiles = tiles_for(q, blocks=1, block_rows=block_rows)  # narrow: more rows without a mark are skipped
    row_tiles, splits = pl.cdiv(block_rows, tiles.rows), splits_for(heads * blocks, pl.cdiv(capacity, tiles.keys))
    parts = pl.pallas_call(
        functools.partial(kernel, capacity=capacity, tiles=tiles, splits=splits),
        grid=(row_tiles * splits, heads, blocks),
        out_shape=[jax.ShapeDtypeStruct((blocks, row_tiles, heads, n), jnp.float32) for n in keys],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=name,
    )(*operands)
    return [jnp.sum(part, axis=(1, 2)) for part in parts]
