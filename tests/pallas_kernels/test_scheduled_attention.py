"""`scheduled_attention` and its tracking scores: XLA against float64 NumPy, the kernel against XLA, and lowering."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.scheduled_attention import scheduled_attention
from tests.pallas_kernels.attention import BFLOAT16_ERROR, FLOAT32_ERROR, error, jitted
from tests.pallas_kernels.lowering import lower_for_cuda

attention = jitted(scheduled_attention, table=3)


def in_numpy(q, k_cache, v_cache, block_table, *, capacity, score_rows):
    """Attention and scores in float64, a row and a head at a time."""
    q, k_cache, v_cache = (np.asarray(x, np.float64) for x in (q, k_cache, v_cache))
    group = q.shape[1] // k_cache.shape[1]
    out, scores = np.zeros(q.shape), np.zeros(k_cache.shape[0])
    for slot, kv_length, first_row, rows in np.asarray(block_table):
        keys = slice(slot * capacity, slot * capacity + kv_length)
        for row in range(first_row, first_row + rows if kv_length else first_row):
            for head in range(q.shape[1]):
                weights = k_cache[keys, head // group] @ q[row, head] / np.sqrt(q.shape[2])
                weights = np.exp(weights - weights.max())
                weights /= weights.sum()
                out[row, head] = weights @ v_cache[keys, head // group]
                scores[keys] += weights if score_rows[row] else 0
    return out, scores


def case(rng, blocks, *, capacity, slots, heads, kv_heads, head_dim, dtype=jnp.float32, rows=None):
    """Inputs for blocks of (slot, kv_length, rows), a row apart, and marked rows; `rows` query rows, if not just those.

    Cache rows that no block may read are NaN.
    """
    table, first_row = [], 1
    for slot, kv_length, in_block in blocks:
        table.append((slot, kv_length, first_row, in_block))
        first_row += in_block + 1
    rows = rows or first_row
    read = np.zeros(slots * capacity, bool)
    for slot, kv_length, _, in_block in table:
        if in_block:
            read[slot * capacity : slot * capacity + kv_length] = True

    def normal(n, heads):
        return rng.standard_normal((n, heads, head_dim))

    def cache():
        return jnp.asarray(np.where(read[:, None, None], normal(slots * capacity, kv_heads), np.nan), dtype)

    inputs = (jnp.asarray(normal(rows, heads), dtype), cache(), cache(), jnp.asarray(table, jnp.int32))
    return inputs, jnp.asarray(rng.random(rows) < 0.4)


@pytest.mark.parametrize("with_scores", [False, True])
def test_reference_is_the_same_some_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch, with_scores: bool):
    """Five blocks, two at a time: the last batch is short."""
    shape = {"capacity": 24, "slots": 5, "heads": 2, "kv_heads": 1, "head_dim": 16}
    inputs, marked = case(np.random.default_rng(3), [(slot, 5 * slot, 7) for slot in range(5)], **shape)
    call = {"capacity": 24, "block_rows": 7, "score_rows": marked if with_scores else None}
    whole = jax.tree.leaves(scheduled_attention(*inputs, **call))
    monkeypatch.setattr(sys.modules[scheduled_attention.__module__], "SCORES_AT_ONCE", 2 * 2 * 7 * 24)
    parts = jax.tree.leaves(scheduled_attention(*inputs, **call))
    assert [error(a, b) < FLOAT32_ERROR for a, b in zip(parts, whole, strict=True)] == [True] * (1 + with_scores)


@pytest.mark.parametrize("score_rows", ["none", "some"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 16), (4, 1, 128)])
def test_reference_is_attention_in_float64(heads, kv_heads, head_dim, score_rows):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    blocks = [(2, 33, 5), (0, 0, 3), (1, 40, 0), (3, 1, 1), (2, 33, 7)]
    inputs, marked = case(np.random.default_rng(), blocks, capacity=40, slots=4, **shape)
    marked = marked if score_rows == "some" else jnp.zeros_like(marked)
    expected, expected_scores = in_numpy(*inputs, capacity=40, score_rows=marked)
    out, scores = attention(*inputs, capacity=40, block_rows=8, score_rows=marked)
    assert error(out, expected) < FLOAT32_ERROR
    assert error(scores, expected_scores) < FLOAT32_ERROR
    np.testing.assert_array_equal(out, attention(*inputs, capacity=40, block_rows=8))


# Beside the borders of tiles of 32 (fp32) keys and rows, and of their splits.
lengths = st.sampled_from([0, 1, 31, 32, 33, 64, 127, 128, 129, 150])


@settings(max_examples=30)
@given(
    blocks=st.lists(st.tuples(lengths, st.sampled_from([0, 1, 15, 16, 31, 32, 33])), min_size=3, max_size=3),
    heads=st.sampled_from([(2, 2, 64), (4, 2, 64), (4, 1, 128)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernel_is_the_reference(blocks, heads, seed):
    heads = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    blocks = [(slot, kv_length, rows) for slot, (kv_length, rows) in enumerate(blocks)]
    inputs, marked = case(np.random.default_rng(seed), blocks, capacity=150, slots=3, rows=103, **heads)
    run = {"capacity": 150, "block_rows": 33, "score_rows": marked}
    expected, expected_scores = attention(*inputs, **run)
    out, scores = attention(*inputs, **run, kernels="interpret")
    assert error(out, expected) < FLOAT32_ERROR
    assert error(scores, expected_scores) < FLOAT32_ERROR


def test_kernel_without_splits_is_the_reference():
    """A short cache is not split, so values come straight from the kernel."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "capacity": 48, "slots": 3}
    inputs, marked = case(np.random.default_rng(), [(2, 47, 17), (0, 0, 3), (1, 3, 0), (0, 32, 9)], **shape)
    run = {"capacity": 48, "block_rows": 17, "score_rows": marked}
    for ours, expected in zip(attention(*inputs, **run, kernels="interpret"), attention(*inputs, **run), strict=True):
        assert error(ours, expected) < FLOAT32_ERROR


