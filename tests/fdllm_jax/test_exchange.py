"""What goes to the device and comes back is what was sent."""

from dataclasses import fields

import jax.numpy as jnp
import numpy as np
from flax import nnx

import convert
from fdllm_jax import exchange
from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding.methods import method_of
from fdllm_jax.decoding.state import DecodeState, Request
from fdllm_jax.engine import SHIPPED
from fdllm_jax.model import from_parameters
from fdllm_jax.settings import Settings
from pallas_kernels import XLA

SETTINGS = Settings(threshold=0.7, gamma=0.55, gen_length=9, temperature=0.3, seed=2**32 - 1)


def empty() -> tuple[ModelConfig, DecodeState]:
    config, _ = convert.load(SHIPPED)
    method = method_of(SETTINGS, eos_ids=())
    return config, exchange.empty(config=config, slots=3, capacity=16, dtype=jnp.dtype("float32"), method=method)


def test_the_slots_are_as_ordered_and_reported() -> None:
    config, state = empty()
    method = method_of(SETTINGS, eos_ids=())
    graphdef, parameters = nnx.split(
        from_parameters(config, convert.load(SHIPPED, dtype=jnp.dtype("float32"))[1], kernels=XLA)
    )
    orders = exchange.Orders(3, 16)
    orders.admit(1, exchange.admission([5, 7, 9], SETTINGS))
    orders.admit(2, exchange.admission([5], SETTINGS))

    def advance(state: DecodeState, orders: exchange.Orders, steps: int) -> tuple[DecodeState, exchange.Report]:
        model = {"graphdef": graphdef, "method": method, "mask_token_id": config.mask_token_id}
        state, packed = exchange.advance(parameters, state, orders.array, np.array([1, steps], np.int32), **model)
        return state, exchange.Report.of(packed)

    state, seen = advance(state, orders, 0)
    for name in (field.name for field in fields(Request)):
        expected, found = (getattr(request, name) for request in (Request.of(3, SETTINGS), state.request))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found[1], expected, name)
    assert seen.live.tolist() == [False, True, True]
    assert seen.tokens[1].tolist() == [5, 7, 9, *[config.mask_token_id] * 13]
    assert np.flatnonzero(seen.masked[1]).tolist() == list(range(3, 12))

    orders = exchange.Orders(3, 16)
    orders.end([2])
    state, seen = advance(state, orders, 1)
    assert seen.live.tolist() == [False, True, False] and seen.step.tolist() == [0, 1, 0]
    trace = state.trace
    known = np.array([([*row, True]).index(True) for row in state.masked.tolist()], np.int32)
    by_slot = (state.live, state.step, state.forwards, known)
    by_position = (state.tokens, state.masked, trace.step, trace.rule, trace.confidence)
    for found, expected in zip(seen, (*by_slot, *by_position), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
