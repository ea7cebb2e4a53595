"""Random weights that commit tokens by a declared schedule: for shapes of which there is no checkpoint.

A step costs what it costs with a trained model of the shape. How many tokens it commits is given, not found: what comes
of it is a replay, and no evidence of how fast such a model decodes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import convert
from benchmarks.expansion import Shape
from benchmarks.forward import random_model
from fdllm_jax import LLM
from fdllm_jax.engine import SHIPPED, dtype_of
from fdllm_jax.model import LLaDA, parameters_of
from fdllm_jax.tokenizer import Tokenizer
from pallas_kernels import HeadStatistics

METHODS = ("flash-cache", "flash-dllm", "flash-dllm-onepass")  # whose windows begin at the first masked position


class Schedule(NamedTuple):
    """Tokens that each step commits from the draft, or in a one-pass method's first step, and those it verifies."""

    drafted: int
    verified: int


class Replayed(LLaDA):
    """A model that is sure of the first predictions of each window, as many as its schedule says, and of no other."""

    def __init__(self, of: LLaDA, schedule: Schedule, *, slots: int, block_length: int):
        super().__init__(of.config, parameters_of(of), of.kernels)
        self.drafted, self.verified = schedule
        self.slots, self.block_length = slots, block_length

    def statistics(
        self, hidden: Float[Array, "rows d_model"], *, given: Int[Array, "rows"] | None = None, **how: Any
    ) -> HeadStatistics:
        """What the head says, the confidences replaced: rows of a slot are its mask views (if any), then the others."""
        found = super().statistics(hidden, given=given, **how)
        column = jnp.arange(len(hidden)) % (len(hidden) // self.slots)
        views = 0 if given is None else self.block_length
        is_view = column < views
        sure = jnp.where(is_view, column < self.verified, column - views < self.drafted)
        token = jnp.where(found.token == self.config.eos_token_id, 0, found.token)
        token = token if given is None else jnp.where(is_view & sure, given, token)
        confidence = sure.astype(found.confidence.dtype)
        return HeadStatistics(token, confidence, None if given is None else confidence)


def engine(shape: Shape, schedule: Schedule, *, block_length: int, dtype: str, kernels: str) -> Callable[[int], LLM]:
    """Engines by their number of slots, of the same random weights, with the shipped tokenizer."""
    small, _ = convert.load(SHIPPED)
    if shape.vocab_size < small.vocab_size:
        raise ValueError(f"--random: {shape.vocab_size} ids are fewer than the shipped tokenizer's {small.vocab_size}")
    config = replace(
        small, **shape._asdict(), embedding_size=shape.vocab_size, n_kv_heads=shape.n_heads, weight_tying=False,
        scale_logits=False,
    )  # fmt: skip
    model, tokenizer = random_model(config, dtype_of(dtype), kernels), Tokenizer(SHIPPED)

    def of(slots: int) -> LLM:
        replayed = Replayed(model, schedule, slots=slots, block_length=block_length)
        return LLM.of(replayed, tokenizer, name="random weights", slots=slots)

    return of
