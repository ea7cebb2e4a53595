"""The kernels of scheduled attention and of its tracking scores, for Pallas' Triton backend."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import triton as plgpu
from pallas_kernels.flash import (
    State,
    Tiles,
    add_keys,
    key_tiles,
    launch,
    load_rows,
    scale,
    splits_for,
    start,
    store_state,
    tiles_for,
)
from pallas_kernels.implementation import precision_of


def _attention_kernel(block_table, q_ref, k_cache, v_cache, *refs, capacity: int, tiles: Tiles, splits: int):
    out, lse = refs
    tile, split = pl.program_id(0) // splits, pl.program_id(0) % splits
    head, block = pl.program_id(1), pl.program_id(2)
    slot, kv_length, first_row, rows = (block_table[block, i] for i in range(4))
    kv_head = head // (q_ref.shape[1] // k_cache.shape[1])
    row_in_block = tile * tiles.rows + jnp.arange(tiles.rows)
    row, row_mask = first_row + row_in_block, row_in_block < rows
    q = load_rows(q_ref, row, head, row_mask)

    def step(masked: bool, i: jax.Array, state: State) -> State:
        key = i * tiles.keys + jnp.arange(tiles.keys)
        mask = key < kv_length if masked else None
        k = load_rows(k_cache, slot * capacity + key, kv_head, mask)
        v = load_rows(v_cache, slot * capacity + key, kv_head, mask)
        return add_keys(state, q, k, v, mask[None] if mask is not None else None)

    first, last = key_tiles(kv_length, tile * tiles.rows < rows, split, splits=splits, keys=tiles.keys)
    whole = jnp.clip(kv_length // tiles.keys, first, last)
    state = jax.lax.fori_loop(first, whole, functools.partial(step, False), start(tiles.rows, q.shape[1]))
    state = jax.lax.fori_loop(whole, last, functools.partial(step, True), state)
    store_state(state, out, lse, split, row, head, row_mask)


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    *,
    capacity: int,
    block_rows: int,
    interpret: bool,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "heads rows"]]:
    """Attended values and log-sum-exp (base 2) of every query row; see `launch`."""
    return launch(
        _attention_kernel,
        (block_table, q, k_cache, v_cache),
        name="scheduled_attention",
        q=q,
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
    )


def _score_kernel(block_table, q_ref, k_cache, lse, score_rows, out, *, capacity: int, tiles: Tiles, splits: int):
    """A program: a tile of a block's rows, one head, a part of the key tiles; out [blocks, row tiles, heads, keys]."""
    tile, split = pl.program_id(0) // splits, pl.program_id(0) % splits
    head, block = pl.program_id(1), pl.program_id(2)
    slot, kv_length, first_row, rows = (block_table[block, i] for i in range(4))
    kv_head = head // (q_ref.shape[1] // k_cache.shape[1])
    row_in_block = tile * tiles.rows + jnp.arange(tiles.rows)
    row, mask = first_row + row_in_block, row_in_block < rows
    log_sum = plgpu.load(lse.at[head, row], mask=mask, other=-jnp.inf)
    marked = (plgpu.load(score_rows.at[row], mask=mask, other=0) != 0) & (log_sum > -jnp.inf)
    log_sum = jnp.where(marked, log_sum, jnp.inf)  # makes the probabilities of a row that is not marked 0
    q = load_rows(q_ref, row, head, mask)

    def key_of(i: jax.Array) -> jax.Array:
        return i * tiles.keys + jnp.arange(tiles.keys)

    def store(i: jax.Array, scores: jax.Array) -> None:
        key = key_of(i)
        plgpu.store(out.at[block, tile, head, key], jnp.where(key < kv_length, scores, 0.0), mask=key < capacity)

    def add(i: jax.Array, _: None) -> None:
        at = jnp.minimum(slot * capacity + key_of(i), k_cache.shape[0] - 1)
        k = load_rows(k_cache, at, kv_head, None)
        product = plgpu.dot(k, q, trans_b=True, precision=precision_of(q.dtype))
        store(i, jnp.sum(jnp.exp2(product * scale(q.shape[1]) - log_sum[None]), axis=1))

    def fill(i: jax.Array, _: None) -> None:
        store(i, jnp.zeros((tiles.keys,), jnp.float32))

    all_tiles = pl.cdiv(capacity, tiles.keys)
    a_split = pl.cdiv(all_tiles, splits)
    first, last = split * a_split, jnp.minimum((split + 1) * a_split, all_tiles)
    seen = jnp.clip(jnp.where(jnp.min(log_sum) < jnp.inf, pl.cdiv(kv_length, tiles.keys), 0), first, last)
    jax.lax.fori_loop(first, seen, add, None)
    jax.lax.fori_loop(seen, last, fill, None)


def tracking_scores(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    lse: Float[Array, "heads rows"],
    block_table: Int[Array, "blocks 4"],
    score_rows: Bool[Array, "rows"],
    *,
    capacity: int,
    block_rows: int,
    interpret: bool,
) -> Float[Array, "cache_rows"]:
    """Attention probability of every cache row, summed over the marked rows of its slot and over heads.

    A program sums the probabilities of a tile of rows, if one of them is marked; the sum over tiles, heads and a slot's
    blocks has a fixed order, so the result is deterministic.
    """
    heads, blocks = q.shape[1], block_table.shape[0]
    tiles = tiles_for(q, blocks=1, block_rows=block_rows)  # narrow: more rows without a mark are skipped
    row_tiles, splits = pl.cdiv(block_rows, tiles.rows), splits_for(heads * blocks, pl.cdiv(capacity, tiles.keys))
    parts = pl.pallas_call(
        functools.partial(_score_kernel, capacity=capacity, tiles=tiles, splits=splits),
        grid=(row_tiles * splits, heads, blocks),
        out_shape=jax.ShapeDtypeStruct((blocks, row_tiles, heads, capacity), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="tracking_scores",
    )(block_table, q, k_cache, lse, score_rows.astype(jnp.int8))
    slots = k_cache.shape[0] // capacity
    of_slot = block_table[None, :, 0] == jnp.arange(slots)[:, None]
    scores = jnp.sum(parts, axis=(1, 2))
    return jnp.sum(jnp.where(of_slot[..., None], scores[None], 0.0), axis=1).reshape(-1)
