"""What passes between host and device: one call and one array each way, since each costs as much as a small step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding.loop import run
from fdllm_jax.decoding.methods import Method
from fdllm_jax.decoding.state import DecodeState, Request, admit, empty_state
from fdllm_jax.settings import Settings

# Of a slot: what is to become of it.
NOTHING, ADMIT, END = range(3)
_REQUEST, _STRUCTURE = jax.tree.flatten(Request.of(0, Settings()))


class Orders:
    """The host's orders to all slots, as int32: of each what to do, the bits of a request's numbers, and a prompt."""

    def __init__(self, slots: int, capacity: int):
        self.array = np.zeros((slots, 1 + len(_REQUEST) + capacity), np.int32)

    def admit(self, slot: int, order: np.ndarray) -> None:
        """Put a request into a slot: an `admission`."""
        self.array[slot, : len(order)] = order

    def end(self, slots: Sequence[int]) -> None:
        """Decode no further in some slots."""
        self.array[slots, 0] = END


def admission(prompt: Sequence[int], settings: Settings) -> np.ndarray:
    """The order that admits a request; it can be made before there is a slot for it."""
    bits = [number.view(np.int32) for number in jax.tree.leaves(Request.of(len(prompt), settings))]
    return np.array([ADMIT, *bits, *prompt], np.int32)


class Report(NamedTuple):
    """What the device says of all slots; see `DecodeState` and `Trace` for the fields.

    known: positions before the first masked one; all, if none is masked.
    """

    live: np.ndarray
    step: np.ndarray
    forwards: np.ndarray
    known: np.ndarray
    tokens: np.ndarray
    masked: np.ndarray
    step_of: np.ndarray
    rule_of: np.ndarray
    confidence_of: np.ndarray

    @classmethod
    def of(cls, packed: Array) -> Self:
        """The report that `advance` packed."""
        by_slot, by_position = np.split(np.asarray(packed), [4], axis=1)
        live, step, forwards, known = by_slot.T
        tokens, masked, step_of, rule_of, confidence_of = np.split(by_position, 5, axis=1)
        return cls(
            live != 0, step, forwards, known, tokens, masked != 0, step_of, rule_of,
            np.ascontiguousarray(confidence_of).view(np.float32),
        )  # fmt: skip


@partial(jax.jit, static_argnames=("config", "slots", "capacity", "dtype", "method", "narrow"))
def empty(
    *, config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype, method: Method, narrow: int | None = None
) -> DecodeState:
    """A state with no live slot, made on the device."""
    memory = method.memory(slots)
    return empty_state(config, slots=slots, capacity=capacity, dtype=dtype, memory=memory, narrow=narrow)


@partial(jax.jit, static_argnames=("graphdef", "method", "mask_token_id"), donate_argnames="state")
def advance(
    parameters: nnx.State,
    state: DecodeState,
    orders: Int[Array, "slots order"],
    until: Int[Array, "2"],
    *,
    graphdef: nnx.GraphDef,
    method: Method,
    mask_token_id: int,
) -> tuple[DecodeState, Int[Array, "slots report"]]:
    """Obey the orders (`Orders.array`), then `run` until so many slots have finished, for so many steps at most.

    Returns the state, and what a `Report` is made of. The state is donated.
    """
    what, bits, prompt = orders[:, 0], orders[:, 1 : 1 + len(_REQUEST)], orders[:, 1 + len(_REQUEST) :]
    numbers = [jax.lax.bitcast_convert_type(bits[:, i], like.dtype) for i, like in enumerate(_REQUEST)]
    request = jax.tree.unflatten(_STRUCTURE, numbers)
    state = replace(state, live=state.live & (what != END))
    state = admit(state, what == ADMIT, prompt, request, method.memory(len(what)), mask_token_id)
    state = run(parameters, state, until[1], until[0], graphdef=graphdef, method=method)
    trace = state.trace
    known = jnp.where(jnp.any(state.masked, axis=1), jnp.argmax(state.masked, axis=1), state.masked.shape[1])
    by_slot = jnp.stack([state.live.astype(jnp.int32), state.step, state.forwards, known], axis=1)
    confidence = jax.lax.bitcast_convert_type(trace.confidence, jnp.int32)
    by_position = [state.tokens, state.masked.astype(jnp.int32), trace.step, trace.rule, confidence]
    return state, jnp.concatenate([by_slot, *by_position], axis=1)