@pytest.mark.parametrize("block_rows", [9, 70])
def test_bfloat16(block_rows):
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 128, "capacity": 200, "slots": 2, "dtype": jnp.bfloat16}
    inputs, marked = case(np.random.default_rng(), [(1, 193, block_rows), (0, 65, 5)], **shape)
    expected, expected_scores = in_numpy(*inputs, capacity=200, score_rows=marked)
    run = {"capacity": 200, "block_rows": block_rows, "score_rows": marked}
    for kernels in ("xla", "interpret"):
        out, scores = attention(*inputs, **run, kernels=kernels)
        assert error(out, expected) < BFLOAT16_ERROR, kernels
        assert error(scores, expected_scores) < BFLOAT16_ERROR, kernels


def test_head_dim_without_a_kernel():
    inputs, _ = case(np.random.default_rng(), [(0, 3, 2)], capacity=8, slots=1, heads=1, kv_heads=1, head_dim=48)
    with pytest.raises(ValueError, match=r"head_dim=48 .* power of two"):
        scheduled_attention(*inputs, capacity=8, block_rows=2, kernels="interpret")


def shapes(slots, block_rows, capacity, dtype, *, kv_heads=32, head_dim=128):
    """LLaDA-8B's where nothing else is said: 32 heads of 128; one block of `block_rows` rows a slot."""
    rows, cache = (slots * block_rows, 32, head_dim), (slots * capacity, kv_heads, head_dim)
    return [jax.ShapeDtypeStruct(*shape) for shape in ((rows, dtype), (cache, dtype), (cache, dtype))] + [
        jax.ShapeDtypeStruct((slots, 4), jnp.int32),
        jax.ShapeDtypeStruct((slots * block_rows,), jnp.bool),
    ]


def lowered(capacity, block_rows, inputs):
    def f(q, k_cache, v_cache, block_table, score_rows):
        run = {"capacity": capacity, "block_rows": block_rows, "score_rows": score_rows, "kernels": "pallas"}
        return scheduled_attention(q, k_cache, v_cache, block_table, **run)

    return lower_for_cuda(f, *inputs)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("slots", "block_rows", "capacity"),
    [(1, 32, 1024), (1, 64, 1280), (1, 128, 1280), (8, 160, 1280), (32, 128, 1280), (1, 956, 1024), (4, 1024, 1024)],
)
def test_lowers_for_llada_8b(slots, block_rows, capacity, dtype):
    text = lowered(capacity, block_rows, shapes(slots, block_rows, capacity, dtype))
    assert "scheduled_attention" in text
    assert "tracking_scores" in text


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (32, 64), (1, 64)])
def test_lowers_for_other_heads(kv_heads, head_dim):
    inputs = shapes(2, 9, 100, jnp.bfloat16, kv_heads=kv_heads, head_dim=head_dim)
    assert "scheduled_attention" in lowered(100, 9, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "block_rows"), [(1, 32), (1, 128), (8, 128), (2, 956)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_on_gpu(slots, block_rows, dtype):
    rng = np.random.default_rng()
    shape = {"heads": 32, "kv_heads": 32, "head_dim": 128, "capacity": 1280, "slots": slots, "dtype": dtype}
    blocks = [(slot, int(rng.integers(block_rows, 1281)), block_rows - slot) for slot in range(slots)]
    inputs, marked = case(rng, blocks, **shape)
    run = {"capacity": 1280, "block_rows": block_rows, "score_rows": marked}
    expected = attention(*(x.astype(jnp.float32) for x in inputs[:3]), inputs[3], **run)
    ours = attention(*inputs, **run, kernels="pallas")
    for a, b in zip(ours, expected, strict=True):
        assert error(a, b) < (BFLOAT16_ERROR if dtype == jnp.bfloat16 else FLOAT32_ERROR)
    again = attention(*inputs, **run, kernels="pallas")
    np.testing.assert_array_equal(np.asarray(ours[1]), np.asarray(again[1]))  # deterministic
