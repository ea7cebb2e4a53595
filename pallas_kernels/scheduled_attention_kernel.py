"""The kernels of scheduled attention and of its tracking scores, for Pallas' Triton backend."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.flash import Tiles, attend_cache, launch, load_rows, store_state, this_program
from pallas_kernels.tracking_scores import launch_scores, marked_log_sums, write_cache_scores


def _attention_kernel(block_table, q_ref, k_cache, v_cache, *refs, capacity: int, tiles: Tiles, splits: int):
    out, lse = refs
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    q = load_rows(q_ref, here.row, here.head, here.mask)
    state = attend_cache(here, q, k_cache, v_cache, capacity=capacity, tiles=tiles, splits=splits)
    store_state(here, state, out, lse)


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
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    log_sum = marked_log_sums(here, lse, score_rows)
    q = load_rows(q_ref, here.row, here.head, here.mask)
    write_cache_scores(here, out, q, log_sum, k_cache, capacity=capacity, tiles=tiles, splits=splits)


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
) -> Float[Array, "blocks capacity"]:
    """Attention probability of the cache rows of every block, summed over its marked rows and over heads."""
    (scores,) = launch_scores(
        _score_kernel,
        (block_table, q, k_cache, lse, score_rows.astype(jnp.int8)),
        name="tracking_scores",
        q=q,
        keys=(capacity,),
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
    )
    return scores
