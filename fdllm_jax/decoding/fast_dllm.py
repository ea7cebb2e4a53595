"""Fast-dLLM: blocks decoded in parallel, with a cache that is filled anew at each block's start, or without."""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdllm_jax.decoding import commit, passes
from fdllm_jax.decoding.state import DecodeState, Rule, first_eos
from fdllm_jax.model import LLaDA
from fdllm_jax.pytree import pytree

Cache = Literal["none", "prefix", "dual"]


@pytree
class Block:
    """The current block, and whether it has had its pass over everything."""

    index: Int[Array, "slots"]
    refreshed: Bool[Array, "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDLLM:
    """Each block's positions are committed by threshold or factor, at least one a step, until none is left.

    cache: what a step after a block's first computes: everything ("none"), the block and all behind it ("prefix"), or
    the block ("dual"); the first computes everything. rows: the most rows of such a step.
    Source: Fast-dLLM (arXiv 2505.22618). Generation stops after the block in which an EOS stands.
    """

    block_length: int
    cache: Cache
    by_factor: bool
    rows: int
    eos_ids: tuple[int, ...]
    noisy: bool

    def memory(self, slots: int) -> Block:
        """At the start: the first block, not refreshed."""
        return Block(index=jnp.zeros(slots, jnp.int32), refreshed=jnp.zeros(slots, jnp.bool_))

    def step(self, model: LLaDA, state: DecodeState) -> DecodeState:
        """One denoising step of every live slot."""
        block, capacity = state.memory, state.tokens.shape[1]
        start = state.request.prompt_length + block.index * self.block_length
        end = jnp.minimum(start + self.block_length, state.length)
        offset = jnp.arange(self.block_length)[None]
        window = jnp.where(start[:, None] + offset < end[:, None], start[:, None] + offset, capacity)
        is_open = jnp.take_along_axis(state.masked, window, axis=1, mode="fill", fill_value=False)
        eligible = state.live[:, None] & (window < capacity) & is_open

        seen, state = self._forward(model, state, start, end, jnp.minimum(window, capacity - 1))
        token, confidence, _ = passes.predict(model, state, seen.hidden, window, noisy=self.noisy)
        if self.by_factor:
            rule = commit.factor(confidence, eligible, state.request.factor)
        else:
            rule = commit.threshold(confidence, eligible, state.request.threshold)
        state = commit.write(state, window, token, confidence, rule)

        done = state.live & ~jnp.any(eligible & (rule == Rule.NONE), axis=-1)
        ended = (first_eos(state, self.eos_ids) < capacity) | (end >= state.length)
        return replace(
            state,
            step=state.step + state.live.astype(jnp.int32),
            live=state.live & ~(done & ended),
            memory=Block(
                index=block.index + done.astype(jnp.int32), refreshed=jnp.where(state.live, ~done, block.refreshed)
            ),
        )

    def _forward(
        self, model: LLaDA, state: DecodeState, start: Array, end: Array, wanted: Array
    ) -> tuple[passes.Seen, DecodeState]:
        if self.cache == "none":
            return passes.whole(model, state, state.live, wanted)
        capacity = state.tokens.shape[1]
        last = state.length if self.cache == "prefix" else end
        position = start[:, None] + jnp.arange(self.rows)[None]
        position = jnp.where(position < last[:, None], position, capacity)
        return passes.whole_or_some(model, state, ~state.memory.refreshed, position, wanted)
