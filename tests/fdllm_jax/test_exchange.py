"""What goes to the device and comes back is what was sent."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import convert
from fdllm_jax import exchange
from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding.methods import method_of
from fdllm_jax.decoding.state import DecodeState, Request
from fdllm_jax.engine import SHIPPED
from fdllm_jax.settings import Settings

SETTINGS = Settings(threshold=0.7, gamma=0.55, gen_length=9, temperature=0.3, seed=2**32 - 1)


def empty() -> tuple[ModelConfig, DecodeState]:
    config, _ = convert.load(SHIPPED)
    method = method_of(SETTINGS, eos_ids=())
    return config, exchange.empty(config=config, slots=3, capacity=16, dtype=jnp.dtype("float32"), method=method)


def test_an_admission_is_the_request() -> None:
    config, state = empty()
    packed = exchange.admission(1, [5, 7, 9], SETTINGS, 16)
    state = exchange.admit(state, packed, method=method_of(SETTINGS, eos_ids=()), mask_token_id=config.mask_token_id)
    for name, expected in vars_of(Request.of(3, SETTINGS)).items():
        found = getattr(state.request, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found[1], expected, name)
    assert np.asarray(state.live).tolist() == [False, True, False]
    assert np.asarray(state.tokens[1]).tolist() == [5, 7, 9, *[config.mask_token_id] * 13]
    assert np.flatnonzero(state.masked[1]).tolist() == list(range(3, 12))


def test_what_is_read_is_the_state() -> None:
    _, state = empty()
    rng = np.random.default_rng()
    state = replace(
        state,
        tokens=jnp.asarray(rng.integers(-(2**31), 2**31, (3, 16)), jnp.int32),
        masked=jnp.asarray(rng.random((3, 16)) < 0.5),
        step=jnp.arange(3, dtype=jnp.int32),
        trace=replace(state.trace, confidence=jnp.asarray(rng.normal(size=(3, 16)), jnp.float32)),
    )
    for found, expected in zip(
        jax.tree.leaves(exchange.read(state)),
        jax.tree.leaves((state.tokens, state.masked, state.step, state.forwards, state.trace)),
        strict=True,
    ):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def vars_of(request: Request) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(request, name)) for name in Request.__slots__}
