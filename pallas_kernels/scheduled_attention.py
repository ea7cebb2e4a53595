"""Attention of packed query rows against the flat cache, scheduled by a block table."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import precision_of

SCORES_AT_ONCE = 2**26  # attention scores (fp32) held at a time: 256 MiB


def scheduled_attention(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    *,
    capacity: int,
    block_rows: int,
) -> Float[Array, "rows heads head_dim"]:
    """Softmax attention, scale 1/sqrt(head_dim), fp32 accumulation; the result has q's dtype.

    A row of the block table is (slot, kv_length, first_row, rows): query rows first_row .. first_row + rows - 1
    (rows <= block_rows) attend to cache rows slot * capacity + [0, kv_length). Query head h reads KV head
    h // (heads / kv_heads). Rows in no block, and rows of a block with kv_length 0, give 0.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    k_slots = k_cache.reshape(-1, capacity, kv_heads, head_dim)
    v_slots = v_cache.reshape(-1, capacity, kv_heads, head_dim)
    precision = precision_of(q.dtype)
    q_padded = jnp.pad(q, ((0, block_rows), (0, 0), (0, 0))).reshape(-1, kv_heads, heads // kv_heads, head_dim)

    def attend(block: Int[Array, "4"]) -> Float[Array, "block_rows heads head_dim"]:
        slot, kv_length, first_row, _ = block
        q_block = jax.lax.dynamic_slice_in_dim(q_padded, first_row, block_rows)
        scores = jnp.einsum(
            "rkgd,ckd->kgrc", q_block, k_slots[slot], precision=precision, preferred_element_type=jnp.float32
        )
        visible = (jnp.arange(capacity) < kv_length)[None, None, None]
        scores = jnp.where(visible, scores * head_dim**-0.5, -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.where(visible, jnp.exp(scores - jnp.where(kv_length > 0, largest, 0.0)), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / jnp.maximum(total, 1e-30)).astype(q.dtype)
        v_block = jnp.where(visible.reshape(-1, 1, 1), v_slots[slot], 0)  # 0 * NaN would be NaN
        out = jnp.einsum("kgrc,ckd->rkgd", weights, v_block, precision=precision, preferred_element_type=jnp.float32)
        return out.astype(q.dtype).reshape(block_rows, heads, head_dim)

    at_once = max(1, SCORES_AT_ONCE // (heads * block_rows * capacity))
    if at_once >= block_table.shape[0]:
        blocks = jax.vmap(attend)(block_table)
    else:
        blocks = jax.lax.map(attend, block_table, batch_size=at_once)
    row_in_block = jnp.arange(block_rows)[None]
    target = jnp.where(row_in_block < block_table[:, 3:], block_table[:, 2:3] + row_in_block, rows)
    return jnp.zeros_like(q).at[target].set(blocks, mode="drop", unique_indices=True)
