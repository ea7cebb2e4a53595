"""The methods: small frozen objects, static in the compiled program, that the loop asks four things.

* `window(state)`: the positions whose logits this step computes, and which of them it may commit.
* `commit(state, window, prediction)`: what of the window is committed, and by which `Rule`: two [slots, window] arrays.
* `advance(state)`: bookkeeping after the commits; ends the slots that are done.
* `guided` (a second, unconditional forward each step), `stepwise_noise` (a position's Gumbel noise is drawn anew in
  every step) and `banned` (ids that are never predicted).

The methods here refresh everything in every step, so that they are exact; they need no verify pass.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdllm_jax.decoding import commit
from fdllm_jax.decoding.state import DecodeState, Rule
from fdllm_jax.sampling import Prediction, uniform
from fdllm_jax.settings import Settings


class Window(NamedTuple):
    """Positions whose logits a step computes, and which of them it may commit. `position` may exceed the capacity."""

    position: Int[Array, "slots window"]
    eligible: Bool[Array, "slots window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LLaDASampler:
    """LLaDA's own sampler: block by block, a quota of the most confident predictions each step.

    Source: LLaDA's `generate` (arXiv 2502.09992, appendix B.4). A block's steps are floor(steps / blocks), one more in
    the first steps mod blocks; its masked positions are spread over them, the remainder first; steps whose quota would
    be 0 are left out. Generation stops after the block in which an EOS stands.
    """

    block_length: int
    remasking: str
    guided: bool
    banned: tuple[int, ...]
    committed_last: tuple[int, ...]
    eos_ids: tuple[int, ...]
    stepwise_noise: bool = True

    def _block(self, state: DecodeState) -> tuple[Array, Array, Array]:
        """First position of each slot's block, its length, and how many steps it takes."""
        gen_length, steps = state.request.gen_length, state.request.steps
        length = jnp.minimum(self.block_length, gen_length - state.block * self.block_length)
        blocks = jnp.maximum(1, -(-gen_length // self.block_length))
        block_steps = steps // blocks + (state.block < steps % blocks).astype(jnp.int32)
        start = state.request.prompt_length + state.block * self.block_length
        return start, length, jnp.clip(block_steps, 1, jnp.maximum(1, length))

    def window(self, state: DecodeState) -> Window:
        """The current block."""
        start, length, _ = self._block(state)
        offset = jnp.arange(self.block_length)[None]
        position = start[:, None] + offset
        return Window(position, (offset < length[:, None]) & _masked_at(state, position))

    def commit(self, state: DecodeState, window: Window, prediction: Prediction) -> tuple[Array, Array]:
        """The quota of this step of the block."""
        _, length, steps = self._block(state)
        count = length // steps + (state.block_step < length % steps).astype(jnp.int32)
        confidence = prediction.confidence
        if self.remasking == "random":
            confidence = uniform(state.request.seed, state.step, window.position)
        confidence = jnp.where(_any_of(prediction.token, self.committed_last), -jnp.inf, confidence)
        committed = commit.quota(confidence, window.eligible, count)
        return committed, jnp.where(committed, Rule.QUOTA, Rule.NONE)

    def advance(self, state: DecodeState) -> DecodeState:
        """Next step or block; ends after the block in which an EOS stands."""
        start, length, steps = self._block(state)
        block_done = state.live & (state.block_step + 1 >= steps)
        ended = (first_eos(state, self.eos_ids) < start + length) | (
            start + length >= state.request.prompt_length + state.request.gen_length
        )
        return replace(
            state,
            block=state.block + block_done.astype(jnp.int32),
            block_step=jnp.where(block_done, 0, state.block_step + state.live.astype(jnp.int32)),
            live=state.live & ~(block_done & ended),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSampler:
    """Threshold decoding over a sliding window: the first `block_length` masked positions before the end.

    Source: the draft rule of Flash-dLLM (arXiv 2609.26796) with full passes. Ends before the position behind the
    leftmost committed EOS.
    """

    block_length: int
    eos_ids: tuple[int, ...]
    guided: bool = False
    stepwise_noise: bool = False
    banned: tuple[int, ...] = ()

    def window(self, state: DecodeState) -> Window:
        """The first `block_length` masked positions before the end."""
        capacity = state.tokens.shape[1]
        open_ = state.masked & (jnp.arange(capacity)[None] < state.end[:, None])

        def first_open(row: Array) -> Array:
            return jnp.nonzero(row, size=self.block_length, fill_value=capacity)[0].astype(jnp.int32)

        position = jax.vmap(first_open)(open_)
        return Window(position, position < capacity)

    def commit(self, state: DecodeState, window: Window, prediction: Prediction) -> tuple[Array, Array]:
        """Everything from the threshold on, at least one."""
        level = state.request.threshold
        committed = commit.threshold(prediction.confidence, window.eligible, level)
        rule = jnp.where(prediction.confidence >= level[:, None], Rule.THRESHOLD, Rule.MOST_CONFIDENT)
        return committed, jnp.where(committed, rule, Rule.NONE)

    def advance(self, state: DecodeState) -> DecodeState:
        """The end moves up to a committed EOS; a slot with nothing open before it is done."""
        end = jnp.minimum(state.end, first_eos(state, self.eos_ids) + 1)
        is_open = state.masked & (jnp.arange(state.tokens.shape[1])[None] < end[:, None])
        return replace(state, end=jnp.where(state.live, end, state.end), live=state.live & jnp.any(is_open, axis=-1))


Method = LLaDASampler | ThresholdSampler


def method_of(settings: Settings, *, eos_ids: tuple[int, ...], longest: int | None = None) -> Method:
    """The method that `settings` name.

    eos_ids: the EOS id first, then other ids that end a text. longest: the largest gen_length of the requests that
    share the method (that of `settings` when None); no window is wider.
    """
    block_length = min(settings.block_length, longest or settings.gen_length)
    if settings.method == "threshold":
        return ThresholdSampler(block_length=block_length, eos_ids=eos_ids)
    return LLaDASampler(
        block_length=block_length,
        remasking=settings.value("remasking"),
        guided=settings.value("cfg_scale") > 0,
        banned=eos_ids[:1] if settings.value("logits_eos_inf") else (),
        committed_last=eos_ids if settings.value("confidence_eos_eot_inf") else (),
        eos_ids=eos_ids,
    )


def first_eos(state: DecodeState, eos_ids: tuple[int, ...]) -> Int[Array, "slots"]:
    """Position of the leftmost committed EOS of the response; the capacity where there is none."""
    capacity = state.tokens.shape[1]
    position = jnp.arange(capacity)[None]
    response = (position >= state.request.prompt_length[:, None]) & (position < state.live_kv_length[:, None])
    is_eos = response & ~state.masked & _any_of(state.tokens, eos_ids)
    return jnp.min(jnp.where(is_eos, position, capacity), axis=-1)


def _masked_at(state: DecodeState, position: Array) -> Array:
    return jnp.take_along_axis(state.masked, position, axis=1, mode="fill", fill_value=False)


def _any_of(token: Array, ids: tuple[int, ...]) -> Array:
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros(token.shape, jnp.bool_)
