"""Flash attention of verify buffers for Pallas' Triton backend: cache tiles, then tiles of the buffer's own rows."""

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
    start,
    store_state,
)


def _verify_kernel(
    block_table, q_ref, k_ref, v_ref, k_cache, v_cache, buffered, rule, *refs, capacity: int, tiles: Tiles, splits: int
):
    """One program: a tile of a buffer's rows, one head, one part of the cache tiles; the first part also the buffer.

    `rule` [5, rows] holds, as a key: rank as a draft and rank as an undecoded row; as a query: draft cutoff, undecoded
    cutoff and the row that it sees as itself. A key is seen if its rank as a draft is below the first cutoff, its rank
    as an undecoded row is at least the second, or it is the row itself.
    """
    out, lse = refs
    tile, split = pl.program_id(0) // splits, pl.program_id(0) % splits
    head, block = pl.program_id(1), pl.program_id(2)
    slot, kv_length, first_row, rows = (block_table[block, i] for i in range(4))
    kv_head = head // (q_ref.shape[1] // k_cache.shape[1])
    row_in_block = tile * tiles.rows + jnp.arange(tiles.rows)
    row, row_mask = first_row + row_in_block, row_in_block < rows
    q = load_rows(q_ref, row, head, row_mask)
    draft_cutoff, undecoded_cutoff, itself = (
        plgpu.load(rule.at[i, row], mask=row_mask, other=0)[:, None] for i in (2, 3, 4)
    )

    def add_cached(i: jax.Array, state: State) -> State:
        key = i * tiles.keys + jnp.arange(tiles.keys)
        at, mask = slot * capacity + key, key < kv_length
        seen = plgpu.load(buffered.at[at], mask=mask, other=1) == 0
        # k is loaded without waiting for `seen`: its scores are masked, while 0 * v may be NaN
        return add_keys(
            state, q, load_rows(k_cache, at, kv_head, mask), load_rows(v_cache, at, kv_head, seen), seen[None]
        )

    def add_own(i: jax.Array, state: State) -> State:
        key = i * tiles.keys + jnp.arange(tiles.keys)
        at, mask = first_row + key, key < rows
        as_draft, as_undecoded = (plgpu.load(rule.at[i, at], mask=mask, other=0)[None] for i in (0, 1))
        seen = (as_draft < draft_cutoff) | (as_undecoded >= undecoded_cutoff) | (at[None] == itself)
        seen = seen & mask[None]
        return add_keys(state, q, load_rows(k_ref, at, kv_head, mask), load_rows(v_ref, at, kv_head, mask), seen)

    any_row = tile * tiles.rows < rows
    first, last = key_tiles(kv_length, any_row, split, splits=splits, keys=tiles.keys)
    own_tiles = jnp.where(any_row & (split == 0), pl.cdiv(rows, tiles.keys), 0)
    state = jax.lax.fori_loop(first, last, add_cached, start(tiles.rows, q.shape[1]))
    state = jax.lax.fori_loop(0, own_tiles, add_own, state)
    store_state(state, out, lse, split, row, head, row_mask)


def attend(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    buffered: Bool[Array, "cache_rows"],
    rule: Int[Array, "5 rows"],
    *,
    capacity: int,
    block_rows: int,
    interpret: bool,
) -> Float[Array, "rows heads head_dim"]:
    """Attended values of every row; see `launch` for rows that see nothing."""
    attended, _ = launch(
        _verify_kernel,
        (block_table, q, k, v, k_cache, v_cache, buffered.astype(jnp.int8), rule),
        name="verify_attention",
        q=q,
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
    )
    return attended
