"""Attention of packed query rows against the flat cache, scheduled by a block table."""

from collections.abc import Callable
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import scheduled_attention_cudnn as cudnn
from pallas_kernels import scheduled_attention_kernel as kernel
from pallas_kernels.checks import check_blocks
from pallas_kernels.implementation import Implementation, check_kernels, precision_of
from pallas_kernels.tracking_scores import tracking_scores

SCORES_AT_ONCE = 2**26  # attention scores (fp32) held at a time: 256 MiB

T = TypeVar("T")
Attended = Float[Array, "rows heads head_dim"]
Scores = Float[Array, "cache_rows"]


@overload
def scheduled_attention(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, *, capacity: int, block_rows: int,
    aligned: bool = False, score_rows: None = None, most_scored: int | None = None, kernels: Implementation = "xla",
) -> Array: ...  # fmt: skip
@overload
def scheduled_attention(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, *, capacity: int, block_rows: int,
    aligned: bool = False, score_rows: Array, most_scored: int | None = None, kernels: Implementation = "xla",
) -> tuple[Array, Array]: ...  # fmt: skip
def scheduled_attention(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    *,
    capacity: int,
    block_rows: int,
    aligned: bool = False,
    score_rows: Bool[Array, "rows"] | None = None,
    most_scored: int | None = None,
    kernels: Implementation = "xla",
) -> Attended | tuple[Attended, Scores]:
    """Softmax attention, scale 1/sqrt(head_dim), fp32 accumulation; the result has q's dtype.

    A row of the block table is (slot, kv_length, first_row, rows): query rows first_row .. first_row + rows - 1
    (rows <= block_rows) attend to cache rows slot * capacity + [0, kv_length). Query head h reads KV head
    h // (heads / kv_heads). Rows of a block with kv_length 0 give 0; rows in no block mean nothing, and may be NaN.

    With `score_rows` the result is (attended, scores): scores[slot * capacity + position] is the attention probability
    (fp32) of that cache row, summed over the marked query rows of its slot and over heads (the tracking score of
    arXiv 2609.26796, equation 2, before its means over heads and rows). `most_scored` is the caller's word that no
    block has more marked rows: where that is far less than block_rows, only they are gone through.

    `aligned` is the caller's word that block i is of slot i, its first_row i * block_rows and its kv_length not 0 if it
    has rows, and that all cache rows are finite. It changes no result, but may let cuDNN run, which multiplies rows
    beyond kv_length by 0. Raises ValueError where there are not as many blocks as slots, or other rows than theirs.
    """
    check_kernels(kernels)
    check_blocks(q, k_cache, v_cache, block_table, score_rows, capacity=capacity, block_rows=block_rows)
    blocks = block_table.shape[0]
    if aligned and (q.shape[0] != blocks * block_rows or k_cache.shape[0] != blocks * capacity):
        raise ValueError(
            f"{blocks} aligned blocks of {block_rows=} and {capacity=} do not fit {q.shape[0]} query rows and "
            f"{k_cache.shape[0]} cache rows"
        )
    if kernels == "xla":
        return _reference(q, k_cache, v_cache, block_table, score_rows, capacity=capacity, block_rows=block_rows)
    run = {"capacity": capacity, "block_rows": block_rows, "interpret": kernels == "interpret"}
    if aligned and kernels == "pallas" and cudnn.preferred(q, blocks=blocks, block_rows=block_rows):
        attended, lse = cudnn.attend(q, k_cache, v_cache, block_table, with_lse=score_rows is not None)
    else:
        attended, lse = kernel.attend(q, k_cache, v_cache, block_table, **run)
    if score_rows is None or lse is None:
        return attended
    counted = (q, k_cache, lse, block_table, score_rows)
    if most_scored is not None and most_scored <= block_rows // 2:
        counted, run["block_rows"] = _marked_alone(*counted, most_scored), most_scored
    scores = tracking_scores(*counted, **run)
    return attended, sum_by_slot(scores, block_table, slots=k_cache.shape[0] // capacity)


def _marked_alone(
    q: Array, k_cache: Array, lse: Array, block_table: Array, score_rows: Array, most: int
) -> tuple[Array, Array, Array, Array, Array]:
    """The same with nothing but the marked rows, those of each block in a block of `most` rows."""
    slot, kv_length, first, rows = block_table.T
    marked = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(score_rows, dtype=jnp.int32)])  # before each row
    before = marked[first]
    count = jnp.minimum(marked[first + rows] - before, most)
    place = before[:, None] + jnp.arange(most)[None]  # among all marked rows
    row = jnp.searchsorted(marked[1:], place.reshape(-1) + 1, method="compare_all")
    row = jnp.minimum(row, len(score_rows) - 1)  # beyond a block's count anything does
    table = jnp.stack([slot, kv_length, jnp.arange(len(slot), dtype=jnp.int32) * most, count], axis=1)
    return q[row], k_cache, lse[row], table, jnp.ones(len(row), jnp.bool_)


