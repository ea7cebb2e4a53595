"""Commit rules: from confidence and eligibility to the mask of what is committed. Ties go to the lower position."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def quota(
    confidence: Float[Array, "slots window"], eligible: Bool[Array, "slots window"], count: Int[Array, "slots"]
) -> Bool[Array, "slots window"]:
    """The `count` eligible rows of the highest confidence (LLaDA's low-confidence remasking)."""
    return eligible & (_rank(confidence, eligible) < count[:, None])


def threshold(
    confidence: Float[Array, "slots window"], eligible: Bool[Array, "slots window"], level: Float[Array, "slots"]
) -> Bool[Array, "slots window"]:
    """Every eligible row whose confidence is at least `level`; if there is none, the most confident one."""
    passing = eligible & (confidence >= level[:, None])
    most_confident = eligible & (_rank(confidence, eligible) == 0)
    return jnp.where(jnp.any(passing, axis=-1, keepdims=True), passing, most_confident)


def _rank(confidence: Array, eligible: Array) -> Array:
    """How many eligible rows come before each row: those of higher confidence, and equal ones to the left."""
    mine, other = confidence[:, :, None], confidence[:, None, :]
    index = jnp.arange(confidence.shape[-1])[None]
    before = (other > mine) | ((other == mine) & (index[:, None, :] < index[:, :, None]))
    return jnp.sum(before & eligible[:, None, :], axis=-1)
