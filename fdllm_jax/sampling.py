"""Predictions and their confidence, with noise that depends on the request and the position alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

GUMBEL, UNIFORM = 0, 1  # streams of a request's seed


class Prediction(NamedTuple):
    """token: the predicted id. confidence: its probability under softmax of the noise-free logits, fp32."""

    token: Int[Array, "slots window"]
    confidence: Float[Array, "slots window"]


def predict(
    logits: Float[Array, "slots window vocab"],
    noise: Float[Array, "slots window vocab"] | None,
    temperature: Float[Array, "slots"],
) -> Prediction:
    """Argmax of logits + temperature * noise (the Gumbel-max trick; ties go to the lower id) and its confidence."""
    noisy = logits if noise is None else logits + temperature[:, None, None] * noise
    token = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return Prediction(token, jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1)))


def gumbel_keys(
    seed: UInt32[Array, "slots"], step: Int[Array, "slots"], position: Int[Array, "slots window"]
) -> Key[Array, "slots window"]:
    """Keys of the Gumbel noise of (seed, step, position counted from the prompt's start)."""
    return _keys(GUMBEL, seed, step, position)


def gumbel(
    seed: UInt32[Array, "slots"], step: Int[Array, "slots"], position: Int[Array, "slots window"], vocab: int
) -> Float[Array, "slots window vocab"]:
    """Standard Gumbel noise of those keys."""
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,))))(gumbel_keys(seed, step, position))


def uniform(
    seed: UInt32[Array, "slots"], step: Int[Array, "slots"], position: Int[Array, "slots window"]
) -> Float[Array, "slots window"]:
    """Uniform numbers of [0, 1) keyed the same way, independent of the Gumbel noise."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys(UNIFORM, seed, step, position))


def _keys(stream: int, seed: Array, step: Array, position: Array) -> Array:
    def one(seed: Array, step: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), stream)
        return jax.random.fold_in(jax.random.fold_in(key, step), position)

    over_window = jax.vmap(one, in_axes=(None, None, 0))
    return jax.vmap(over_window)(seed, step, position)
