"""The decode state: all that the loop carries, for a fixed number of slots of a fixed capacity."""

from dataclasses import replace
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from fdllm_jax.cache import KVCache, allocate
from fdllm_jax.config import ModelConfig
from fdllm_jax.pytree import pytree
from fdllm_jax.settings import Settings

MOST_STEPS = 2**31 - 1  # more than one a token makes no difference


class Rule(IntEnum):
    """What committed a token."""

    NONE = 0
    QUOTA = 1
    THRESHOLD = 2
    MOST_CONFIDENT = 3


@pytree
class Request:
    """What each slot was asked for. See `Settings` for the fields of the same name."""

    prompt_length: Int[Array, "*slots"]
    gen_length: Int[Array, "*slots"]
    steps: Int[Array, "*slots"]
    threshold: Float[Array, "*slots"]
    temperature: Float[Array, "*slots"]
    cfg_scale: Float[Array, "*slots"]
    seed: UInt32[Array, "*slots"]

    @classmethod
    def of(cls, prompt_length: int, settings: Settings) -> "Request":
        """The request of one prompt of `prompt_length` tokens."""
        return cls(
            prompt_length=jnp.int32(prompt_length),
            gen_length=jnp.int32(settings.gen_length),
            steps=jnp.int32(min(settings.value("steps"), MOST_STEPS)),
            threshold=jnp.float32(settings.value("threshold") or 0),
            temperature=jnp.float32(settings.temperature),
            cfg_scale=jnp.float32(settings.value("cfg_scale") or 0),
            seed=jnp.uint32(settings.seed),
        )


@pytree
class Trace:
    """Per position: the denoising step that committed it (-1: none), by which `Rule`, at what confidence."""

    step: Int[Array, "slots capacity"]
    rule: Int[Array, "slots capacity"]
    confidence: Float[Array, "slots capacity"]


@pytree
class DecodeState:
    """State of S slots of capacity C.

    tokens: prompt, committed tokens and [MASK]s. masked: positions still to be decoded; this, and never a comparison
        with the mask id, says what is open.
    end: decoding stops before this position: prompt + gen_length, or just behind the leftmost committed EOS where the
        method stops there.
    live: slots that are still decoding. A slot that is not live takes part in nothing and does not change.
    block, block_step: LLaDA's current block and the step within it.
    step: denoising steps done. forwards: passes in which the slot had rows.
    """

    tokens: Int[Array, "slots capacity"]
    masked: Bool[Array, "slots capacity"]
    request: Request
    end: Int[Array, "slots"]
    live: Bool[Array, "slots"]
    block: Int[Array, "slots"]
    block_step: Int[Array, "slots"]
    step: Int[Array, "slots"]
    forwards: Int[Array, "slots"]
    trace: Trace
    cache: KVCache

    @property
    def live_kv_length(self) -> Int[Array, "slots"]:
        """Cache rows that a live slot's queries see: prompt + gen_length whatever the end; 0 for other slots."""
        return jnp.where(self.live, self.request.prompt_length + self.request.gen_length, 0)


def empty_state(config: ModelConfig, *, slots: int, capacity: int, dtype: jnp.dtype) -> DecodeState:
    """A state with no live slot."""

    def zeros(dtype: DTypeLike, *shape: int) -> Array:
        return jnp.zeros((slots, *shape), dtype)

    i32, f32 = jnp.int32, jnp.float32
    return DecodeState(
        tokens=zeros(i32, capacity),
        masked=zeros(jnp.bool_, capacity),
        request=Request(
            prompt_length=zeros(i32),
            gen_length=zeros(i32),
            steps=zeros(i32),
            threshold=zeros(f32),
            temperature=zeros(f32),
            cfg_scale=zeros(f32),
            seed=zeros(jnp.uint32),
        ),
        end=zeros(i32),
        live=zeros(jnp.bool_),
        block=zeros(i32),
        block_step=zeros(i32),
        step=zeros(i32),
        forwards=zeros(i32),
        trace=Trace(step=zeros(i32, capacity), rule=zeros(i32, capacity), confidence=zeros(f32, capacity)),
        cache=allocate(config, slots=slots, capacity=capacity, dtype=dtype),
    )


def admit(
    state: DecodeState, slot: Int[Array, ""], prompt: Int[Array, "capacity"], request: Request, mask_token_id: int
) -> DecodeState:
    """Put a request into a slot: `prompt` holds its tokens, then anything. What the slot held before is forgotten."""
    position = jnp.arange(state.tokens.shape[1])
    end = request.prompt_length + request.gen_length
    masked = (position >= request.prompt_length) & (position < end)

    def put(array: Array, value: ArrayLike) -> Array:
        return array.at[slot].set(value)

    return replace(
        state,
        tokens=put(state.tokens, jnp.where(position < request.prompt_length, prompt, mask_token_id)),
        masked=put(state.masked, masked),
        request=jax.tree.map(put, state.request, request),
        end=put(state.end, end),
        live=put(state.live, True),
        block=put(state.block, 0),
        block_step=put(state.block_step, 0),
        step=put(state.step, 0),
        forwards=put(state.forwards, 0),
        trace=Trace(
            step=put(state.trace.step, -1),
            rule=put(state.trace.rule, Rule.NONE),
            confidence=put(state.trace.confidence, 0.0),
        ),
    )
