"""LLaDA's own sampler."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdllm_jax.decoding import commit, passes
from fdllm_jax.decoding.state import DecodeState, any_of, first_eos
from fdllm_jax.model import LLaDA
from fdllm_jax.pytree import pytree
from fdllm_jax.sampling import Prediction, gumbel, predict, uniform


@pytree
class Block:
    """The current block, and the step within it."""

    index: Int[Array, "slots"]
    step: Int[Array, "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LLaDASampler:
    """Block by block, a quota of the most confident predictions each step; everything is computed anew each time.

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
    noisy: bool

    def memory(self, slots: int) -> Block:
        """At the start: the first step of the first block."""
        return Block(index=jnp.zeros(slots, jnp.int32), step=jnp.zeros(slots, jnp.int32))

    def step(self, model: LLaDA, state: DecodeState) -> DecodeState:
        """One denoising step of every live slot."""
        block = state.memory
        start, length, steps = self._block(state)
        offset = jnp.arange(self.block_length)[None]
        position = start[:, None] + offset
        is_open = jnp.take_along_axis(state.masked, position, axis=1, mode="fill", fill_value=False)
        eligible = state.live[:, None] & (offset < length[:, None]) & is_open

        prediction, state = self._predict(model, state, position)
        confidence = prediction.confidence
        if self.remasking == "random":
            confidence = uniform(state.request.seed, state.step, position)
        confidence = jnp.where(any_of(prediction.token, self.committed_last), -jnp.inf, confidence)
        count = length // steps + (block.step < length % steps).astype(jnp.int32)
        rule = commit.quota(confidence, eligible, count)
        state = commit.write(state, position, prediction.token, prediction.confidence, rule)

        block_done = state.live & (block.step + 1 >= steps)
        ended = (first_eos(state, self.eos_ids) < start + length) | (start + length >= state.length)
        return replace(
            state,
            step=state.step + state.live.astype(jnp.int32),
            live=state.live & ~(block_done & ended),
            memory=Block(
                index=block.index + block_done.astype(jnp.int32),
                step=jnp.where(block_done, 0, block.step + state.live.astype(jnp.int32)),
            ),
        )

    def _block(self, state: DecodeState) -> tuple[Array, Array, Array]:
        """First position of each slot's block, its length, and how many steps it takes."""
        gen_length, steps, index = state.request.gen_length, state.request.steps, state.memory.index
        length = jnp.minimum(self.block_length, gen_length - index * self.block_length)
        blocks = jnp.maximum(1, -(-gen_length // self.block_length))
        block_steps = steps // blocks + (index < steps % blocks).astype(jnp.int32)
        start = state.request.prompt_length + index * self.block_length
        return start, length, jnp.clip(block_steps, 1, jnp.maximum(1, length))

    def _predict(self, model: LLaDA, state: DecodeState, position: Array) -> tuple[Prediction, DecodeState]:
        capacity = state.tokens.shape[1]
        wanted = jnp.minimum(position, capacity - 1)
        seen, state = passes.whole(model, state, state.live, wanted)
        if not self.guided:
            found = passes.predict(
                model, state, seen.hidden, position, noisy=self.noisy, noise_step=state.step, banned=self.banned
            )
            return Prediction(found.token, found.confidence), state
        in_prompt = jnp.arange(capacity)[None] < state.request.prompt_length[:, None]
        tokens = jnp.where(in_prompt, model.config.mask_token_id, state.tokens)
        # Every pass computes every row anew, so that both can use the one cache.
        without_prompt, state = passes.whole(model, state, state.live, wanted, tokens=tokens)
        unconditional = model.logits(without_prompt.hidden)
        scale = state.request.cfg_scale[:, None, None]
        logits = unconditional + (scale + 1) * (model.logits(seen.hidden) - unconditional)
        return self._predict_guided(logits, state, position), state

    def _predict_guided(
        self, logits: Float[Array, "slots window vocab"], state: DecodeState, position: Array
    ) -> Prediction:
        if self.banned:
            logits = logits.at[..., jnp.array(self.banned)].set(-jnp.inf)
        request = state.request
        noise = gumbel(request.seed, state.step, position, logits.shape[-1]) if self.noisy else None
        return predict(logits, noise, request.temperature)
