"""The packed query: which rows a forward computes, and the block table that groups them.

A query is a buffer of rows of any number of sequences. Every pass of every method is one: prefill, draft, verify and
a full pass without cache differ only in their rows.
"""

from dataclasses import field

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdllm_jax.pytree import pytree


@pytree
class Query:
    """Rows of one forward pass.

    token, position, slot: what stands in each row, where in its sequence, and whose sequence.
    write: whether the row's K and V replace those of its cache row (slot * capacity + position).
    block_table: rows of (slot, kv_length, first_row, rows). A block's query rows see the cache rows of its slot at
        positions below kv_length. A block belongs to one slot; an empty one has 0 rows.
    block_rows: the most rows of a block.
    """

    token: Int[Array, "rows"]
    position: Int[Array, "rows"]
    slot: Int[Array, "rows"]
    write: Bool[Array, "rows"]
    block_table: Int[Array, "blocks 4"]
    block_rows: int = field(metadata={"static": True})


def full_query(token: Int[Array, "slots capacity"], kv_length: Int[Array, "slots"]) -> Query:
    """Every position of every slot below its kv_length, as one block a slot; a kv_length of 0 leaves a slot out."""
    slots, capacity = token.shape
    position = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), token.shape)
    slot = jnp.arange(slots, dtype=jnp.int32)
    return Query(
        token=token.reshape(-1),
        position=position.reshape(-1),
        slot=jnp.repeat(slot, capacity),
        write=(position < kv_length[:, None]).reshape(-1),
        block_table=jnp.stack([slot, kv_length, slot * capacity, kv_length], axis=-1),
        block_rows=capacity,
    )
