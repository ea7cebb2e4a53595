import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.head_statistics import HeadStatistics, Noise, head_statistics
from pallas_kernels.head_statistics_kernel import gumbel_at, threefry_bits
from tests.pallas_kernels.lowering import lower_for_cuda

run = jax.jit(head_statistics, static_argnames=("vocab_size", "scale", "banned", "kernels"))


@pytest.fixture(autouse=True)
def strict_dtype_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def random_inputs(
    seed: int, rows: int, d: int, vocab_size: int, *, padding: int = 0, dtype: jnp.dtype = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Hidden and head with logits of a few units; the head's rows beyond the vocabulary are poison."""
    keys = jax.random.split(jax.random.key(seed), 2)
    hidden = jax.random.normal(keys[0], (rows, d)).astype(dtype)
    head = (2 * d**-0.5 * jax.random.normal(keys[1], (vocab_size, d))).astype(dtype)
    return hidden, jnp.concatenate([head, jnp.full((padding, d), jnp.nan, dtype)])


def random_noise(seed: int, rows: int) -> Noise:
    """Every third row has temperature 0."""
    temperature = jnp.where(jnp.arange(rows) % 3 == 0, 0.0, 0.7)
    return Noise(jax.random.split(jax.random.key(seed), rows), temperature)


def plain(
    hidden: jax.Array,
    head: jax.Array,
    *,
    vocab_size: int,
    scale: float = 1.0,
    given: jax.Array | None = None,
    banned: tuple[int, ...] = (),
    noise: Noise | None = None,
) -> HeadStatistics:
    """The formula in float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head[:vocab_size], np.float64).T * scale
    logits[:, list(banned)] = -np.inf
    noisy = logits
    if noise is not None:
        gumbel = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(noise.key), np.float64)
        noisy = logits + np.asarray(noise.temperature, np.float64)[:, None] * gumbel
    token = noisy.argmax(axis=1)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probability = shifted / shifted.sum(axis=1, keepdims=True)
    rows = np.arange(len(token))
    if given is None:
        return HeadStatistics(token, probability[rows, token], None)
    inside = (np.asarray(given) >= 0) & (np.asarray(given) < vocab_size)
    return HeadStatistics(
        token, probability[rows, token], np.where(inside, probability[rows, np.where(inside, given, 0)], 0)
    )


def agree(actual: HeadStatistics, expected: HeadStatistics, *, error: float) -> None:
    np.testing.assert_array_equal(actual.token, expected.token)
    assert (actual.given_probability is None) == (expected.given_probability is None)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        if a is not None and b is not None:
            assert a.dtype == jnp.float32
            assert np.max(np.abs(np.asarray(a) - b)) <= error * np.max(np.abs(b))


@pytest.mark.parametrize(
    ("rows", "d", "vocab_size", "padding", "dtype", "options"),
    [
        (1, 32, 1, 0, jnp.float32, {"given"}),
        (5, 40, 127, 1, jnp.float32, {"banned", "noise"}),
        (64, 64, 129, 0, jnp.float32, {"given", "banned", "noise"}),
        (65, 100, 300, 20, jnp.float32, {"given"}),
        (63, 128, 128, 0, jnp.bfloat16, {"noise"}),
        (129, 72, 257, 3, jnp.bfloat16, {"given", "banned", "noise"}),
    ],
)
def test_implementations_agree_with_the_formula(
    rows: int, d: int, vocab_size: int, padding: int, dtype: jnp.dtype, options: set[str]
) -> None:
    hidden, head = random_inputs(rows, rows, d, vocab_size, padding=padding, dtype=dtype)
    given = jnp.arange(rows, dtype=jnp.int32) * 7 % (vocab_size + 2) - 1  # out of range on both sides, too
    call = {
        "vocab_size": vocab_size,
        "scale": 1.5,
        "given": given if "given" in options else None,
        "banned": (0, vocab_size - 1, vocab_size // 2) if "banned" in options else (),
        "noise": random_noise(rows, rows) if "noise" in options else None,
    }
    reference = run(hidden, head, **call)
    agree(reference, plain(hidden, head, **call), error=1e-5)
    agree(run(hidden, head, **call, kernels="interpret"), reference, error=1e-5)


@pytest.mark.parametrize("kernels", ["xla", "interpret"])
def test_ties_go_to_the_lower_id(kernels: str) -> None:
    hidden, head = random_inputs(3, 4, 32, 300)
    everywhere = run(jnp.zeros_like(hidden), head, vocab_size=300, kernels=kernels)
    np.testing.assert_array_equal(everywhere.token, 0)
    np.testing.assert_allclose(everywhere.confidence, 1 / 300, rtol=1e-5)
    # the best row of the head three times: twice in a tile, once in another
    ids = (140, 150, 290)
    head = head.at[jnp.array(ids)].set(3 * hidden[:1])
    for banned, expected in (((), 140), ((140,), 150), ((140, 150), 290)):
        statistics = run(hidden[:1], head, vocab_size=300, banned=banned, kernels=kernels)
        assert statistics.token == expected


@pytest.mark.parametrize("kernels", ["xla", "interpret"])
def test_a_tile_without_an_allowed_id_counts_for_nothing(kernels: str) -> None:
    hidden, head = random_inputs(4, 3, 32, 140)
    call = {
        "vocab_size": 140,
        "banned": tuple(range(130)),
        "given": jnp.array([0, 129, 139]),
        "noise": random_noise(4, 3),
    }
    statistics = run(hidden, head, **call, kernels=kernels)
    agree(statistics, plain(hidden, head, **call), error=1e-5)
    np.testing.assert_array_equal(statistics.given_probability[:2], 0)


def test_the_reference_is_the_same_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = random_inputs(5, 21, 32, 200)
    call = {"vocab_size": 200, "given": jnp.arange(21, dtype=jnp.int32), "noise": random_noise(5, 21)}
    monkeypatch.setattr(sys.modules[head_statistics.__module__], "LOGITS_AT_ONCE", 8 * 200)
    agree(run(hidden, head, **call), plain(hidden, head, **call), error=1e-5)


def test_the_reference_holds_a_bounded_part_of_the_logits() -> None:
    rows, d, vocab_size = 2**14, 16, 2**14
    shapes = jax.ShapeDtypeStruct((rows, d), jnp.float32), jax.ShapeDtypeStruct((vocab_size, d), jnp.float32)
    compiled = run.lower(*shapes, vocab_size=vocab_size).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * vocab_size * 4 / 2


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), first=st.integers(0, 150_000))
def test_noise_is_jax_random_bit_for_bit(seed: int, first: int) -> None:
    key = jax.random.key(jnp.uint32(seed))
    words = tuple(jax.random.key_data(key)[:, None])
    index = jnp.arange(first, first + 16, dtype=jnp.uint32)
    shape = (150_016,)
    np.testing.assert_array_equal(threefry_bits(words, index), jax.random.bits(key, shape)[index])
    np.testing.assert_array_equal(gumbel_at(words, index), jax.random.gumbel(key, shape)[index])


def test_noise_of_the_extreme_bits_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.head_statistics_kernel.threefry_bits", lambda key, index: index)
    index = jnp.array([0, 2**32 - 1], jnp.uint32)
    np.testing.assert_allclose(
        gumbel_at((index, index), index), [-np.log(-np.log(2.0**-126)), 23 * np.log(2)], rtol=1e-6
    )


def test_keys_of_another_kind_are_refused() -> None:
    hidden, head = random_inputs(6, 2, 32, 64)
    noise = Noise(jax.random.split(jax.random.key(0, impl="rbg"), 2), jnp.ones(2))
    with pytest.raises(ValueError, match=r"rbg: expected threefry2x32"):
        head_statistics(hidden, head, vocab_size=64, noise=noise, kernels="interpret")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [32, 64, 160, 956, 4096])
@pytest.mark.parametrize("noisy", [False, True])
def test_lowers_to_cuda_without_logits_outside_the_kernel(rows: int, noisy: bool, dtype: jnp.dtype) -> None:
    vocab, d = 126464, 4096

    def statistics(hidden, head, given, key, temperature):
        noise = Noise(key, temperature) if noisy else None
        call = {"vocab_size": vocab, "given": given, "banned": (126081, 126348), "noise": noise}
        return head_statistics(hidden, head, **call, kernels="pallas")

    text = lower_for_cuda(
        statistics,
        jax.ShapeDtypeStruct((rows, d), dtype),
        jax.ShapeDtypeStruct((vocab, d), dtype),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    assert 'name = "head_statistics"' in text
    assert f"x{vocab}xf32>" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 37, 64, 127, 160, 1000])
@pytest.mark.parametrize("noisy", [False, True])
def test_gpu_kernel_agrees_with_the_reference(rows: int, noisy: bool) -> None:
    vocab_size = 126464 - 5
    hidden, head = random_inputs(
        np.random.default_rng().integers(2**31), rows, 4096, vocab_size, padding=5, dtype=jnp.bfloat16
    )
    noise = random_noise(rows, rows) if noisy else None
    given = jax.random.randint(jax.random.key(rows), (rows,), 0, vocab_size)
    call = {"vocab_size": vocab_size, "scale": 2.0, "given": given, "banned": (0, 126336), "noise": noise}
    expected, actual = (run(hidden, head, **call, kernels=kernels) for kernels in ("xla", "pallas"))
    # two ids may be as good as equal, and sums in another order then tell them apart: that is a row in thousands
    same = np.asarray(actual.token == expected.token)
    assert np.mean(same) >= 0.99 if rows >= 100 else np.all(same)
    for a, b in ((actual.confidence, expected.confidence), (actual.given_probability, expected.given_probability)):
        assert np.max(np.abs(np.asarray(a - b))) <= 1e-3 * np.max(np.abs(b))
