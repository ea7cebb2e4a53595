"""`qkv_rope_cache` and its returning variant: kernels (interpreted, lowered, on a GPU) against the XLA reference, and
the reference against float64 NumPy."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels import qkv_rope_cache_kernel
from pallas_kernels.qkv_rope_cache import qkv_rope_cache, qkv_rope_cache_returning, rope_frequency
from pallas_kernels.qkv_rope_cache_kernel import CASES, cos_sin, qkv_rope_cache_pallas
from pallas_kernels.weight_product import Case, Tiles, tiles_for
from tests.pallas_kernels.lowering import lower_for_cuda

THETA = 500_000.0
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


class Shape(NamedTuple):
    rows: int
    d_model: int = 48
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    bias: bool = False
    dtype: str = "float32"
    cache_rows: int = 96


def arguments(shape: Shape, seed: int, *, last_position: int = 4095) -> tuple:
    """Random arguments. About a quarter of the rows write nothing; the caches hold NaN before."""
    rng = np.random.default_rng(seed)
    outputs = (shape.group + 2) * shape.kv_heads * shape.head_dim

    def normal(*size: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size) * scale, shape.dtype)

    cache_row = rng.permutation(shape.cache_rows)[np.arange(shape.rows) % shape.cache_rows]
    silent = (rng.random(shape.rows) < 0.25) | (np.arange(shape.rows) >= shape.cache_rows)
    cache_row = np.where(silent, shape.cache_rows + rng.integers(0, 9, shape.rows), cache_row)
    cache = jnp.full((shape.cache_rows, shape.kv_heads, shape.head_dim), jnp.nan, shape.dtype)
    return (
        normal(shape.rows, shape.d_model),
        normal(outputs, shape.d_model, scale=shape.d_model**-0.5),
        normal(outputs) if shape.bias else None,
        jnp.asarray(rng.integers(0, last_position + 1, shape.rows), jnp.int32),
        jnp.asarray(cache_row, jnp.int32),
        cache,
        cache,
    )


def distance(value: jax.Array, expected: jax.Array | np.ndarray) -> float:
    """Max |value - expected| / max |expected|; NaN must stand in the same places."""
    value64, expected64 = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    assert value64.shape == expected64.shape
    np.testing.assert_array_equal(np.isnan(value64), np.isnan(expected64))
    if np.isnan(expected64).all():
        return 0.0
    return float(np.nanmax(np.abs(value64 - expected64)) / np.nanmax(np.abs(expected64)))


def by_numpy(x, weight, bias, position, cache_row, k_cache, v_cache, *, n_heads: int) -> list[np.ndarray]:
    """q, k, v and the caches in float64, row by row; pairs turn as complex numbers."""
    x, weight, k_cache, v_cache = (np.array(value, np.float64) for value in (x, weight, k_cache, v_cache))
    (rows, _), (cache_rows, kv_heads, head_dim) = x.shape, k_cache.shape
    packed = x @ weight.T + (0 if bias is None else np.asarray(bias, np.float64))
    heads = packed.reshape(rows, n_heads + 2 * kv_heads, head_dim)
    for row in range(rows):
        angle = int(position[row]) * THETA ** (-np.arange(0, head_dim, 2) / head_dim)
        turned = heads[row, : n_heads + kv_heads]
        pairs = (turned[:, : head_dim // 2] + 1j * turned[:, head_dim // 2 :]) * np.exp(1j * angle)
        heads[row, : n_heads + kv_heads] = np.concatenate([pairs.real, pairs.imag], axis=1)
        if cache_row[row] < cache_rows:
            k_cache[cache_row[row]] = heads[row, n_heads : n_heads + kv_heads]
            v_cache[cache_row[row]] = heads[row, n_heads + kv_heads :]
    q, k, v = np.split(heads, (n_heads, n_heads + kv_heads), axis=1)
    return [q, k, v, k_cache, v_cache]


ONCE = [Phase.generate]  # every shape is compiled: shrinking a failure would take minutes
SHAPES = st.builds(
    Shape,
    rows=st.sampled_from([1, 15, 16, 17, 33, 70]),
    d_model=st.sampled_from([32, 48, 200]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([64, 128]),
    bias=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    cache_rows=st.just(96),
)


@settings(max_examples=8, phases=ONCE)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_reference_is_the_definition(shape: Shape, seed: int):
    # float32 angles differ from float64 ones by some 1e-7 of the position
    values = arguments(shape, seed, last_position=31)
    n_heads = shape.kv_heads * shape.group
    expected = by_numpy(*values, n_heads=n_heads)
    actual = qkv_rope_cache_returning(*values, n_heads=n_heads, rope_theta=THETA)
    assert max(map(distance, actual, expected)) < TOLERANCE[shape.dtype]
    q, k_cache, v_cache = qkv_rope_cache(*values, n_heads=n_heads, rope_theta=THETA)
    assert max(map(distance, (q, k_cache, v_cache), (actual[0], *actual[3:]))) == 0


@settings(max_examples=8, phases=ONCE)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_kernel_is_the_reference(shape: Shape, seed: int):
    values = arguments(shape, seed)
    statics = {"n_heads": shape.kv_heads * shape.group, "rope_theta": THETA}
    expected = qkv_rope_cache_returning(*values, **statics)
    actual = qkv_rope_cache_returning(*values, **statics, kernels="interpret")
    assert max(map(distance, actual, expected)) < TOLERANCE[shape.dtype]


@settings(max_examples=8, phases=ONCE)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_kernel_behind_a_product_is_the_reference(shape: Shape, seed: int):
    values = arguments(shape, seed)
    statics = {"n_heads": shape.kv_heads * shape.group, "rope_theta": THETA}
    with mock.patch.object(qkv_rope_cache_kernel, "CASES", ()):
        expected = qkv_rope_cache_returning(*values, **statics)
        actual = qkv_rope_cache_returning(*values, **statics, kernels="interpret")
        q, *caches = qkv_rope_cache(*values, **statics, kernels="interpret")
    assert max(map(distance, actual, expected)) < TOLERANCE[shape.dtype]
    assert max(map(distance, (q, *caches), (actual[0], *actual[3:]))) == 0


@pytest.mark.parametrize("columns", [32, 64, 256])
@pytest.mark.parametrize("shape", [Shape(rows=50, bias=True), Shape(rows=48, head_dim=128, group=2)])
def test_tiles_do_not_matter(shape: Shape, columns: int):
    values = arguments(shape, seed=columns + shape.rows)
    n_heads = shape.kv_heads * shape.group
    expected = qkv_rope_cache(*values, n_heads=n_heads, rope_theta=THETA)
    x, weight, bias, *rest = values
    frequency = rope_frequency(shape.head_dim, THETA)
    tiles = Tiles(rows=16, columns=columns, inner=32)
    q, k_cache, v_cache = qkv_rope_cache_pallas(
        x, weight, bias, frequency, *rest, n_heads=n_heads, returning=False, interpret=True, tiles=tiles
    )
    assert max(map(distance, (q, k_cache, v_cache), expected)) < 1e-5


def test_rows_that_are_not_written_stay():
    shape = Shape(rows=20)
    *values, _, _ = arguments(shape, seed=7)
    rng = np.random.default_rng(8)
    caches = [jnp.asarray(rng.standard_normal((shape.cache_rows, 1, shape.head_dim)), jnp.float32) for _ in range(2)]
    written = np.unique(values[4])
    stay = np.setdiff1d(np.arange(shape.cache_rows), written)
    assert 0 < len(stay) < shape.cache_rows
    _, *after = qkv_rope_cache(*values, *caches, n_heads=1, rope_theta=THETA, kernels="interpret")
    for before, now in zip(caches, after, strict=True):
        np.testing.assert_array_equal(now[stay], before[stay])
        assert not np.array_equal(now, before)


@pytest.mark.parametrize("run", [jax.jit, lambda f: f], ids=["fused", "an operation at a time"])
def test_cos_sin(run: Callable):
    rng = np.random.default_rng()
    angle = np.concatenate([[0.0], rng.uniform(0, 10, 10_000), rng.uniform(0, 99_999, 100_000)]).astype(np.float32)
    cos, sin = run(cos_sin)(jnp.asarray(angle))
    assert np.abs(cos - np.cos(angle.astype(np.float64))).max() < 2e-7
    assert np.abs(sin - np.sin(angle.astype(np.float64))).max() < 2e-7


def test_choice_of_tiles():
    assert all((tiles_for(CASES, rows=rows, k=4096) or 0).rows >= rows for rows in (1, 16, 17, 32, 64, 100, 128))
    assert tiles_for([Case(rows=16, tiles=Tiles(rows=16, columns=16, inner=16))], rows=17, k=1) is None
    with pytest.raises(ValueError, match="columns=48 must be a power of two"):
        Tiles(rows=16, columns=48, inner=16)


def abstract(rows: int, cache_rows: int, *, heads: int = 32, kv_heads: int = 32, head_dim: int = 128, bias=False):
    outputs, d_model = (heads + 2 * kv_heads) * head_dim, heads * head_dim

    def bf16(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    integers = jax.ShapeDtypeStruct((rows,), jnp.int32)
    cache = bf16(cache_rows, kv_heads, head_dim)
    return (
        *(bf16(rows, d_model), bf16(outputs, d_model), bf16(outputs) if bias else None),
        *(integers, integers, cache, cache),
    )


@pytest.mark.parametrize("op", [qkv_rope_cache, qkv_rope_cache_returning])
@pytest.mark.parametrize(
    "shapes",
    [
        *(abstract(rows, 1024) for rows in (1, 32, 64, 128, 160, 956, 1024, 4096)),
        *(abstract(128 * slots, slots * 1280) for slots in (8, 32)),
        abstract(128, 1280, kv_heads=8, bias=True),
        abstract(70, 999, heads=8, kv_heads=2, head_dim=64),
    ],
    ids=lambda shapes: "-".join(str(shapes[i].shape[0]) for i in (0, 1, 5)),
)
def test_lowers_for_cuda(op, shapes: tuple):
    heads = shapes[0].shape[1] // shapes[5].shape[2]

    def call(*values):
        return op(*values, n_heads=heads, rope_theta=THETA, kernels="pallas")

    text = lower_for_cuda(call, *shapes)
    tiles = tiles_for(CASES, rows=shapes[0].shape[0], k=shapes[0].shape[1])
    assert f'name = "{"rope_cache" if tiles is None else op.__name__}"' in text


def test_lowers_in_float32():
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32 if s.dtype == jnp.bfloat16 else s.dtype), abstract(128, 128)
    )

    def call(*values):
        return qkv_rope_cache(*values, n_heads=32, rope_theta=THETA, kernels="pallas")

    assert 'name = "qkv_rope_cache"' in lower_for_cuda(call, *shapes)


NEEDS_JAX_TRITON = pytest.mark.skipif(
    find_spec("jax_triton") is None, reason="jax_triton (fdllm-jax[triton]) is not installed"
)
GPU_KERNELS = pytest.mark.parametrize("kernels", ["pallas", pytest.param("triton", marks=NEEDS_JAX_TRITON)])


@pytest.mark.gpu
@GPU_KERNELS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 17, 31, 64, 100, 127, 160, 255, 955, 2500])
def test_gpu(rows: int, dtype: str, kernels: str):
    shape = Shape(rows, d_model=4096, kv_heads=32, head_dim=128, bias=True, dtype=dtype, cache_rows=1280 + rows)
    values = arguments(shape, seed=int(np.random.default_rng().integers(2**32)))
    statics = {"n_heads": 32, "rope_theta": THETA}
    exact = [value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value for value in values]
    expected = jax.jit(lambda *v: qkv_rope_cache_returning(*v, **statics))(*exact)
    actual = jax.jit(lambda *v: qkv_rope_cache_returning(*v, **statics, kernels=kernels))(*values)
    assert max(map(distance, actual, expected)) < TOLERANCE[dtype]
    q, k_cache, v_cache = jax.jit(lambda *v: qkv_rope_cache(*v, **statics, kernels=kernels))(*values)
    assert max(map(distance, (q, k_cache, v_cache), (actual[0], *actual[3:]))) == 0


@pytest.mark.gpu
@GPU_KERNELS
@pytest.mark.parametrize("shape", [Shape(33, 100, 2, 4, 64, True, "bfloat16"), Shape(90, 256, 2, 1, 128)])
def test_gpu_small(shape: Shape, kernels: str):
    values = arguments(shape, seed=int(np.random.default_rng().integers(2**32)))
    statics = {"n_heads": shape.kv_heads * shape.group, "rope_theta": THETA}
    expected = qkv_rope_cache(*values, **statics)
    actual = qkv_rope_cache(*values, **statics, kernels=kernels)
    assert max(map(distance, actual, expected)) < TOLERANCE[shape.dtype]
