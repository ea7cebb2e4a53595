"""Decoding below the engine: token ids in, the final decode state out."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import convert
from fdllm_jax.decoding.loop import run
from fdllm_jax.decoding.methods import method_of
from fdllm_jax.decoding.state import DecodeState, Request, admit, empty_state
from fdllm_jax.model import LLaDA, from_parameters
from fdllm_jax.settings import Settings
from pallas_kernels import choose

_admit = partial(jax.jit, static_argnames="mask_token_id")(admit)


def load(directory: Path, dtype: jnp.dtype | None = None, kernels: str = "xla") -> LLaDA:
    """The model of a checkpoint directory."""
    config, parameters = convert.load(directory, dtype=dtype)
    return from_parameters(config, parameters, kernels=choose(kernels))


def empty(model: LLaDA, slots: int, capacity: int, settings: Settings) -> DecodeState:
    """A state with no live slot, in the model's dtype, for the settings' method."""
    memory = method_of(settings, eos_ids=()).memory(slots)
    return empty_state(model.config, slots=slots, capacity=capacity, dtype=model.embedding[...].dtype, memory=memory)


def put(model: LLaDA, state: DecodeState, slot: int, prompt: Sequence[int], settings: Settings) -> DecodeState:
    """The state with a request in a slot; the prompt's padding is arbitrary on purpose."""
    row = np.random.default_rng(len(prompt)).integers(0, model.config.vocab_size, state.tokens.shape[1])
    row[: len(prompt)] = prompt
    request = Request.of(len(prompt), settings)
    memory = method_of(settings, eos_ids=()).memory(len(state.live))
    return _admit(state, *for_slot(state, slot, row, request), memory, mask_token_id=model.config.mask_token_id)


def for_slot(state: DecodeState, slot: int, prompt: np.ndarray, request: Request) -> tuple[np.ndarray, Any, Any]:
    """What `admit` takes to put one request into one slot."""
    slots = len(state.live)
    return np.arange(slots) == slot, *jax.tree.map(lambda x: np.stack([x] * slots), (prompt.astype(np.int32), request))


def decode(model: LLaDA, state: DecodeState, settings: Settings, eos_ids: tuple[int, ...]) -> DecodeState:
    """Run until no slot is live."""
    graphdef, parameters = nnx.split(model)
    method = method_of(settings, eos_ids=eos_ids)
    while bool(jnp.any(state.live)):
        state = run(parameters, state, jnp.int32(10_000), graphdef=graphdef, method=method)
    return state


def response(state: DecodeState, slot: int) -> dict[str, list]:
    """What a slot holds between the prompt and prompt + gen_length."""
    start = int(state.request.prompt_length[slot])
    place = slice(start, start + int(state.request.gen_length[slot]))
    return {
        "tokens": np.asarray(state.tokens[slot, place]).tolist(),
        "masked": np.asarray(state.masked[slot, place]).tolist(),
        "rule": np.asarray(state.trace.rule[slot, place]).tolist(),
        "step": np.asarray(state.trace.step[slot, place]).tolist(),
        "confidence": np.asarray(state.trace.confidence[slot, place]).tolist(),
    }
