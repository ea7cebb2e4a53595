"""What an operation refuses, and in which words."""

import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.checks import check_blocks, check_shapes


def test_shapes_that_fit() -> None:
    x, weight = jnp.zeros((3, 4)), jnp.zeros((8, 4))
    check_shapes({"n": 8}, {"x": (x, "rows k"), "weight": (weight, "n k"), "bias": (None, "n"), "four": (x, "rows 4")})
    check_shapes({}, {"x": (jnp.zeros((2, 3, 4)), "2 3 k"), "weight": (weight, "n k")})


@pytest.mark.parametrize(
    ("shape", "sizes", "fault"),
    [
        ((8, 5), {}, r"weight is \[8, 5\]: expected \[n=8, k=4\]"),
        ((7, 4), {"n": 8}, r"weight is \[7, 4\]: expected \[n=8, k=4\]"),
        ((4,), {}, r"weight is \[4\]: expected \[n, k=4\]"),
    ],
)
def test_shapes_that_do_not(shape: tuple[int, ...], sizes: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_shapes(sizes, {"x": (jnp.zeros((3, 4)), "rows k"), "weight": (jnp.zeros(shape), "n k")})


def test_every_fault_is_named() -> None:
    with pytest.raises(ValueError, match=r"a is \[2\]: expected \[3\]; b is .*; there are no rows"):
        check_shapes({"rows": 0}, {"a": (jnp.zeros(2), "3"), "b": (jnp.zeros(1), "rows k")})


WITHOUT_ANNOTATIONS = """
import jax.numpy as jnp
from pallas_kernels import Kernels, gate_up_silu, head_statistics, qkv_rope_cache, scheduled_attention
from pallas_kernels import linear_residual_norm as linear
x, weight, cache = jnp.zeros((5, 16)), jnp.zeros((8, 16)), jnp.zeros((6, 1, 16))
rows, table = jnp.arange(5), jnp.zeros((1, 4), jnp.int32)
calls = {name: lambda name=name: Kernels.all(name) for name in ("auto", "Pallas", None, True)}
calls |= {
    "linear, name": lambda: linear(x, weight, x[:, :8], x[0, :8], eps=1e-5, kernels="foo"),
    "linear, k": lambda: linear(x, weight[:, :15], x[:, :8], x[0, :8], eps=1e-5, kernels="interpret"),
    "linear, residual": lambda: linear(x, weight, x[:1, :8], x[0, :8], eps=1e-5, kernels="interpret"),
    "linear, norm": lambda: linear(x, weight, x[:, :8], x[0, :7], eps=1e-5, kernels="interpret"),
    "gate, odd": lambda: gate_up_silu(x, weight[:7], kernels="interpret"),
    "head, d": lambda: head_statistics(x, weight[:, :8], vocab_size=8, kernels="interpret"),
    "head, vocabulary": lambda: head_statistics(x, weight, vocab_size=9, kernels="interpret"),
    "head, given": lambda: head_statistics(x, weight, vocab_size=8, given=rows[:4], kernels="interpret"),
    "qkv, weight": lambda: qkv_rope_cache(x, jnp.zeros((47, 16)), None, rows, rows, cache, cache, n_heads=1,
                                          rope_theta=1e4, kernels="interpret"),
    "qkv, position": lambda: qkv_rope_cache(x, jnp.zeros((48, 16)), None, rows[:4], rows, cache, cache, n_heads=1,
                                            rope_theta=1e4, kernels="interpret"),
    "attention": lambda: scheduled_attention(x[:, None], cache, cache, table, capacity=4, block_rows=5,
                                             kernels="interpret"),
}
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        assert "expected" in str(error), (name, error)
    else:
        raise AssertionError(name)
"""


def test_every_operation_refuses() -> None:
    """In a process of its own: here annotations are checked as well, and refuse first."""
    subprocess.run([sys.executable, "-c", WITHOUT_ANNOTATIONS], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"capacity": 7}, "18 cache rows, capacity=7, block_rows=4: expected whole slots and blocks"),
        ({"block_rows": 0}, "block_rows=0"),
        ({"q": jnp.zeros((8, 3, 16))}, "3 heads for 2 KV heads: expected a multiple"),
        ({"v_cache": jnp.zeros((18, 2, 8))}, r"v_cache is \[18, 2, 8\]: .*cache_rows=18, kv_heads=2, head_dim=16\]"),
        ({"block_table": jnp.zeros((2, 3), jnp.int32)}, r"block_table is \[2, 3\]: expected \[blocks=2, 4\]"),
        ({"block_table": jnp.zeros((0, 4), jnp.int32)}, "block_table has no block"),
        ({"score_rows": jnp.zeros(7, bool)}, r"score_rows is \[7\]: expected \[rows=8\]"),
        ({"score_rows": jnp.zeros(8, jnp.int32)}, "score_rows is of int32: expected booleans"),
    ],
)
def test_blocks(change: dict[str, Any], fault: str) -> None:
    cache = jnp.zeros((18, 2, 16))
    given: dict[str, Any] = {
        "q": jnp.zeros((8, 4, 16)), "k_cache": cache, "v_cache": cache, "block_table": jnp.zeros((2, 4), jnp.int32),
        "score_rows": None, "capacity": 9, "block_rows": 4,
    }  # fmt: skip
    check_blocks(**given)
    with pytest.raises(ValueError, match=fault):
        check_blocks(**given | change)
