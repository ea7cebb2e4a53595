"""Commit: from confidence and eligibility to the `Rule` that commits each row (NONE: it stays open), and the writing.

Ties go to the lower position.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.decoding.state import DecodeState, Rule, Trace, any_of


def quota(
    confidence: Float[Array, "slots window"], eligible: Bool[Array, "slots window"], count: Int[Array, "slots"]
) -> Int[Array, "slots window"]:
    """The `count` eligible rows of the highest confidence (LLaDA's low-confidence remasking)."""
    return jnp.where(eligible & (_rank(confidence, eligible) < count[:, None]), Rule.QUOTA, Rule.NONE)


def threshold(
    confidence: Float[Array, "slots window"], eligible: Bool[Array, "slots window"], level: Float[Array, "slots"]
) -> Int[Array, "slots window"]:
    """Every eligible row whose confidence is at least `level`; if there is none, the most confident one."""
    return _or_most_confident(eligible & (confidence >= level[:, None]), confidence, eligible, Rule.THRESHOLD)


def factor(
    confidence: Float[Array, "slots window"], eligible: Bool[Array, "slots window"], level: Float[Array, "slots"]
) -> Int[Array, "slots window"]:
    """The most confident rows, as long as the n-th has (n + 1)(1 - confidence) <= level; at least one.

    Source: Fast-dLLM (arXiv 2505.22618), without its release's off-by-one at the last rank.
    """
    rank = _rank(confidence, eligible)
    fails = eligible & ((rank + 2).astype(jnp.float32) * (1 - confidence) > level[:, None])
    first_failure = jnp.min(jnp.where(fails, rank, confidence.shape[-1]), axis=-1, keepdims=True)
    return _or_most_confident(eligible & (rank < first_failure), confidence, eligible, Rule.FACTOR)


def rank(value: Float[Array, "slots window"]) -> Int[Array, "slots window"]:
    """Each row's place when the rows are sorted by value, the largest first."""
    return jnp.sum(_before(value), axis=-1, dtype=jnp.int32)


def most_confident(
    confidence: Float[Array, "slots window"], eligible: Bool[Array, "slots window"]
) -> Bool[Array, "slots window"]:
    """The eligible row of the highest confidence."""
    return eligible & (_rank(confidence, eligible) == 0)


def write(
    state: DecodeState,
    position: Int[Array, "slots window"],
    token: Int[Array, "slots window"],
    confidence: Float[Array, "slots window"],
    rule: Int[Array, "slots window"],
) -> DecodeState:
    """Commit the rows whose rule is not NONE: their tokens, and their entries in the trace. No two share a position."""
    here = (rule != Rule.NONE)[:, :, None] & (position[:, :, None] == jnp.arange(state.tokens.shape[1])[None, None])
    committed = jnp.any(here, axis=1)

    def put(array: Array, value: Array) -> Array:
        """By a sum of one value: all arrays' sums are one kernel of a GPU, and scatters one each."""
        return jnp.where(committed, jnp.sum(jnp.where(here, value[:, :, None], 0), axis=1, dtype=array.dtype), array)

    return replace(
        state,
        tokens=put(state.tokens, token),
        masked=state.masked & ~committed,
        trace=Trace(
            step=jnp.where(committed, state.step[:, None], state.trace.step),
            rule=put(state.trace.rule, rule),
            confidence=put(state.trace.confidence, confidence),
        ),
    )


def end_at_eos(
    end: Int[Array, "slots"],
    position: Int[Array, "slots window"],
    token: Int[Array, "slots window"],
    committed: Bool[Array, "slots window"],
    eos_ids: tuple[int, ...],
) -> Int[Array, "slots"]:
    """The end, moved up to just behind the leftmost EOS among the committed tokens."""
    eos = committed & any_of(token, eos_ids)
    return jnp.min(jnp.where(eos, position + 1, end[:, None]), axis=-1)


def _or_most_confident(passing: Array, confidence: Array, eligible: Array, rule: Rule) -> Array:
    any_passes = jnp.any(passing, axis=-1, keepdims=True)
    best = jnp.where(most_confident(confidence, eligible), Rule.MOST_CONFIDENT, Rule.NONE)
    return jnp.where(any_passes, jnp.where(passing, rule, Rule.NONE), best)


def _rank(confidence: Array, eligible: Array) -> Array:
    """How many eligible rows come before each row: those of higher confidence, and equal ones to the left."""
    return jnp.sum(_before(confidence) & eligible[:, None, :], axis=-1)


def _before(value: Array) -> Array:
    """[slots, row, other]: the other row comes first."""
    mine, other = value[:, :, None], value[:, None, :]
    index = jnp.arange(value.shape[-1])[None]
    return (other > mine) | ((other == mine) & (index[:, None, :] < index[:, :, None]))
