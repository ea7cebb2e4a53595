"""Threshold decoding over a sliding window, without a cached row that outlives a step."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from fdllm_jax.decoding import commit, passes
from fdllm_jax.decoding.state import DecodeState, Rule, finish, open_before
from fdllm_jax.model import LLaDA


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSampler:
    """Commits what reaches the threshold among the first `block_length` masked positions before the end.

    Source: the draft rule of Flash-dLLM (arXiv 2609.26796) with full passes. Ends before the position behind the
    leftmost committed EOS.
    """

    block_length: int
    eos_ids: tuple[int, ...]
    noisy: bool

    def memory(self, slots: int) -> tuple[()]:
        """Nothing."""
        return ()

    def step(self, model: LLaDA, state: DecodeState) -> DecodeState:
        """One denoising step of every live slot."""
        position = open_before(state, state.end, self.block_length)
        capacity = state.tokens.shape[1]
        seen, state = passes.whole(model, state, state.live, jnp.minimum(position, capacity - 1))
        token, confidence, _ = passes.predict(model, state, seen.hidden, position, noisy=self.noisy)
        eligible = state.live[:, None] & (position < capacity)
        rule = commit.threshold(confidence, eligible, state.request.threshold)
        state = commit.write(state, position, token, confidence, rule)
        end = commit.end_at_eos(state.end, position, token, rule != Rule.NONE, self.eos_ids)
        return finish(replace(state, end=end))
