"""Commit rules on hand-made cases."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdllm_jax.decoding import commit
from fdllm_jax.decoding.state import Rule

INF = float("inf")


@pytest.mark.parametrize(
    ("confidence", "eligible", "count", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.7], [1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([0.1, 0.9, 0.5, 0.7], [1, 0, 1, 1], 2, [0, 0, 1, 1]),
        ([0.5, 0.5, 0.5, 0.5], [1, 1, 1, 1], 3, [1, 1, 1, 0]),  # ties to the lower position
        ([-INF, 0.2, -INF, 0.1], [1, 1, 1, 0], 2, [1, 1, 0, 0]),  # -inf is still eligible, last
        ([0.3, 0.2, 0.4, 0.1], [0, 0, 0, 0], 2, [0, 0, 0, 0]),
        ([0.3, 0.2, 0.4, 0.1], [1, 1, 0, 0], 4, [1, 1, 0, 0]),
        ([0.3, 0.2, 0.4, 0.1], [1, 1, 1, 1], 0, [0, 0, 0, 0]),
    ],
)
def test_quota(confidence: list[float], eligible: list[int], count: int, expected: list[int]) -> None:
    given = jnp.array([confidence, confidence[::-1]]), jnp.array([eligible, eligible], bool)
    assert np.asarray(commit.quota(*given, jnp.array([count, 0])) != Rule.NONE)[0].tolist() == [
        bool(x) for x in expected
    ]
    assert not np.asarray(commit.quota(*given, jnp.array([count, 0])) != Rule.NONE)[1].any()


@pytest.mark.parametrize(
    ("confidence", "eligible", "level", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.95], [1, 1, 1, 1], 0.9, [0, 1, 0, 1]),  # the level itself passes
        ([0.1, 0.9, 0.5, 0.95], [1, 0, 1, 0], 0.9, [0, 0, 1, 0]),  # none passes: the most confident
        ([0.4, 0.4, 0.4, 0.4], [0, 1, 1, 1], 0.9, [0, 1, 0, 0]),  # ties to the lower position
        ([0.4, 0.4, 0.4, 0.4], [0, 0, 0, 0], 0.9, [0, 0, 0, 0]),
        ([0.4, 1.0, 0.4, 0.4], [1, 1, 1, 1], 1.0, [0, 1, 0, 0]),
    ],
)
def test_threshold(confidence: list[float], eligible: list[int], level: float, expected: list[int]) -> None:
    given = jnp.array([confidence], jnp.float32), jnp.array([eligible], bool), jnp.array([level], jnp.float32)
    rule = np.asarray(commit.threshold(*given))[0]
    assert (rule != Rule.NONE).tolist() == [bool(x) for x in expected]