def _reference(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    score_rows: Array | None,
    *,
    capacity: int,
    block_rows: int,
) -> Array | tuple[Array, Array]:
    rows, heads, _ = q.shape
    k_slots = k_cache.reshape(-1, capacity, *k_cache.shape[1:])
    v_slots = v_cache.reshape(-1, capacity, *v_cache.shape[1:])
    q_padded = jnp.pad(q, ((0, block_rows), (0, 0), (0, 0)))
    marked_padded = jnp.pad(jnp.zeros(rows, bool) if score_rows is None else score_rows, (0, block_rows))

    def attend(block: Int[Array, "4"]) -> tuple[Array, Array]:
        slot, kv_length, first_row, in_block = block
        q_block = jax.lax.dynamic_slice_in_dim(q_padded, first_row, block_rows)
        visible = jnp.arange(capacity)[None] < kv_length
        out, weights = masked_attention(q_block, k_slots[slot], v_slots[slot], visible)
        if score_rows is None:
            return out, jnp.zeros(1)  # of size 0, lax.map could not cut it into batches
        marked = jax.lax.dynamic_slice_in_dim(marked_padded, first_row, block_rows) & (
            jnp.arange(block_rows) < in_block
        )
        return out, marked_weights(weights, marked)

    blocks, scores = map_blocks(attend, block_table, scores_a_block=heads * block_rows * capacity)
    attended = rows_of_blocks(blocks, block_table, rows)
    if score_rows is None:
        return attended
    return attended, sum_by_slot(scores, block_table, slots=k_slots.shape[0])


def masked_attention(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "keys kv_heads head_dim"],
    v: Float[Array, "keys kv_heads head_dim"],
    visible: Bool[Array, "#rows keys"],
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "kv_heads group rows keys"]]:
    """Attended values, in q's dtype, and weights (fp32) of rows that see the `visible` keys; 0 where none is."""
    rows, heads, head_dim = q.shape
    precision = precision_of(q.dtype)
    q = q.reshape(rows, k.shape[1], -1, head_dim)
    scores = jnp.einsum("rkgd,ckd->kgrc", q, k, precision=precision, preferred_element_type=jnp.float32)
    seen = visible[None, None]
    scores = jnp.where(seen, scores * head_dim**-0.5, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(largest > -jnp.inf, largest, 0.0)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    v = jnp.where(jnp.any(visible, axis=0)[:, None, None], v, 0)  # 0 * NaN would be NaN
    out = jnp.einsum(
        "kgrc,ckd->rkgd", weights.astype(q.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype).reshape(rows, heads, head_dim), weights


def marked_weights(
    weights: Float[Array, "kv_heads group rows keys"], marked: Bool[Array, "rows"]
) -> Float[Array, "keys"]:
    """The weights that each key got, summed over the marked rows and over heads."""
    return jnp.sum(jnp.where(marked[None, None, :, None], weights, 0.0), axis=(0, 1, 2))


def map_blocks(attend: Callable[[Array], T], block_table: Array, *, scores_a_block: int) -> T:
    """`attend` of every block, as many at a time as their attention scores allow."""
    at_once = max(1, SCORES_AT_ONCE // scores_a_block)
    if at_once >= block_table.shape[0]:
        return jax.vmap(attend)(block_table)
    return jax.lax.map(attend, block_table, batch_size=at_once)


def rows_of_blocks(
    blocks: Float[Array, "blocks block_rows *dims"], block_table: Int[Array, "blocks 4"], rows: int
) -> Float[Array, "{rows} *dims"]:
    """The rows of all blocks at their places among `rows` rows; 0 in the others. Read: a scatter is three kernels."""
    in_block = jnp.arange(rows)[:, None] - block_table[None, :, 2]
    inside = (in_block >= 0) & (in_block < block_table[None, :, 3])
    block = jnp.argmax(inside, axis=1)
    row = jnp.clip(jnp.arange(rows) - block_table[block, 2], 0, blocks.shape[1] - 1)
    in_any = jnp.any(inside, axis=1).reshape(-1, *(1,) * (blocks.ndim - 2))
    return jnp.where(in_any, blocks[block, row], jnp.zeros((), blocks.dtype))


def sum_by_slot(
    scores: Float[Array, "blocks capacity"], block_table: Int[Array, "blocks 4"], *, slots: int
) -> Float[Array, "cache_rows"]:
    """The scores of every cache row, summed over the blocks of its slot in their order."""
    of_slot = block_table[None, :, 0] == jnp.arange(slots)[:, None]
    return jnp.sum(jnp.where(of_slot[..., None], scores[None], 0.0), axis=1).reshape(-1)
