"""Attention of a verify buffer: its rows see the cache and, by class and rank, one another."""

from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import verify_attention_kernel as kernel
from pallas_kernels.checks import check_blocks
from pallas_kernels.implementation import Implementation, check_kernels
from pallas_kernels.scheduled_attention import (
    map_blocks,
    marked_weights,
    masked_attention,
    rows_of_blocks,
    sum_by_slot,
)
from pallas_kernels.tracking_scores import tracking_scores

SHARED, DRAFT, UNDECODED, PRIVATE, CACHED = range(5)

Attended = Float[Array, "rows heads head_dim"]
CacheScores = Float[Array, "cache_rows"]


class Visibility(NamedTuple):
    """Who sees whom among the rows of a buffer.

    kind: what a row is as a key: SHARED, DRAFT, UNDECODED, PRIVATE, or CACHED (its k and v are in the cache, where all
        rows see them). rank (>= 0): its place among the candidates; read for DRAFT and UNDECODED only.
    draft_cutoff, undecoded_cutoff (>= 0): as a query a row sees all SHARED rows, DRAFT rows of rank < draft_cutoff
        and UNDECODED rows of rank >= undecoded_cutoff.
    sees_self: it also sees itself, whatever it is.
    An empty row of a buffer is PRIVATE; what it attends to has no meaning.
    """

    kind: Int[Array, "rows"]
    rank: Int[Array, "rows"]
    draft_cutoff: Int[Array, "rows"]
    undecoded_cutoff: Int[Array, "rows"]
    sees_self: Bool[Array, "rows"]


