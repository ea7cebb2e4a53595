"""What is masked in a training sequence, and how much each masked position counts in the loss.

Two schemes, half of a batch each: LLaDA's own (arXiv 2502.09992, masks anywhere in the answer), and semi-autoregressive
windows, which is what block-wise decoding meets: everything before the window decoded, everything after it masked.
Both weigh the cross-entropies of a sequence so that the weights sum to 1 in expectation. Functions are per sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

FILL_WEIGHT = 0.1  # of a position after the first EOS, against 1 for a position of the answer proper
FILL_START = 0.1  # share of windows that start in the EOS fill
FULL_RANGE = 0.7  # share of draws whose valid length is uniform up to the sequence's end
NEAR_RANGE = 32  # otherwise at most this many positions after the first EOS
WINDOW = (8, 48)  # widths, both inclusive
SMALLEST_RATE = 1e-3  # of masking: keeps 1 / rate finite


class Sequence(NamedTuple):
    """Its parts: prompt [0, prompt), answer with its first EOS [prompt, length), EOS fill [length, valid)."""

    prompt: Int[Array, ""]
    length: Int[Array, ""]
    valid: Int[Array, ""]


class Noise(NamedTuple):
    """masked: positions that the model sees as the mask token. weight: of each position's cross-entropy, in fp32."""

    masked: Bool[Array, "length"]
    weight: Float[Array, "length"]


def valid_length(key: PRNGKeyArray, length: Int[Array, ""], full: int) -> Int[Array, ""]:
    """A total length that decoding might be asked for: from `length` (nothing after the first EOS) to `full`."""
    which, far, near = jax.random.split(key, 3)
    anywhere = jax.random.randint(far, (), length, full + 1)
    close = jnp.minimum(length + jax.random.randint(near, (), 0, NEAR_RANGE + 1), full)
    return jnp.where(jax.random.uniform(which) < FULL_RANGE, anywhere, close)


def anywhere(key: PRNGKeyArray, sequence: Sequence, rate: Float[Array, ""], full: int) -> Noise:
    """LLaDA's: each answer position is masked with probability `rate`; cross-entropies count 1 / (rate * answer).

    Of the EOS fill, a random FILL_WEIGHT of the masked positions counts in full: the expectation of counting all of
    them by that weight, at fewer positions. The answer's size is taken in the same weights.
    """
    mask_key, fill_key = jax.random.split(key)
    position = jnp.arange(full)
    answer = (position >= sequence.prompt) & (position < sequence.valid)
    rate = jnp.maximum(rate, SMALLEST_RATE)
    masked = answer & (jax.random.uniform(mask_key, (full,)) < rate)
    counted = masked & ((position < sequence.length) | (jax.random.uniform(fill_key, (full,)) < FILL_WEIGHT))
    size = jnp.sum(jnp.where(answer, _worth(position, sequence), 0.0))
    return Noise(masked, jnp.where(counted, 1 / (rate * size), 0.0))


def window(key: PRNGKeyArray, sequence: Sequence, rate: Float[Array, ""], full: int) -> Noise:
    """Semi-autoregressive: a window [start, start + width) masked with probability `rate`, all after it masked.

    At least one position of the window is masked. The loss is the weighted mean over the window's masked positions.
    """
    where, first, fill, wide, some, draw = jax.random.split(key, 6)
    position = jnp.arange(full)
    in_fill = (jax.random.uniform(where) < FILL_START) & (sequence.valid > sequence.length)
    start = jnp.where(
        in_fill,
        jax.random.randint(fill, (), sequence.length, jnp.maximum(sequence.valid, sequence.length + 1)),
        jax.random.randint(first, (), sequence.prompt, sequence.length),
    )
    end = jnp.minimum(start + jax.random.randint(wide, (), WINDOW[0], WINDOW[1] + 1), sequence.valid)
    one = jax.random.randint(some, (), start, end)
    inside = (position >= start) & (position < end)
    guessed = inside & ((jax.random.uniform(draw, (full,)) < rate) | (position == one))
    worth = jnp.where(guessed, _worth(position, sequence), 0.0)
    later = (position >= end) & (position < sequence.valid)
    return Noise(guessed | later, worth / jnp.sum(worth))


def pick(
    key: PRNGKeyArray, weight: Float[Array, "length"], most: int
) -> tuple[Bool[Array, "most length"], Float[Array, "most"]]:
    """At most `most` positions of non-zero weight, as one-hot rows (empty ones are False), and their weights.

    Where there are more, a random cyclic run of them is taken, each with the same probability, and weighed up.
    """
    counted = weight > 0
    rank = jnp.cumsum(counted) - 1
    count = jnp.maximum(rank[-1] + 1, 1)
    turn = (rank + jax.random.randint(key, (), 0, count)) % count
    place = counted[None] & (turn[None] == jnp.arange(most)[:, None])
    scale = jnp.maximum(count.astype(jnp.float32) / most, 1.0)
    return place, scale * jnp.sum(jnp.where(place, weight[None], 0.0), axis=-1)


def _worth(position: Int[Array, "length"], sequence: Sequence) -> Float[Array, "length"]:
    return jnp.where(position < sequence.length, 1.0, FILL_WEIGHT)
