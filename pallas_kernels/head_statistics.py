"""From activations to a prediction and its probability, without the logits as an array."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pallas_kernels import head_statistics_kernel as kernel
from pallas_kernels.checks import check_shapes
from pallas_kernels.implementation import Implementation, check_kernels, precision_of
from pallas_kernels.weight_product import tiles_for

LOGITS_AT_ONCE = 2**25  # logits (fp32) that the reference computes at a time: 128 MiB, and as much again on the way


class Noise(NamedTuple):
    """Gumbel noise of each row: `temperature * jax.random.gumbel(key, (vocab_size,))` is added to its logits."""

    key: Key[Array, "rows"]
    temperature: Float[Array, "rows"]


class HeadStatistics(NamedTuple):
    """token: argmax of the noisy logits. confidence, given_probability: softmax of the noise-free logits, fp32."""

    token: Int[Array, "rows"]
    confidence: Float[Array, "rows"]
    given_probability: Float[Array, "rows"] | None


def head_statistics(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab_rows d"],
    *,
    vocab_size: int,
    scale: float = 1.0,
    given: Int[Array, "rows"] | None = None,
    banned: tuple[int, ...] = (),
    noise: Noise | None = None,
    kernels: Implementation = "xla",
) -> HeadStatistics:
    """Argmax of each row's logits (ties to the lower id), its probability, and the probability of `given`.

    The logits are `scale * hidden @ head.T` in fp32, over the first `vocab_size` rows of the head; the ids in `banned`
    are removed before the argmax and the softmax. A given id that is removed or out of range has probability 0.
    With `noise` the argmax is that of the noisy logits; the probabilities stay noise-free. Keys are of JAX's default
    kind, threefry. Memory beyond the results: up to 256 MiB ("xla"), 20 bytes per row and tile of ids ("pallas").
    """
    check_kernels(kernels)
    check_shapes(
        {},
        {
            "hidden": (hidden, "rows d"), "head": (head, "vocab_rows d"), "given": (given, "rows"),
            "noise.key": (noise and noise.key, "rows"), "noise.temperature": (noise and noise.temperature, "rows"),
        },
    )  # fmt: skip
    if not 0 < vocab_size <= head.shape[0]:
        raise ValueError(f"{vocab_size=}: expected 1 to the head's {head.shape[0]} rows")
    tiles = tiles_for(kernel.CASES, rows=hidden.shape[0], k=hidden.shape[1])
    if kernels == "xla" or tiles is None:
        return _reference(hidden, head, given, noise, vocab_size=vocab_size, scale=scale, banned=banned)
    key = temperature = None
    if noise is not None:
        if (kind := str(jax.random.key_impl(noise.key))) != "threefry2x32":
            raise ValueError(f"noise keys are {kind}: expected threefry2x32, JAX's default, or kernels='xla'")
        key, temperature = jax.random.key_data(noise.key), noise.temperature
    partial = kernel.partials(
        hidden,
        head,
        given,
        key,
        temperature,
        vocab_size=vocab_size,
        scale=scale,
        banned=banned,
        tiles=tiles,
        interpret=kernels == "interpret",
    )
    first = jnp.argmax(partial.best, axis=0)[None]  # the lower ids are in the first of equal tiles
    token, chosen = (jnp.take_along_axis(x, first, axis=0)[0] for x in (partial.token, partial.chosen))
    log_sum = jax.nn.logsumexp(partial.log_sum, axis=0)
    given_probability = None if given is None else jnp.exp(jnp.max(partial.given, axis=0) - log_sum)
    return HeadStatistics(token, jnp.exp(chosen - log_sum), given_probability)


def _reference(
    hidden: Array,
    head: Array,
    given: Array | None,
    noise: Noise | None,
    *,
    vocab_size: int,
    scale: float,
    banned: tuple[int, ...],
) -> HeadStatistics:
    """The plain formula, as many rows at a time as memory allows; the whole head is one operand, never sliced."""
    token_id = jnp.arange(head.shape[0], dtype=jnp.int32)
    allowed = (token_id < vocab_size) & ~jnp.isin(token_id, jnp.array(banned, jnp.int32))

    def statistics(row: tuple[Array, Array | None, Noise | None]) -> HeadStatistics:
        hidden, given, noise = row
        logits = jnp.einsum(
            "d,vd->v", hidden, head, precision=precision_of(hidden.dtype), preferred_element_type=jnp.float32
        )
        logits = jnp.where(allowed, logits * scale, -jnp.inf)
        noisy = logits
        if noise is not None:
            noisy = logits + noise.temperature * jax.random.gumbel(noise.key, logits.shape)
        token = jnp.argmax(noisy).astype(jnp.int32)
        log_sum = jax.nn.logsumexp(logits)
        given_probability = None
        if given is not None:
            given_probability = jnp.exp(jnp.max(logits, where=token_id == given, initial=-jnp.inf) - log_sum)
        return HeadStatistics(token, jnp.exp(logits[token] - log_sum), given_probability)

    at_once = max(1, LOGITS_AT_ONCE // head.shape[0])
    if at_once >= hidden.shape[0]:
        return jax.vmap(statistics)((hidden, given, noise))
    return jax.lax.map(statistics, (hidden, given, noise), batch_size=at_once)
