"""The packed query: which rows a forward computes, and the block table that groups them.

A query is a buffer of rows of any number of sequences. Every pass of every method is one: prefill, draft, verify and
a full pass without cache differ only in their rows.
"""

from dataclasses import field

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdllm_jax.pytree import pytree
from pallas_kernels import Visibility
from pallas_kernels.verify_attention import CACHED, SHARED


@pytree
class Query:
    """Rows of one forward pass.

    token, position, slot: what stands in each row, where in its sequence, and whose sequence.
    write: whether the row's K and V replace those of its cache row (slot * capacity + position).
    block_table: rows of (slot, kv_length, first_row, rows). A block's query rows see the cache rows of its slot at
        positions below kv_length. A block belongs to one slot; an empty one has 0 rows.
    block_rows: the most rows of a block.
    aligned: whether there is one block for each slot, in their order, each at block_rows times its slot.
    visibility: who sees whom among the rows of a block, where several may stand at one position (verify). None: every
        row of a block writes, and they see the cache as it is then.
    buffered: with `visibility`, the cache rows of positions that have a row in the buffer; no row sees them. A shared
        row that writes is not one of these: it is seen in the cache.
    score_rows: rows whose attention is counted (tracking scores); None: of no row. most_scored: of a block at most so
        many; None: any number.
    track_layers: the layers whose attention is counted; None: all.
    """

    token: Int[Array, "rows"]
    position: Int[Array, "rows"]
    slot: Int[Array, "rows"]
    write: Bool[Array, "rows"]
    block_table: Int[Array, "blocks 4"]
    visibility: Visibility | None = None
    buffered: Bool[Array, "cache_rows"] | None = None
    score_rows: Bool[Array, "rows"] | None = None
    block_rows: int = field(metadata={"static": True})
    most_scored: int | None = field(default=None, metadata={"static": True})
    aligned: bool = field(default=False, metadata={"static": True})
    track_layers: tuple[int, ...] | None = field(default=None, metadata={"static": True})


def packed_query(
    token: Int[Array, "slots capacity"],
    length: Int[Array, "slots"],
    *,
    rows: int,
    most: int | None = None,
    scored: Bool[Array, "slots capacity"] | None = None,
    most_scored: int | None = None,
    track_layers: tuple[int, ...] | None = None,
) -> tuple[Query, Int[Array, "slots"]]:
    """Whole sequences one after the other in `rows` rows, and the first row of each; a length of 0 leaves a slot out.

    length: of prompt and response, at most `rows` in all, of at most `most` sequences (None: of all slots); an empty
    block costs attention its launch. scored: positions whose attention is counted, at most `most_scored` of a sequence.
    """
    slots, capacity = token.shape
    end = jnp.cumsum(length)
    first = end - length
    row = jnp.arange(rows, dtype=jnp.int32)
    slot = jnp.sum(end[None] <= row[:, None], axis=1, dtype=jnp.int32)
    real = slot < slots
    slot = jnp.minimum(slot, slots - 1)
    position = jnp.where(real, row - first[slot], 0)
    of_block = jnp.argsort(length == 0)[:most].astype(jnp.int32)
    query = Query(
        token=token[slot, position],
        position=position,
        slot=slot,
        write=real,
        block_table=jnp.stack([of_block, length[of_block], first[of_block], length[of_block]], axis=-1),
        score_rows=None if scored is None else real & scored[slot, position],
        block_rows=min(rows, capacity),
        most_scored=most_scored,
        track_layers=track_layers,
    )
    return query, first


def partial_query(
    token: Int[Array, "slots rows_a_slot"],
    position: Int[Array, "slots rows_a_slot"],
    rows: Int[Array, "slots"],
    kv_length: Int[Array, "slots"],
    *,
    capacity: int,
    write: Bool[Array, "slots rows_a_slot"] | None = None,
    visibility: Visibility | None = None,
    scored: Bool[Array, "slots rows_a_slot"] | None = None,
    track_layers: tuple[int, ...] | None = None,
) -> Query:
    """Rows of a fixed number a slot, of which the first `rows` are real; 0 leaves a slot out.

    write: None is all. The fields of `visibility` are [slots, rows_a_slot] here. capacity: of a slot, in tokens.
    """
    slots, rows_a_slot = token.shape
    slot = jnp.arange(slots, dtype=jnp.int32)
    real = jnp.arange(rows_a_slot)[None] < rows[:, None]
    flat = (slots * rows_a_slot,)
    writes = real if write is None else real & write
    buffered = None
    if visibility is not None:
        kind = jnp.where((visibility.kind == SHARED) & writes, CACHED, visibility.kind)
        visibility = visibility._replace(kind=kind)
        hides = real & (kind != CACHED)
        cache_row = jnp.where(hides, slot[:, None] * capacity + position, slots * capacity).reshape(flat)
        buffered = jnp.zeros(slots * capacity, jnp.bool_).at[cache_row].set(True, mode="drop")
    return Query(
        token=token.reshape(flat),
        position=jnp.where(real, position, 0).reshape(flat),
        slot=jnp.repeat(slot, rows_a_slot),
        write=writes.reshape(flat),
        block_table=jnp.stack([slot, jnp.where(rows > 0, kv_length, 0), slot * rows_a_slot, rows], axis=-1),
        visibility=None if visibility is None else Visibility(*(x.reshape(flat) for x in visibility)),
        buffered=buffered,
        score_rows=None if scored is None else (real & scored).reshape(flat),
        block_rows=rows_a_slot,
        aligned=True,
        track_layers=track_layers,
    )
