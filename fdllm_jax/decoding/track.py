"""Track: which decoded positions the next draft computes anew."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.decoding.passes import Tracking
from fdllm_jax.decoding.state import DecodeState, open_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a draft computes: at most `track_budget` decoded positions (T) and `mask_window` masked ones (M).

    track_layers: layers whose attention says which decoded positions; None is all.
    """

    track_budget: int
    mask_window: int
    track_layers: tuple[int, ...] | None


def nothing(slots: int, budgets: Budgets) -> Int[Array, "slots track_budget"]:
    """T at the start: no position. Every row is beyond any capacity."""
    return jnp.full((slots, budgets.track_budget), jnp.iinfo(jnp.int32).max, jnp.int32)


def masked_window(state: DecodeState, budgets: Budgets) -> Int[Array, "slots mask_window"]:
    """M: the first masked positions of the response, also beyond an EOS; then the capacity."""
    return open_before(state, state.length, budgets.mask_window)


def tracking(state: DecodeState, masked: Int[Array, "slots mask_window"], budgets: Budgets) -> Tracking:
    """The attention of M is what is counted."""
    return Tracking(at(masked, state.tokens.shape[1]), budgets.mask_window, budgets.track_layers)


def decoded(state: DecodeState) -> Bool[Array, "slots capacity"]:
    """Positions with a token, the prompt's included."""
    return ~state.masked & (jnp.arange(state.tokens.shape[1])[None] < state.length[:, None])


def best(
    score: Float[Array, "slots capacity"], eligible: Bool[Array, "slots capacity"], count: int
) -> Int[Array, "slots count"]:
    """The eligible positions of the highest score, at most `count`, ties to the lower; then the capacity.

    Scores must not be negative.
    """
    capacity = score.shape[1]
    value, position = jax.lax.top_k(jnp.where(eligible, score, -1.0), min(count, capacity))
    position = jnp.where(value >= 0, position, capacity).astype(jnp.int32)
    return jnp.pad(position, ((0, 0), (0, count - position.shape[1])), constant_values=capacity)


def next_tracked(
    state: DecodeState, decoded_before: Bool[Array, "slots capacity"], score: Float[Array, "slots capacity"], count: int
) -> Int[Array, "slots count"]:
    """T of the next draft: what this step committed, left to right, then what was decoded before it, by score."""
    committed = decoded(state) & ~decoded_before
    return best(jnp.where(committed, jnp.inf, score), committed | decoded_before, count)


def at(position: Int[Array, "slots count"], capacity: int) -> Bool[Array, "slots capacity"]:
    """Where the positions are, of a slot's capacity."""
    slot = jnp.arange(len(position))[:, None]
    return jnp.zeros((len(position), capacity), jnp.bool_).at[slot, position].set(True, mode="drop")
