"""The decode state: all that the loop carries, for a fixed number of slots of a fixed capacity."""

from dataclasses import field, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    VERIFIED = 4
    BONUS = 5
    PLAIN = 6
    FACTOR = 7


@pytree
class Request:
    """What each slot was asked for. See `Settings` for the fields of the same name."""

    prompt_length: Int[Array, "*slots"]
    gen_length: Int[Array, "*slots"]
    steps: Int[Array, "*slots"]
    threshold: Float[Array, "*slots"]
    factor: Float[Array, "*slots"]
    gamma: Float[Array, "*slots"]
    plain_threshold: Float[Array, "*slots"]
    max_deviation: Float[Array, "*slots"]
    temperature: Float[Array, "*slots"]
    cfg_scale: Float[Array, "*slots"]
    seed: UInt32[Array, "*slots"]

    @classmethod
    def of(cls, prompt_length: int, settings: Settings) -> "Request":
        """One prompt's request, as NumPy's numbers: one call takes them to the device."""

        def number(name: str, otherwise: float) -> Any:
            value = settings.value(name)
            return np.float32(otherwise if value is None else value)

        numbers: dict[str, Any] = {
            "prompt_length": np.int32(prompt_length),
            "gen_length": np.int32(settings.gen_length),
            "steps": np.int32(min(settings.value("steps") or settings.gen_length, MOST_STEPS)),
            "threshold": number("threshold", 0.0),
            "factor": number("factor", 0.0),
            "gamma": number("gamma", 0.0),
            "plain_threshold": number("plain_threshold", np.inf),
            "max_deviation": number("max_deviation", 1.0),
            "temperature": np.float32(settings.temperature),
            "cfg_scale": number("cfg_scale", 0.0),
            "seed": np.uint32(settings.seed),
        }
        return cls(**numbers)


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
    step: denoising steps done. forwards: passes in which the slot had rows.
    memory: what the method keeps between steps, a pytree of its own with a leading axis of slots.
    narrow: rows of a pass over whole sequences that are no longer, where that is worth a pass of its own; or None.
    """

    tokens: Int[Array, "slots capacity"]
    masked: Bool[Array, "slots capacity"]
    request: Request
    end: Int[Array, "slots"]
    live: Bool[Array, "slots"]
    step: Int[Array, "slots"]
    forwards: Int[Array, "slots"]
    trace: Trace
    cache: KVCache
    memory: Any
    narrow: int | None = field(default=None, metadata={"static": True})

    @property
    def length(self) -> Int[Array, "slots"]:
        """Tokens of prompt and response."""
        return self.request.prompt_length + self.request.gen_length

    @property
    def live_kv_length(self) -> Int[Array, "slots"]:
        """Cache rows that a live slot's queries see: prompt + gen_length whatever the end; 0 for other slots."""
        return jnp.where(self.live, self.length, 0)


def empty_state(
    config: ModelConfig, *, slots: int, capacity: int, dtype: jnp.dtype, memory: Any, narrow: int | None = None
) -> DecodeState:
    """A state with no live slot. memory: the method's, as at the start. narrow: see `passes.narrower`."""

    def zeros(dtype: DTypeLike, *shape: int) -> Array:
        return jnp.zeros((slots, *shape), dtype)

    i32, f32 = jnp.int32, jnp.float32
    return DecodeState(
        tokens=zeros(i32, capacity),
        masked=zeros(jnp.bool_, capacity),
        request=jax.tree.map(lambda x: zeros(x.dtype), Request.of(0, Settings())),
        end=zeros(i32),
        live=zeros(jnp.bool_),
        step=zeros(i32),
        forwards=zeros(i32),
        trace=Trace(step=zeros(i32, capacity), rule=zeros(i32, capacity), confidence=zeros(f32, capacity)),
        cache=allocate(config, slots=slots, capacity=capacity, dtype=dtype),
        memory=memory,
        narrow=narrow,
    )


def admit(
    state: DecodeState,
    which: Bool[Array, "slots"],
    prompt: Int[Array, "slots capacity"],
    request: Request,
    memory: Any,
    mask_token_id: int,
) -> DecodeState:
    """Put requests into the slots `which`: `prompt` holds their tokens, then anything. What they held is forgotten.

    memory: the method's, as at the start. What stands in the other slots' rows means nothing.
    """
    position = jnp.arange(state.tokens.shape[1])[None]
    start, end = request.prompt_length[:, None], (request.prompt_length + request.gen_length)[:, None]

    def put(new: ArrayLike, old: Array) -> Array:
        return jnp.where(which.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    return replace(
        state,
        tokens=put(jnp.where(position < start, prompt, mask_token_id), state.tokens),
        masked=put((position >= start) & (position < end), state.masked),
        request=jax.tree.map(put, request, state.request),
        end=put(end[:, 0], state.end),
        live=state.live | which,
        step=put(0, state.step),
        forwards=put(0, state.forwards),
        trace=Trace(
            step=put(-1, state.trace.step),
            rule=put(jnp.int32(Rule.NONE), state.trace.rule),
            confidence=put(0.0, state.trace.confidence),
        ),
        memory=jax.tree.map(put, memory, state.memory),
    )


def finish(state: DecodeState) -> DecodeState:
    """After a step: a slot with nothing open before its end is done."""
    is_open = state.masked & (jnp.arange(state.tokens.shape[1])[None] < state.end[:, None])
    return replace(state, step=state.step + state.live.astype(jnp.int32), live=state.live & jnp.any(is_open, axis=-1))


def open_before(state: DecodeState, end: Int[Array, "slots"], count: int) -> Int[Array, "slots count"]:
    """The first `count` masked positions before `end`, left to right, then the capacity."""
    is_open = state.masked & (jnp.arange(state.tokens.shape[1])[None] < end[:, None])
    so_far = jnp.cumsum(is_open, axis=1, dtype=jnp.int32)
    # The position of number n has as many positions before it as there are with at most n open ones up to them.
    return jnp.sum(so_far[:, None] <= jnp.arange(count)[None, :, None], axis=2, dtype=jnp.int32)


def first_eos(state: DecodeState, eos_ids: tuple[int, ...]) -> Int[Array, "slots"]:
    """Position of the leftmost committed EOS of the response; the capacity where there is none."""
    capacity = state.tokens.shape[1]
    position = jnp.arange(capacity)[None]
    response = (position >= state.request.prompt_length[:, None]) & (position < state.length[:, None])
    is_eos = response & ~state.masked & any_of(state.tokens, eos_ids)
    return jnp.min(jnp.where(is_eos, position, capacity), axis=-1)


def any_of(token: Int[Array, "*any"], ids: tuple[int, ...]) -> Bool[Array, "*any"]:
    """Where the token is one of `ids`."""
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros(token.shape, jnp.bool_)
