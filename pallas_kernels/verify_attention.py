"""Attention of a verify buffer: its rows see the cache and, by class and rank, one another."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import verify_attention_kernel as kernel
from pallas_kernels.implementation import Implementation
from pallas_kernels.scheduled_attention import map_blocks, masked_attention, scatter_blocks

SHARED, DRAFT, UNDECODED, PRIVATE = range(4)


class Visibility(NamedTuple):
    """Who sees whom among the rows of a buffer.

    kind: what a row is as a key: SHARED, DRAFT, UNDECODED or PRIVATE. rank (>= 0): its place among the candidates;
        read for DRAFT and UNDECODED only.
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
    kernels: Implementation = "xla",
) -> Float[Array, "rows heads head_dim"]:
    """Softmax attention, scale 1/sqrt(head_dim), fp32 accumulation; the result has q's dtype.

    A row of the block table is (slot, kv_length, first_row, rows): rows first_row .. first_row + rows - 1
    (rows <= block_rows) are the whole buffer of the slot. They see the cache rows slot * capacity + [0, kv_length)
    that are not `buffered` (those whose position has a row in the buffer), and the k and v of the buffer's own rows
    by `visibility`. The cache is only read. Query head h reads KV head h // (heads / kv_heads). Rows that see
    nothing give 0; rows in no block mean nothing, and may be NaN.

    Source: arXiv 2609.26796, Flash-Verify. The paper's mask, strict isolation and one-pass verify differ only in
    `visibility`.
    """
    if kernels == "xla":
        return _reference(
            q, k, v, k_cache, v_cache, block_table, buffered, visibility, capacity=capacity, block_rows=block_rows
        )
    return kernel.attend(
        q,
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        buffered,
        _as_numbers(visibility),
        capacity=capacity,
        block_rows=block_rows,
        interpret=kernels == "interpret",
    )


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
    *,
    capacity: int,
    block_rows: int,
) -> Array:
    rows, heads, _ = q.shape
    k_slots = k_cache.reshape(-1, capacity, *k_cache.shape[1:])
    v_slots = v_cache.reshape(-1, capacity, *v_cache.shape[1:])
    not_buffered = ~buffered.reshape(-1, capacity)
    buffers = jax.tree.map(
        lambda x: jnp.pad(x, ((0, block_rows), *((0, 0),) * (x.ndim - 1))), (q, k, v, visibility)
    )  # a slice past the end would move back

    def attend(block: Int[Array, "4"]) -> Float[Array, "block_rows heads head_dim"]:
        slot, kv_length, first_row, in_block = block
        q_block, k_block, v_block, rule = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, first_row, block_rows), buffers
        )
        cached = jnp.broadcast_to(not_buffered[slot] & (jnp.arange(capacity) < kv_length), (block_rows, capacity))
        own = visible(rule, rule) | (rule.sees_self[:, None] & jnp.eye(block_rows, dtype=bool))
        own &= (jnp.arange(block_rows) < in_block)[None]
        keys = jnp.concatenate([k_slots[slot], k_block])
        values = jnp.concatenate([v_slots[slot], v_block])
        return masked_attention(q_block, keys, values, jnp.concatenate([cached, own], axis=1))[0]

    scores_a_block = heads * block_rows * (capacity + block_rows)
    return scatter_blocks(map_blocks(attend, block_table, scores_a_block=scores_a_block), block_table, rows)
