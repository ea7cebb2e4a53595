"""Flash attention of verify buffers for Pallas' Triton backend: cache tiles, then tiles of the buffer's own rows.

The block table has three columns more: what is buffered of a block's slot lies from the first to before the second;
the third is how many of the block's rows have to be gone through for all that some row sees.
`rule` [5, rows] holds, as a key: rank as a draft and rank as an undecoded row; as a query: draft cutoff, undecoded
cutoff and the row that it sees as itself. A key is seen if its rank as a draft is below the first cutoff, its rank as
an undecoded row is at least the second, or it is the row itself.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import triton as plgpu
from pallas_kernels.flash import (
    Hidden,
    Program,
    State,
    Tiles,
    add_keys,
    attend_cache,
    launch,
    load_rows,
    store_state,
    this_program,
)

Cutoffs = tuple[jax.Array, jax.Array, jax.Array]  # draft, undecoded, itself; broadcast against keys


def _cutoffs(here: Program, rule: jax.Ref) -> Cutoffs:
    draft, undecoded, itself = (plgpu.load(rule.at[i, here.row], mask=here.mask, other=0) for i in (2, 3, 4))
    return draft, undecoded, itself


def _sees(cutoffs: Cutoffs, rule: jax.Ref, at: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows of the cutoffs see the keys `at`: [rows, keys]; and which keys any row may see: [keys]."""
    as_draft, as_undecoded, own = (plgpu.load(rule.at[i, at], mask=mask, other=0) for i in (0, 1, 4))
    draft, undecoded, itself = (x[:, None] for x in cutoffs)
    sees = (as_draft[None] < draft) | (as_undecoded[None] >= undecoded) | (at[None] == itself)
    return sees & mask[None], _may_be_seen(as_draft, as_undecoded, own) & mask


def _may_be_seen(as_draft: jax.Array, as_undecoded: jax.Array, itself: jax.Array) -> jax.Array:
    """Of rows as keys: by some row, or by itself."""
    return (as_draft < jnp.iinfo(jnp.int32).max) | (as_undecoded >= 0) | (itself >= 0)


def _verify_kernel(
    block_table, q_ref, k_ref, v_ref, k_cache, v_cache, buffered, rule, *refs, capacity: int, tiles: Tiles, splits: int
):
    out, lse = refs
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    q = load_rows(q_ref, here.row, here.head, here.mask)
    cutoffs = _cutoffs(here, rule)
    hidden = Hidden(buffered, block_table[here.block, 4], block_table[here.block, 5])

    def add_own(i: jax.Array, state: State) -> State:
        key = i * tiles.keys + jnp.arange(tiles.keys)
        at, mask = here.first_row + key, key < here.rows
        sees, seen = _sees(cutoffs, rule, at, mask)
        # what nobody sees is not to be multiplied by 0: it may be infinite
        k, v = load_rows(k_ref, at, here.kv_head, mask), load_rows(v_ref, at, here.kv_head, seen)
        return add_keys(state, q, k, v, sees)

    own = pl.cdiv(jnp.where(here.tile * tiles.rows < here.rows, block_table[here.block, 6], 0), tiles.keys)
    part = {"capacity": capacity, "tiles": tiles, "splits": splits, "behind": own}
    state, of_own = attend_cache(here, q, k_cache, v_cache, hidden, **part)
    store_state(here, jax.lax.fori_loop(*of_own, add_own, state), out, lse)


def _with_bounds(
    block_table: Int[Array, "blocks 4"], buffered: Bool[Array, "cache_rows"], rule: Int[Array, "5 rows"], capacity: int
) -> Int[Array, "blocks 7"]:
    """The table with its further columns. They are the same in every layer, so that XLA computes them once a pass."""
    slot, _, first_row, rows = block_table.T
    hidden, place = buffered.reshape(-1, capacity)[slot], jnp.arange(capacity, dtype=jnp.int32)
    first = jnp.min(jnp.where(hidden, place, capacity), axis=1)
    end = jnp.max(jnp.where(hidden, place + 1, 0), axis=1)
    seen = _may_be_seen(rule[0], rule[1], rule[4])
    in_block = jnp.arange(rule.shape[1], dtype=jnp.int32)[None] - first_row[:, None]
    inside = (in_block >= 0) & (in_block < rows[:, None]) & seen[None]
    own = jnp.max(jnp.where(inside, in_block + 1, 0), axis=1)
    return jnp.concatenate([block_table, jnp.stack([first, end, own], axis=1)], axis=1)


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
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """Attended values and log-sum-exp (base 2) of every row; see `launch`."""
    table = _with_bounds(block_table, buffered, rule, capacity)
    return launch(
        _verify_kernel,
        (table, q, k, v, k_cache, v_cache, buffered.astype(jnp.int8), rule),
        name="verify_attention",
        q=q,
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
        wide=False,  # with masked tiles wide ones are slower
    )
