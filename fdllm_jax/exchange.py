"""What passes between host and device: one array each way for a sequence, since every transfer costs a small step."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding import state as decode_state
from fdllm_jax.decoding.methods import Method
from fdllm_jax.decoding.state import DecodeState, Request, Trace
from fdllm_jax.settings import Settings


class Seen(NamedTuple):
    """What the host reads of a state; see `DecodeState` for the fields."""

    tokens: np.ndarray
    masked: np.ndarray
    step: np.ndarray
    forwards: np.ndarray
    trace: Trace


@partial(jax.jit, static_argnames=("config", "slots", "capacity", "dtype", "method"))
def empty(*, config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype, method: Method) -> DecodeState:
    """A state with no live slot, made on the device."""
    memory = method.memory(slots)
    return decode_state.empty_state(config, slots=slots, capacity=capacity, dtype=dtype, memory=memory)


def admission(slot: int, prompt: Sequence[int], settings: Settings, capacity: int) -> np.ndarray:
    """A request for a slot as int32: the slot, the bits of the request's numbers, the prompt in `capacity` tokens."""
    numbers = jax.tree.leaves(Request.of(len(prompt), settings))
    bits = [number.view(np.int32) for number in numbers]
    return np.array([slot, *bits, *prompt, *[0] * (capacity - len(prompt))], np.int32)


@partial(jax.jit, static_argnames=("method", "mask_token_id"), donate_argnames="state")
def admit(state: DecodeState, admission: jax.Array, *, method: Method, mask_token_id: int) -> DecodeState:
    """Put the request of an `admission` into its slot."""
    likes, structure = jax.tree.flatten(Request.of(0, Settings()))
    slot, bits, prompt = jnp.split(admission, [1, 1 + len(likes)])
    numbers = [jax.lax.bitcast_convert_type(bits[i], like.dtype) for i, like in enumerate(likes)]
    request = jax.tree.unflatten(structure, numbers)
    return decode_state.admit(state, slot[0], prompt, request, method.memory(1), mask_token_id)


def read(state: DecodeState) -> Seen:
    """What the host needs of all slots."""
    seen = Seen(state.tokens, state.masked, state.step, state.forwards, state.trace)
    parts = np.split(np.asarray(_bits(seen)), np.cumsum([array.size for array in jax.tree.leaves(seen)]))

    def of_host(array: jax.Array) -> np.ndarray:
        bits = parts.pop(0).reshape(array.shape)
        return bits.astype(np.bool_) if array.dtype == np.bool_ else bits.view(array.dtype)

    return jax.tree.map(of_host, seen)


@jax.jit
def _bits(tree: Any) -> jax.Array:
    """Arrays of 32-bit numbers and of booleans, one after the other as int32."""

    def bits(array: jax.Array) -> jax.Array:
        is_bool = array.dtype == jnp.bool_
        return (array.astype(jnp.int32) if is_bool else jax.lax.bitcast_convert_type(array, jnp.int32)).reshape(-1)

    return jnp.concatenate([bits(array) for array in jax.tree.leaves(tree)])
