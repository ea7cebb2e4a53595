"""`verify_attention` and its tracking scores: the visibility rule of both isolations, XLA against float64 NumPy, the
kernel against XLA, and lowering.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.scheduled_attention import map_blocks
from pallas_kernels.verify_attention import (
    CACHED,
    DRAFT,
    PRIVATE,
    SHARED,
    UNDECODED,
    Visibility,
    verify_attention,
)
from tests.pallas_kernels.attention import BFLOAT16_ERROR, FLOAT32_ERROR, error, jitted
from tests.pallas_kernels.lowering import lower_for_cuda

attention = jitted(verify_attention, table=5)

BUFFERS = ("paper", "strict", "one-pass paper", "one-pass strict")


def buffer(rng, mode, *, positions, candidates, context, window=0):
    """Rows (position, kind, rank, draft_cutoff, undecoded_cutoff, sees_self) of one buffer, in random order.

    Candidates have a draft view and a mask view; plain views are there under strict isolation and in one-pass verify,
    where the window has further rows, and all that is shared is in the cache.
    """
    strict, one_pass = "strict" in mode, "one-pass" in mode
    places = rng.permutation(positions)[: candidates + context + (window if one_pass else 0)]
    rows = [(p, CACHED if one_pass else SHARED, 0, 0, 0, False) for p in places[candidates:]]
    for i, p in enumerate(places[:candidates]):
        rows.append((p, DRAFT, i, i + 1, i + 1, False))
        if strict:
            rows.append((p, PRIVATE, 0, i, i + 1, True))
            rows.append((p, UNDECODED, i, 0, 0, False))
        else:
            rows.append((p, UNDECODED, i, i, i, False))
            if one_pass:
                rows.append((p, PRIVATE, 0, 0, 0, False))
    return [rows[i] for i in rng.permutation(len(rows))]


def case(
    rng, buffers, kv_lengths, *, capacity, heads, kv_heads, head_dim, block_rows, dtype=jnp.float32, poison=np.nan
):
    """Inputs for one buffer a slot (slots in random order), a row apart, filled up with random rows; marked rows; and
    the position of every row.

    Cache rows of positions in the buffer (but for CACHED rows) or beyond kv_length hold `poison`.
    """
    slots, n = len(buffers), len(buffers) * (block_rows + 1) + 1
    rule = [rng.integers(0, 5, n), rng.integers(0, 9, n), rng.integers(0, 9, n), rng.integers(0, 9, n)]
    rule, itself, table, row = np.stack(rule), rng.random(n) < 0.5, [], 1
    buffered = np.zeros((slots, capacity), bool)
    unread = np.arange(capacity) >= np.asarray(kv_lengths)[:, None]
    position = np.full(n, -1)
    for slot in rng.permutation(slots):
        rows = buffers[slot]
        table.append((slot, kv_lengths[slot], row, len(rows)))
        if rows:
            place, *columns = zip(*rows, strict=True)
            position[row : row + len(rows)] = place
            rule[:, row : row + len(rows)], itself[row : row + len(rows)] = columns[:4], columns[4]
            buffered[slot, [at for at, kind, *_ in rows if kind != CACHED]] = True
        row += len(rows) + 1
    unread = (unread | buffered).reshape(-1)

    def normal(n, heads):
        return jnp.asarray(rng.standard_normal((n, heads, head_dim)), dtype)

    def cache():
        return jnp.where(unread[:, None, None], poison, normal(slots * capacity, kv_heads)).astype(dtype)

    inputs = (normal(n, heads), normal(n, kv_heads), normal(n, kv_heads), cache(), cache())
    visibility = Visibility(*(jnp.asarray(x, jnp.int32) for x in rule), jnp.asarray(itself))
    inputs += (jnp.asarray(table, jnp.int32), jnp.asarray(buffered.reshape(-1)), visibility)
    return inputs, jnp.asarray(rng.random(n) < 0.4), position


def in_numpy(q, k, v, k_cache, v_cache, block_table, buffered, visibility, *, capacity, score_rows):
    """The rule of "who sees whom", attention and scores in float64, a row and a head at a time."""
    q, k, v, k_cache, v_cache = (np.asarray(x, np.float64) for x in (q, k, v, k_cache, v_cache))
    kind, rank, draft_cutoff, undecoded_cutoff, sees_self = (np.asarray(x) for x in visibility)
    group, out = q.shape[1] // k.shape[1], np.zeros(q.shape)
    scores = np.zeros(k_cache.shape[0])
    for slot, kv_length, first_row, rows in np.asarray(block_table):
        cached = [r for r in range(slot * capacity, slot * capacity + kv_length) if not buffered[r]]
        for i in range(first_row, first_row + rows):
            own = [
                j
                for j in range(first_row, first_row + rows)
                if (kind[j] == SHARED)
                or (kind[j] == DRAFT and rank[j] < draft_cutoff[i])
                or (kind[j] == UNDECODED and rank[j] >= undecoded_cutoff[i])
                or (sees_self[i] and j == i)
            ]
            for head in range(q.shape[1] if cached or own else 0):
                keys = np.concatenate([k_cache[cached, head // group], k[own, head // group]])
                values = np.concatenate([v_cache[cached, head // group], v[own, head // group]])
                weights = keys @ q[i, head] / np.sqrt(q.shape[2])
                weights = np.exp(weights - weights.max())
                weights /= weights.sum()
                out[i, head] = weights @ values
                if score_rows[i]:
                    scores[cached] += weights[: len(cached)]
    return out, scores


@pytest.mark.parametrize("kernels", ["xla", "interpret"])
@pytest.mark.parametrize("mode", BUFFERS)
def test_every_row_sees_every_position_once(mode, kernels):
    """With queries of 0 all keys weigh the same; with one-hot positions as values, the result is their mean."""
    rng = np.random.default_rng()
    lengths = [60, 33]
    buffers = [
        buffer(rng, mode, positions=length, candidates=c, context=5, window=4)
        for length, c in zip(lengths, (9, 4), strict=True)
    ]
    shape = {"capacity": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "block_rows": 40}
    (q, _, _, k_cache, _, *rest), _, position = case(rng, buffers, lengths, **shape)
    v = jnp.broadcast_to(jax.nn.one_hot(position, 64)[:, None], (len(position), 1, 64))
    v_cache = jnp.tile(jnp.eye(64), (2, 1))[:, None]
    k = jnp.zeros_like(v)
    run = {"capacity": 64, "block_rows": 40, "kernels": kernels}
    out = attention(jnp.zeros_like(q), k, v, jnp.nan_to_num(k_cache), v_cache, *rest, **run)
    for slot, kv_length, first_row, rows in np.asarray(rest[0]):
        assert rows == len(buffers[slot])
        expected = np.where(np.arange(64) < kv_length, 1 / kv_length, 0)
        seen = np.asarray(out[first_row : first_row + rows])
        assert error(seen, np.broadcast_to(expected, seen.shape)) < FLOAT32_ERROR


@pytest.mark.parametrize("score_rows", ["none", "some"])
@pytest.mark.parametrize("mode", BUFFERS)
def test_reference_is_attention_in_float64(mode, score_rows):
    rng = np.random.default_rng()
    lengths = [33, 20, 0, 16]
    buffers = [buffer(rng, mode, positions=20, candidates=c, context=2) for c in (3, 2)] + [[], []]
    shape = {"capacity": 33, "heads": 4, "kv_heads": 2, "head_dim": 16, "block_rows": 12}
    inputs, marked, _ = case(rng, buffers, lengths, **shape)
    marked = marked if score_rows == "some" else jnp.zeros_like(marked)
    run = {"capacity": 33, "block_rows": 12}
    ours = attention(*inputs, **run, score_rows=marked)
    for a, b in zip(ours, in_numpy(*inputs, capacity=33, score_rows=marked), strict=True):
        assert error(a, b) < FLOAT32_ERROR
    assert error(ours[0], attention(*inputs, **run)) < FLOAT32_ERROR


def test_reference_is_the_same_some_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Five blocks, two at a time: the last batch is short."""
    rng = np.random.default_rng()
    buffers = [buffer(rng, "strict", positions=20, candidates=2, context=i) for i in range(5)]
    shape = {"capacity": 24, "heads": 2, "kv_heads": 1, "head_dim": 16, "block_rows": 10}
    inputs, marked, _ = case(rng, buffers, [24, 20, 21, 22, 23], **shape)
    call = {"capacity": 24, "block_rows": 10, "score_rows": marked}
    whole = attention(*inputs, **call)
    monkeypatch.setattr(sys.modules[map_blocks.__module__], "SCORES_AT_ONCE", 2 * 2 * 10 * (24 + 10))
    parts = jitted(verify_attention, table=5)(*inputs, **call)
    for a, b in zip(parts, whole, strict=True):
        assert error(a, b) < FLOAT32_ERROR


