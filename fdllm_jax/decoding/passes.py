"""Passes of the model over the state's slots: over whole sequences, packed, or over some rows of each.

Every pass returns the activations of the positions asked for, and, if asked, the attention that positions got.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding.state import DecodeState
from fdllm_jax.model import LLaDA
from fdllm_jax.query import Query, packed_query, partial_query
from fdllm_jax.sampling import gumbel_keys
from pallas_kernels import HeadStatistics, Noise

# Multiply-adds of a pass over whole sequences, of the layers' weights: some milliseconds, so that neither launching its
# operations nor reading the weights decides what it costs. More rows would be empty whenever one sequence is begun
# alone; a size that fits each time would round a sequence's sums by its batch mates.
PACKED_WORK, MOST_PACKED_ROWS = 2**42, 4096
SHORT = 128  # tokens of a sequence: a pass has as many blocks as sequences of this length fit
WORTH = 2**50  # multiply-adds, some seconds: about as long as it takes to compile a pass of another number of rows
NARROW_STEP = 128  # rows between the sizes of a narrower pass that are weighed


class Seen(NamedTuple):
    """What a pass leaves.

    hidden: activations of the positions asked for; garbage for slots that had no rows. scores: attention probability
    that each position got from the marked rows, summed over them, heads and the tracked layers; 0 for slots that had
    no rows; None where none was counted.
    """

    hidden: Float[Array, "slots wanted d_model"]
    scores: Float[Array, "slots capacity"] | None


class Tracking(NamedTuple):
    """Whose attention is counted, by position, at most how many of a slot, and in which layers (None: all)."""

    marked: Bool[Array, "slots capacity"]
    most: int
    layers: tuple[int, ...] | None


def packed_rows(config: ModelConfig) -> int:
    """Rows of a pass over whole sequences that may hold several: 512 at LLaDA-8B's size."""
    return min(MOST_PACKED_ROWS, PACKED_WORK // _work_of_row(config) // 128 * 128)


def narrower(config: ModelConfig, lengths: Sequence[int], capacity: int) -> int | None:
    """Rows of a second, narrower pass over whole sequences of these lengths: where they save the most.

    None where that is less than `WORTH` if every sequence is computed once, or a pass holds several as it is.
    """
    sizes = np.arange(packed_rows(config), capacity, NARROW_STEP)
    saved = [int(np.sum(np.asarray(lengths) <= size)) * (capacity - int(size)) for size in sizes]
    if not saved or max(saved) * _work_of_row(config) < WORTH:
        return None
    return int(sizes[np.argmax(saved)])


def _work_of_row(config: ModelConfig) -> int:
    """Multiply-adds of the layers' weights."""
    return config.n_layers * config.d_model * (4 * config.d_model + 3 * config.mlp_size)


def whole(
    model: LLaDA,
    state: DecodeState,
    which: Bool[Array, "slots"],
    wanted: Int[Array, "slots wanted"],
    *,
    tracking: Tracking | None = None,
    tokens: Int[Array, "slots capacity"] | None = None,
) -> tuple[Seen, DecodeState]:
    """Compute whole sequences of the slots `which`, and write their cache rows.

    As many sequences as fit are packed into a pass of a fixed number of rows, and there are as many passes as it
    takes; none, if there is no such slot. Where the state has a narrower pass too, a sequence's own length says which
    is its own, so that its sums are rounded alike whatever the others are. tokens: in place of the state's.
    """
    slots, capacity = state.tokens.shape
    tokens = state.tokens if tokens is None else tokens
    marked, most_scored, layers = tracking or (None, None, None)

    def left(carry: tuple) -> Array:
        return jnp.any(carry[0])

    def one_pass(rows: int, carry: tuple) -> tuple:
        pending, hidden, scores, cache = carry
        length, most = jnp.where(pending, state.length, 0), min(slots, max(1, rows // SHORT))
        fits = pending & (jnp.cumsum(length) <= rows) & (jnp.cumsum(pending) <= most)
        of_those = {"rows": rows, "most": most, "scored": marked, "most_scored": most_scored, "track_layers": layers}
        query, first = packed_query(tokens, jnp.where(fits, length, 0), **of_those)
        output = model(query, cache)
        found = output.hidden[jnp.minimum(first[:, None] + wanted, rows - 1)]
        hidden = jnp.where(fits[:, None, None], found, hidden)
        if scores is not None and output.scores is not None:
            scores = jnp.where(fits[:, None], output.scores.reshape(slots, capacity), scores)
        return pending & ~fits, hidden, scores, output.cache

    hidden = jnp.zeros((*wanted.shape, model.config.d_model), model.embedding[...].dtype)
    scores = None if marked is None else jnp.zeros((slots, capacity), jnp.float32)
    cache, widest = state.cache, min(slots * capacity, max(capacity, packed_rows(model.config)))
    sizes = [(widest, which)]
    if state.narrow is not None:
        short = which & (state.length <= state.narrow)
        sizes = [(state.narrow, short), (widest, which & ~short)]
    for rows, its in sizes:
        carry = its, hidden, scores, cache
        _, hidden, scores, cache = jax.lax.while_loop(left, partial(one_pass, rows), carry)
    return Seen(hidden, scores), replace(state, cache=cache, forwards=state.forwards + which.astype(jnp.int32))


def some(
    model: LLaDA, state: DecodeState, query: Query, wanted: Int[Array, "slots wanted"]
) -> tuple[Seen, DecodeState]:
    """Compute a query of a fixed number of rows a slot (`partial_query`). wanted: rows within each slot's."""
    slots, capacity = state.tokens.shape
    has_rows = query.block_table[:, 3] > 0
    output = model(query, state.cache)
    row = jnp.arange(slots)[:, None] * query.block_rows + jnp.clip(wanted, 0, query.block_rows - 1)
    scores = None
    if output.scores is not None:
        scores = jnp.where(has_rows[:, None], output.scores.reshape(slots, capacity), 0.0)
    forwards = state.forwards + has_rows.astype(jnp.int32)
    return Seen(output.hidden[row], scores), replace(state, cache=output.cache, forwards=forwards)


def some_if_any(
    model: LLaDA, state: DecodeState, query: Query, wanted: Int[Array, "slots wanted"]
) -> tuple[Seen, DecodeState]:
    """The same, but nothing runs if no slot has rows."""
    slots, capacity = state.tokens.shape

    def skip(state: DecodeState) -> tuple[Seen, DecodeState]:
        hidden = jnp.zeros((*wanted.shape, model.config.d_model), model.embedding[...].dtype)
        scores = None if query.score_rows is None else jnp.zeros((slots, capacity), jnp.float32)
        return Seen(hidden, scores), state

    any_rows = jnp.any(query.block_table[:, 3] > 0)
    return jax.lax.cond(any_rows, lambda state: some(model, state, query, wanted), skip, state)


def whole_or_some(
    model: LLaDA,
    state: DecodeState,
    is_whole: Bool[Array, "slots"],
    position: Int[Array, "slots rows_a_slot"],
    wanted: Int[Array, "slots wanted"],
    *,
    tracking: Tracking | None = None,
) -> tuple[Seen, DecodeState]:
    """Whole sequences of live slots where `is_whole`, and the rows at `position` of the other live ones.

    position: positions, then the capacity where there are no more. wanted: positions, among those.
    """
    slots, capacity = state.tokens.shape
    partly = state.live & ~is_whole
    full, state = whole(model, state, state.live & is_whole, wanted, tracking=tracking)
    real = position < capacity
    safe = jnp.minimum(position, capacity - 1)
    slot = jnp.arange(slots)[:, None]
    query = partial_query(
        state.tokens[slot, safe],
        safe,
        jnp.where(partly, jnp.sum(real, axis=1, dtype=jnp.int32), 0),
        state.live_kv_length,
        capacity=capacity,
        scored=None if tracking is None else tracking.marked[slot, safe],
        track_layers=None if tracking is None else tracking.layers,
    )
    row = jnp.argmax(position[:, None] == wanted[:, :, None], axis=-1)
    part, state = some_if_any(model, state, query, row)
    hidden = jnp.where(partly[:, None, None], part.hidden, full.hidden)
    if full.scores is None or part.scores is None:
        return Seen(hidden, None), state
    return Seen(hidden, full.scores + part.scores), state


def predict(
    model: LLaDA,
    state: DecodeState,
    hidden: Float[Array, "slots wanted d_model"],
    position: Int[Array, "slots wanted"],
    *,
    noisy: bool,
    given: Int[Array, "slots wanted"] | None = None,
    noise_step: Int[Array, "slots"] | None = None,
    banned: tuple[int, ...] = (),
) -> HeadStatistics:
    """Predictions [slots, wanted] from activations.

    noisy: with the noise of each request's seed, times its temperature. given: tokens whose probabilities are asked for
    as well. noise_step: draws anew in every step; None never does.
    """
    noise = None
    if noisy:
        step = jnp.zeros_like(state.step) if noise_step is None else noise_step
        keys = gumbel_keys(state.request.seed, step, position)
        noise = Noise(keys.reshape(-1), jnp.repeat(state.request.temperature, position.shape[1]))
    flat = None if given is None else given.reshape(-1)
    found = model.statistics(hidden.reshape(-1, hidden.shape[-1]), given=flat, banned=banned, noise=noise)
    return jax.tree.map(lambda x: x.reshape(position.shape), found)