@overload
def verify_attention(
    q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, block_table: Array, buffered: Array,
    visibility: Visibility, *, capacity: int, block_rows: int, score_rows: None = None,
    kernels: Implementation = "xla",
) -> Array: ...  # fmt: skip
@overload
def verify_attention(
    q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, block_table: Array, buffered: Array,
    visibility: Visibility, *, capacity: int, block_rows: int, score_rows: Array,
    kernels: Implementation = "xla",
) -> tuple[Array, Array]: ...  # fmt: skip
def verify_attention(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    buffered: Bool[Array, "cache_rows"],
    visibility: Visibility,
    *,
    capacity: int,
    block_rows: int,
    score_rows: Bool[Array, "rows"] | None = None,
    kernels: Implementation = "xla",
) -> Attended | tuple[Attended, CacheScores]:
    """Softmax attention, scale 1/sqrt(head_dim), fp32 accumulation; the result has q's dtype.

    A row of the block table is (slot, kv_length, first_row, rows): rows first_row .. first_row + rows - 1
    (rows <= block_rows) are the whole buffer of the slot. They see the cache rows slot * capacity + [0, kv_length)
    that are not `buffered` (those whose position has a row in the buffer, unless it is CACHED), and the k and v of the
    buffer's own rows by `visibility`. The cache is only read. Query head h reads KV head h // (heads / kv_heads). Rows
    that see nothing give 0; rows in no block mean nothing, and may be NaN.

    With `score_rows` the result is (attended, cache_scores): the attention probability (fp32) that each cache row got,
    summed over the marked query rows of its slot and over heads (the tracking score of arXiv 2609.26796, equation 2,
    before its means over heads and rows). Cache rows that nobody sees, the buffered ones among them, get 0.

    Source: arXiv 2609.26796, Flash-Verify. The paper's mask, strict isolation and one-pass verify differ only in
    `visibility`.
    """
    check_kernels(kernels)
    of_row = "rows kv_heads head_dim"
    others = {"k": (k, of_row), "v": (v, of_row), "buffered": (buffered, "cache_rows")}
    others |= {f"visibility.{name}": (x, "rows") for name, x in visibility._asdict().items()}
    check_blocks(q, k_cache, v_cache, block_table, score_rows, capacity=capacity, block_rows=block_rows, others=others)
    inputs = (q, k, v, k_cache, v_cache, block_table, buffered)
    if kernels == "xla":
        return _reference(*inputs, visibility, score_rows, capacity=capacity, block_rows=block_rows)
    run = {"capacity": capacity, "block_rows": block_rows, "interpret": kernels == "interpret"}
    attended, lse = kernel.attend(*inputs, _as_numbers(visibility), **run)
    if score_rows is None:
        return attended
    scores = tracking_scores(q, k_cache, lse, block_table, score_rows, **run)
    scores = sum_by_slot(scores, block_table, slots=k_cache.shape[0] // capacity)
    return attended, jnp.where(buffered, 0.0, scores)


def visible(query: Visibility, key: Visibility) -> Bool[Array, "queries keys"]:
    """Which key rows each query row sees, but for `sees_self`."""
    kind, rank = key.kind[None], key.rank[None]
    draft = (kind == DRAFT) & (rank < query.draft_cutoff[:, None])
    undecoded = (kind == UNDECODED) & (rank >= query.undecoded_cutoff[:, None])
    return (kind == SHARED) | draft | undecoded


def _as_numbers(visibility: Visibility) -> Int[Array, "5 rows"]:
    """The rule as two comparisons for the kernel: see there. A SHARED row is a draft that everyone sees."""
    kind, rank, draft_cutoff, undecoded_cutoff, sees_self = visibility
    as_draft = jnp.where(kind == SHARED, -1, jnp.where(kind == DRAFT, rank, jnp.iinfo(jnp.int32).max))
    as_undecoded = jnp.where(kind == UNDECODED, rank, -1)
    itself = jnp.where(sees_self, jnp.arange(kind.shape[0]), -1)
    return jnp.stack([as_draft, as_undecoded, draft_cutoff, undecoded_cutoff, itself]).astype(jnp.int32)


def _reference(
    q: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    buffered: Array,
    visibility: Visibility,
    score_rows: Array | None,
    *,
    capacity: int,
    block_rows: int,
) -> Array | tuple[Array, Array]:
    rows, heads, _ = q.shape
    k_slots = k_cache.reshape(-1, capacity, *k_cache.shape[1:])
    v_slots = v_cache.reshape(-1, capacity, *v_cache.shape[1:])
    not_buffered = ~buffered.reshape(-1, capacity)
    marked = jnp.zeros(rows, bool) if score_rows is None else score_rows
    buffers = jax.tree.map(
        lambda x: jnp.pad(x, ((0, block_rows), *((0, 0),) * (x.ndim - 1))), (q, k, v, visibility, marked)
    )  # a slice past the end would move back

    def attend(block: Int[Array, "4"]) -> tuple[Array, Array]:
        slot, kv_length, first_row, in_block = block
        q_block, k_block, v_block, rule, marked = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, first_row, block_rows), buffers
        )
        inside = jnp.arange(block_rows) < in_block
        cached = jnp.broadcast_to(not_buffered[slot] & (jnp.arange(capacity) < kv_length), (block_rows, capacity))
        own = visible(rule, rule) | (rule.sees_self[:, None] & jnp.eye(block_rows, dtype=bool))
        keys = jnp.concatenate([k_slots[slot], k_block])
        values = jnp.concatenate([v_slots[slot], v_block])
        seen = jnp.concatenate([cached, own & inside[None]], axis=1)
        out, weights = masked_attention(q_block, keys, values, seen)
        if score_rows is None:
            return out, jnp.zeros(1)  # of size 0, lax.map could not cut it into batches
        return out, marked_weights(weights, marked & inside)

    scores_a_block = heads * block_rows * (capacity + block_rows)
    blocks, scores = map_blocks(attend, block_table, scores_a_block=scores_a_block)
    attended = rows_of_blocks(blocks, block_table, rows)
    if score_rows is None:
        return attended
    return attended, sum_by_slot(scores[:, :capacity], block_table, slots=k_slots.shape[0])