random_row = st.tuples(st.integers(0, 4), *[st.integers(0, 5)] * 3, st.booleans())


@settings(max_examples=30)
@given(
    data=st.lists(
        st.tuples(st.sampled_from([0, 1, 31, 32, 33, 129, 150]), st.lists(random_row, max_size=40)),
        min_size=3,
        max_size=3,
    ),
    heads=st.sampled_from([(2, 2, 64), (4, 1, 128)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernel_is_the_reference(data, heads, seed):
    """Any rule, also rows that see nothing and buffers that hold every position of the cache."""
    heads = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    rng = np.random.default_rng(seed)
    buffers = [[(int(rng.integers(150)), *row) for row in rows] for _, rows in data]
    lengths = [kv_length for kv_length, _ in data]
    inputs, marked, _ = case(rng, buffers, lengths, capacity=150, block_rows=40, **heads)
    run = {"capacity": 150, "block_rows": 40, "score_rows": marked}
    for ours, expected in zip(attention(*inputs, **run, kernels="interpret"), attention(*inputs, **run), strict=True):
        assert error(ours, expected) < FLOAT32_ERROR


@pytest.mark.parametrize("kernels", ["xla", "interpret"])
@pytest.mark.parametrize("mode", BUFFERS)
def test_scores_of_a_slot_sum_to_its_marked_rows_and_heads(mode, kernels):
    """If these see no row of their buffer; and without a mark they are 0."""
    rng = np.random.default_rng()
    buffers = [buffer(rng, mode, positions=120, candidates=c, context=10, window=8) for c in (7, 3)] + [[]]
    buffers = [
        [(place, CACHED if kind == CACHED else PRIVATE, 0, 0, 0, False) for place, kind, *_ in rows] for rows in buffers
    ]
    shape = {"capacity": 130, "heads": 4, "kv_heads": 2, "head_dim": 64, "block_rows": 45}
    inputs, marked, _ = case(rng, buffers, [120, 129, 77], **shape)
    run = {"capacity": 130, "block_rows": 45, "kernels": kernels}
    _, scores = attention(*inputs, **run, score_rows=marked)
    np.testing.assert_array_equal(scores[inputs[6]], 0)
    for slot, _, first_row, rows in np.asarray(inputs[5]):
        own = slice(first_row, first_row + rows)
        total = jnp.sum(scores[slot * 130 : (slot + 1) * 130])
        assert error(total, 4 * jnp.sum(marked[own])) < FLOAT32_ERROR
    np.testing.assert_array_equal(attention(*inputs, **run, score_rows=jnp.zeros_like(marked))[1], 0)


def test_row_that_sees_nothing_gives_zero():
    """And a key that nobody sees counts for nothing, however large its products."""
    rng = np.random.default_rng()
    shape = {"capacity": 32, "heads": 2, "kv_heads": 2, "head_dim": 64, "block_rows": 4}
    buffers = [[(0, PRIVATE, 0, 0, 0, False), (1, PRIVATE, 0, 0, 0, True)]]
    (q, k, v, *rest), _, _ = case(rng, buffers, [2], **shape)
    run = {"capacity": 32, "block_rows": 4, "score_rows": jnp.ones(len(q), bool)}
    for kernels in ("xla", "interpret"):
        out, scores = attention(q, k.at[1].multiply(1e6), v, *rest, **run, kernels=kernels)
        np.testing.assert_array_equal(out[jnp.array([0, 1, 3, 4])], 0)
        assert error(out[2], v[2]) < FLOAT32_ERROR
        np.testing.assert_array_equal(scores, 0)


@pytest.mark.parametrize("kernels", ["xla", "interpret"])
def test_values_that_nobody_sees_do_not_matter(kernels):
    rng = np.random.default_rng()
    shape = {"capacity": 32, "heads": 2, "kv_heads": 2, "head_dim": 64, "block_rows": 4}
    rows = [(0, SHARED, 0, 0, 0, False), (1, PRIVATE, 0, 0, 0, False), (2, CACHED, 0, 0, 0, False)]
    (q, k, v, *rest), _, _ = case(rng, [rows], [9], **shape)
    run = {"capacity": 32, "block_rows": 4, "kernels": kernels}
    out = attention(q, k, v, *rest, **run)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(attention(q, k, v.at[jnp.array([2, 3])].set(jnp.nan), *rest, **run), out)


@pytest.mark.parametrize("mode", ["paper", "one-pass strict"])
def test_bfloat16(mode):
    rng = np.random.default_rng()
    shape = {"capacity": 140, "heads": 2, "kv_heads": 1, "head_dim": 128, "block_rows": 70, "dtype": jnp.bfloat16}
    buffers = [buffer(rng, mode, positions=100, candidates=c, context=20) for c in (16, 5)]
    inputs, marked, _ = case(rng, buffers, [137, 100], **shape)
    expected = in_numpy(*inputs, capacity=140, score_rows=marked)
    run = {"capacity": 140, "block_rows": 70, "score_rows": marked}
    for kernels in ("xla", "interpret"):
        for ours, exact in zip(attention(*inputs, **run, kernels=kernels), expected, strict=True):
            assert error(ours, exact) < BFLOAT16_ERROR, kernels


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("slots", "block_rows", "capacity"), [(1, 32, 1024), (8, 48, 1280), (1, 160, 1280), (32, 160, 1024)]
)
def test_lowers_for_llada_8b(slots, block_rows, capacity, dtype):
    def f(*inputs):
        *inputs, marked = inputs
        run = {"capacity": capacity, "block_rows": block_rows, "score_rows": marked}
        return verify_attention(*inputs, **run, kernels="pallas")

    def of(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    n = slots * block_rows
    rule = Visibility(*(of((n,), jnp.int32) for _ in range(4)), of((n,), jnp.bool))
    rows, cache = of((n, 32, 128)), of((slots * capacity, 32, 128))
    table, buffered = of((slots, 4), jnp.int32), of((slots * capacity,), jnp.bool)
    text = lower_for_cuda(f, rows, rows, rows, cache, cache, table, buffered, rule, of((n,), jnp.bool))
    assert "verify_attention" in text
    assert "tracking_scores" in text


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("mode", BUFFERS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_on_gpu(mode, slots, dtype):
    rng = np.random.default_rng()
    lengths = [int(n) for n in rng.integers(700, 1281, slots)]
    buffers = [buffer(rng, mode, positions=n, candidates=16, context=64 - i, window=48) for i, n in enumerate(lengths)]
    shape = {"heads": 32, "kv_heads": 32, "head_dim": 128, "capacity": 1280, "block_rows": 160, "dtype": dtype}
    inputs, marked, _ = case(rng, buffers, lengths, **shape)
    run = {"capacity": 1280, "block_rows": 160, "score_rows": marked}
    expected = attention(*(x.astype(jnp.float32) for x in inputs[:5]), *inputs[5:], **run)
    ours = attention(*inputs, **run, kernels="pallas")
    for a, b in zip(ours, expected, strict=True):
        assert error(a, b) < (BFLOAT16_ERROR if dtype == jnp.bfloat16 else FLOAT32_ERROR)
    again = attention(*inputs, **run, kernels="pallas")
    for a, b in zip(ours, again, strict=True):
        np.testing.assert_array_equal(a, b)  # deterministic
