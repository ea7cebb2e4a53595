"""The few-row matmuls: kernel (interpreted, lowered, on a GPU) against the XLA reference, and that against NumPy."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import (
    GATE_UP_SILU,
    LINEAR_RESIDUAL,
    _gate_up_silu_pallas,
    _linear_parts_pallas,
    gate_up_silu,
    linear_residual_norm,
)
from pallas_kernels.rms_norm import add_and_norm_pallas
from pallas_kernels.weight_product import Tiles, tiles_for
from tests.pallas_kernels.lowering import lower_for_cuda

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
DTYPES = list(TOLERANCE)


class Shape(NamedTuple):
    rows: int
    k: int
    n: int


# Row counts beside tile borders; k and n that are multiples of the tile, and not.
SHAPES = [Shape(1, 64, 16), Shape(16, 256, 64), Shape(17, 40, 70), Shape(33, 300, 96)]


def normal(rng: np.random.Generator, dtype: str, *size: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.standard_normal(size) * scale, dtype)


def distance(value: Any, expected: Any) -> float:
    """|value - expected| / |expected|, Euclidean norms, the largest of several; NaN is an error of infinity."""
    if isinstance(value, tuple):
        return max(distance(*pair) for pair in zip(value, expected, strict=True))
    assert value.shape == expected.shape
    found = np.linalg.norm(np.asarray(value, np.float64) - expected) / np.linalg.norm(expected)
    return float(found) if np.isfinite(found) else np.inf


def linear_arguments(shape: Shape, dtype: str, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    rows, k, n = shape
    x, weight = normal(rng, dtype, rows, k), normal(rng, dtype, n, k, scale=k**-0.5)
    return x, weight, normal(rng, dtype, rows, n), normal(rng, dtype, n)


def gate_up_arguments(shape: Shape, dtype: str, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    rows, k, n = shape
    return normal(rng, dtype, rows, k), normal(rng, dtype, 2 * n, k, scale=k**-0.5)


def linear_by_numpy(x, weight, residual, norm) -> tuple[np.ndarray, np.ndarray]:
    new = np.asarray(residual, np.float64) + np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return new, new / np.sqrt(np.mean(new**2, axis=1, keepdims=True) + EPS) * np.asarray(norm, np.float64)


def gate_up_by_numpy(x, weight) -> np.ndarray:
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


EPS = 0.01
linear = partial(linear_residual_norm, eps=EPS)
OPS = {
    "linear_residual_norm": (linear, linear_arguments, linear_by_numpy),
    "gate_up_silu": (gate_up_silu, gate_up_arguments, gate_up_by_numpy),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_both_are_the_definition(op: str, shape: Shape, dtype: str):
    function, arguments, by_numpy = OPS[op]
    values = arguments(shape, dtype, np.random.default_rng())
    expected = by_numpy(*values)
    reference, kernel = function(*values), function(*values, kernels="interpret")
    assert {x.dtype for x in jax.tree.leaves((reference, kernel))} == {jnp.dtype(dtype)}
    assert distance(reference, expected) < TOLERANCE[dtype]
    assert distance(kernel, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [Shape(40, 200, 50), Shape(32, 256, 64)])
def test_splits_do_not_matter(shape: Shape, splits: int):
    values = linear_arguments(shape, "float32", np.random.default_rng())
    tiles = Tiles(rows=16, columns=32, inner=32, splits=splits)
    parts = _linear_parts_pallas(*values[:2], tiles=tiles, interpret=True)
    for rows in (1, 16):
        actual = add_and_norm_pallas(parts, *values[2:], eps=EPS, interpret=True, tile=rows)
        assert distance(actual, linear_by_numpy(*values)) < 1e-5


@pytest.mark.parametrize("columns", [16, 64, 256])
def test_columns_do_not_matter(columns: int):
    values = gate_up_arguments(Shape(20, 96, 72), "float32", np.random.default_rng())
    tiles = Tiles(rows=16, columns=columns, inner=32)
    actual = _gate_up_silu_pallas(*values, tiles=tiles, interpret=True)
    assert distance(actual, gate_up_by_numpy(*values)) < 1e-5


def test_silu_of_large_values():
    x, weight = jnp.eye(2, 16) * jnp.float32(200), jnp.zeros((4, 16)).at[:, 0].set(jnp.asarray([-1.0, 1, 1, 1]))
    actual = gate_up_silu(x, weight, kernels="interpret")
    np.testing.assert_allclose(actual, [[0, 40_000], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_products_of_leading_axes_and_many_rows_are_xlas(op: str):
    function, arguments, _ = OPS[op]
    x, *rest = arguments(Shape(300, 544, 16), "float32", np.random.default_rng())
    assert distance(function(x, *rest, kernels="interpret"), function(x, *rest)) < 1e-6
    batched = [value.reshape(3, 100, -1) if value.shape[0] == 300 else value for value in (x, *rest)]
    both = function(*batched, kernels="interpret"), function(*batched)
    jax.tree.map(np.testing.assert_array_equal, *both)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("k", [4096, 12288])
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 160, 256, 1024])
def test_linear_residual_norm_lowers_for_cuda(rows: int, k: int):
    shapes = bf16(rows, k), bf16(4096, k), bf16(rows, 4096), bf16(4096)
    text = lower_for_cuda(partial(linear, kernels="pallas"), *shapes)
    assert ('name = "linear_parts"' in text) == (tiles_for(LINEAR_RESIDUAL, rows=rows, k=k) is not None)
    assert 'name = "add_and_norm"' in text


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 160, 1024])
def test_gate_up_silu_lowers_for_cuda(rows: int):
    shapes = bf16(rows, 4096), bf16(2 * 12288, 4096)
    text = lower_for_cuda(lambda *values: gate_up_silu(*values, kernels="pallas"), *shapes)
    assert ('name = "gate_up_silu"' in text) == (tiles_for(GATE_UP_SILU, rows=rows, k=4096) is not None)
    tiles = Tiles(rows=128, columns=256, inner=64, warps=8)  # where XLA is chosen, the kernel must work all the same
    text = lower_for_cuda(lambda *values: _gate_up_silu_pallas(*values, tiles=tiles, interpret=False), *shapes)
    assert 'name = "gate_up_silu"' in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 16, 33, 64, 100, 127, 128, 160, 255])
@pytest.mark.parametrize("op", OPS)
def test_gpu(op: str, rows: int, dtype: str):
    function, arguments, by_numpy = OPS[op]
    values = arguments(Shape(rows, 4096, 4096), dtype, np.random.default_rng())
    actual = jax.jit(lambda *v: function(*v, kernels="pallas"))(*values)
    assert distance(actual, by_numpy(*values)) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_gpu_ragged():
    rng = np.random.default_rng()
    values = linear_arguments(Shape(45, 4000, 1000), "bfloat16", rng)
    assert distance(linear(*values, kernels="pallas"), linear_by_numpy(*values)) < 1e-2
    values = gate_up_arguments(Shape(45, 1000, 300), "bfloat16", rng)
    assert distance(gate_up_silu(*values, kernels="pallas"), gate_up_by_numpy(*values)) < 1e-2
