"""Flash attention of verify buffers for Pallas' Triton backend: cache tiles, then tiles of the buffer's own rows.

`rule` [5, rows] holds, as a key: rank as a draft and rank as an undecoded row; as a query: draft cutoff, undecoded
cutoff and the row that it sees as itself. A key is seen if its rank as a draft is below the first cutoff, its rank as
an undecoded row is at least the second, or it is the row itself.

Where the keys are split, the last part, whose share of the cache is the smallest, takes the buffer's own rows.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import triton as plgpu
from pallas_kernels.flash import (
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
from pallas_kernels.tracking_scores import (
    launch_scores,
    marked_log_sums,
    sum_probabilities,
    tiles_to_read,
    write_cache_scores,
    write_scores,
)

Cutoffs = tuple[jax.Array, jax.Array, jax.Array]  # draft, undecoded, itself; broadcast against keys


def _cutoffs(here: Program, rule: jax.Ref) -> Cutoffs:
    draft, undecoded, itself = (plgpu.load(rule.at[i, here.row], mask=here.mask, other=0) for i in (2, 3, 4))
    return draft, undecoded, itself


def _sees(cutoffs: Cutoffs, rule: jax.Ref, at: jax.Array, mask: jax.Array, axis: int) -> jax.Array:
    """Who sees the keys `at`: they lie along `axis` of the result, the rows of the cutoffs along the other."""
    as_draft, as_undecoded = (jnp.expand_dims(plgpu.load(rule.at[i, at], mask=mask, other=0), 1 - axis) for i in (0, 1))
    draft, undecoded, itself = (jnp.expand_dims(x, axis) for x in cutoffs)
    at, mask = jnp.expand_dims(at, 1 - axis), jnp.expand_dims(mask, 1 - axis)
    return ((as_draft < draft) | (as_undecoded >= undecoded) | (at == itself)) & mask


def _verify_kernel(
    block_table, q_ref, k_ref, v_ref, k_cache, v_cache, buffered, rule, *refs, capacity: int, tiles: Tiles, splits: int
):
    out, lse = refs
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    q = load_rows(q_ref, here.row, here.head, here.mask)
    cutoffs = _cutoffs(here, rule)

    def add_own(i: jax.Array, state: State) -> State:
        key = i * tiles.keys + jnp.arange(tiles.keys)
        at, mask = here.first_row + key, key < here.rows
        k, v = load_rows(k_ref, at, here.kv_head, mask), load_rows(v_ref, at, here.kv_head, mask)
        return add_keys(state, q, k, v, _sees(cutoffs, rule, at, mask, axis=1))

    state = attend_cache(here, q, k_cache, v_cache, buffered, capacity=capacity, tiles=tiles, splits=splits)
    takes_own = (here.tile * tiles.rows < here.rows) & (here.split == splits - 1)
    state = jax.lax.fori_loop(0, jnp.where(takes_own, pl.cdiv(here.rows, tiles.keys), 0), add_own, state)
    store_state(here, state, out, lse)


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
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "heads rows"]]:
    """Attended values and log-sum-exp (base 2) of every row; see `launch`."""
    return launch(
        _verify_kernel,
        (block_table, q, k, v, k_cache, v_cache, buffered.astype(jnp.int8), rule),
        name="verify_attention",
        q=q,
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
    )


def _score_kernel(
    block_table, q_ref, k_ref, k_cache, buffered, rule, lse, score_rows, *refs,
    capacity: int, tiles: Tiles, splits: int,
):  # fmt: skip
    cache_scores, own_scores = refs
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    log_sum = marked_log_sums(here, lse, score_rows)
    q = load_rows(q_ref, here.row, here.head, here.mask)
    part = {"capacity": capacity, "tiles": tiles, "splits": splits}
    write_cache_scores(here, cache_scores, q, log_sum, k_cache, buffered, **part)

    @pl.when(here.split == splits - 1)
    def _() -> None:
        cutoffs = _cutoffs(here, rule)

        def score(key: jax.Array) -> jax.Array:
            at, mask = here.first_row + key, key < here.rows
            k = load_rows(k_ref, at, here.kv_head, mask)
            return sum_probabilities(k, q, log_sum, _sees(cutoffs, rule, at, mask, axis=0))

        read = tiles_to_read(log_sum, here.rows, tiles.keys)
        last = pl.cdiv(own_scores.shape[-1], tiles.keys)
        write_scores(here, own_scores, score, first=0, read=read, last=last, tile=tiles.keys)


def tracking_scores(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    lse: Float[Array, "heads rows"],
    block_table: Int[Array, "blocks 4"],
    buffered: Bool[Array, "cache_rows"],
    rule: Int[Array, "5 rows"],
    score_rows: Bool[Array, "rows"],
    *,
    capacity: int,
    block_rows: int,
    interpret: bool,
) -> tuple[Float[Array, "blocks capacity"], Float[Array, "blocks {block_rows}"]]:
    """Attention probability of the cache rows and the own rows of every block, summed over marked rows and heads."""
    cache_scores, own_scores = launch_scores(
        _score_kernel,
        (block_table, q, k, k_cache, buffered.astype(jnp.int8), rule, lse, score_rows.astype(jnp.int8)),
        name="verify_tracking_scores",
        q=q,
        keys=(capacity, block_rows),
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
    )
    return cache_scores, own_scores
