"""`scheduled_attention` and its tracking scores: XLA against float64 NumPy, the kernel against XLA, and lowering.

cuDNN itself runs on a GPU only; here it is tested when it is chosen, and what is made of its results.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import scheduled_attention_cudnn as cudnn
from pallas_kernels import scheduled_attention_kernel as triton
from pallas_kernels.scheduled_attention import scheduled_attention
from tests.pallas_kernels.attention import BFLOAT16_ERROR, FLOAT32_ERROR, error, in_blocks, jitted
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


def case(
    rng, blocks, *, capacity, slots, heads, kv_heads, head_dim, dtype=jnp.float32, rows=None, stride=None, unread=np.nan
):
    """Inputs for blocks of (slot, kv_length, rows), and marked rows; `rows` query rows, if not just those.

    The blocks are a row apart or, with a stride, its multiples. Cache rows that no block may read are `unread`.
    """
    table, first_row = [], 0 if stride else 1
    for slot, kv_length, in_block in blocks:
        table.append((slot, kv_length, first_row, in_block))
        first_row += stride or in_block + 1
    rows = rows or first_row
    read = np.zeros(slots * capacity, bool)
    for slot, kv_length, _, in_block in table:
        if in_block:
            read[slot * capacity : slot * capacity + kv_length] = True

    def normal(n, heads):
        return rng.standard_normal((n, heads, head_dim))

    def cache():
        return jnp.asarray(np.where(read[:, None, None], normal(slots * capacity, kv_heads), unread), dtype)

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


@pytest.mark.parametrize("most", [1, 5, 16])
def test_few_marked_rows_are_counted_alone(most: int):
    """Blocks with as many as there may be, fewer and none, the first row and the last among them; rows in no block."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "capacity": 100, "slots": 4}
    blocks = [(2, 77, 33), (0, 100, 40), (3, 0, 3), (1, 40, 0), (1, 5, 20)]
    inputs, _ = case(np.random.default_rng(most), blocks, rows=103, **shape)
    marked = np.arange(103) == 0  # which is in no block
    for _, _, first, rows in np.asarray(inputs[3])[[0, 1, 4]]:
        marked[[first, first + rows - 1][:most]] = True
    first, rows = np.asarray(inputs[3])[1, 2:]
    marked[np.arange(first + 7, first + rows - 1)[: max(0, most - 2)]] = True
    run = {"capacity": 100, "block_rows": 40, "score_rows": jnp.asarray(marked)}
    _, expected = attention(*inputs, **run)
    out, scores = attention(*inputs, **run, most_scored=most, kernels="interpret")
    assert error(scores, expected) < FLOAT32_ERROR and np.abs(scores).max() > 0
    np.testing.assert_array_equal(out, attention(*inputs, **run, kernels="interpret")[0])


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


def test_aligned_blocks_that_do_not_fit():
    shape = {"capacity": 8, "slots": 2, "heads": 1, "kv_heads": 1, "head_dim": 16, "stride": 4}
    (q, *inputs), _ = case(np.random.default_rng(), [(0, 3, 4), (1, 8, 2)], **shape)
    for wrong in ((q[:-1], *inputs), (q, inputs[0][:8], inputs[1][:8], inputs[2])):
        with pytest.raises(ValueError, match="2 aligned blocks of block_rows=4 and capacity=8 do not fit"):
            scheduled_attention(*wrong, capacity=8, block_rows=4, aligned=True)
    out = [scheduled_attention(q, *inputs, capacity=8, block_rows=4, aligned=aligned) for aligned in (False, True)]
    np.testing.assert_array_equal(*out)


def cudnn_in_xla(q, k, v, *, q_seqlen, kv_seqlen, scale, mask_type, return_residual):
    """What cuDNN computes, of any dtype, and NaN where it may leave anything."""
    assert (scale, mask_type) == (q.shape[-1] ** -0.5, cudnn.fused.MaskType.PADDING)
    out, lse = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=kv_seqlen, return_residual=True)
    inside = (jnp.arange(q.shape[1])[None] < q_seqlen[:, None]) & (jnp.minimum(q_seqlen, kv_seqlen) > 0)[:, None]
    out, lse = jnp.where(inside[..., None, None], out, jnp.nan), jnp.where(inside[..., None], lse, jnp.nan)
    return (out, lse.swapaxes(1, 2)) if return_residual else out


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 1, 16)])
def test_cudnn_results_are_the_kernels(monkeypatch: pytest.MonkeyPatch, heads, kv_heads, head_dim):
    """Values and log-sum-exp of the rows in blocks; the last block is empty."""
    monkeypatch.setattr(cudnn.fused, "dot_product_attention", cudnn_in_xla)
    blocks = [(0, 40, 9), (1, 39, 9), (2, 1, 4), (3, 23, 1), (4, 0, 0)]
    shape = {"capacity": 40, "slots": 5, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    inputs, _ = case(np.random.default_rng(), blocks, **shape, stride=9, unread=0)
    expected, expected_lse = triton.attend(*inputs, capacity=40, block_rows=9, interpret=True)
    out, lse = cudnn.attend(*inputs, with_lse=True)
    assert error(in_blocks(out, inputs[3]), in_blocks(expected, inputs[3])) < FLOAT32_ERROR
    lse, expected_lse = (in_blocks(x, inputs[3]) for x in (lse, expected_lse))
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    alone, nothing = cudnn.attend(*inputs, with_lse=False)
    np.testing.assert_array_equal(alone, out)
    assert nothing is None


CUDNN_CASES = {
    "enough blocks": (True, {}),
    "fp16": (False, {"dtype": jnp.float16}),
    "few KV heads": (True, {"kv_heads": 4, "head_dim": 64}),
    "many rows of a slot": (True, {"slots": 1, "block_rows": 1024}),
    "not aligned": (False, {"aligned": False}),
    "interpreted": (False, {"kernels": "interpret"}),
    "the reference": (False, {"kernels": "xla"}),
    "one slot": (False, {"slots": 1}),
    "few rows": (False, {"block_rows": 64}),
    "fp32": (False, {"dtype": jnp.float32}),
    "wide heads": (False, {"head_dim": 256}),
    "no cuDNN": (False, {"available": False}),
}


@pytest.mark.parametrize(("chosen", "what"), CUDNN_CASES.values(), ids=CUDNN_CASES)
@pytest.mark.parametrize("with_scores", [False, True])
def test_when_cudnn_runs(monkeypatch: pytest.MonkeyPatch, chosen, what, with_scores):
    what = {"slots": 8, "block_rows": 128, "dtype": jnp.bfloat16, "available": True} | what
    run = {"aligned": True, "kernels": "pallas"} | {k: what.pop(k) for k in ("aligned", "kernels") if k in what}
    asked = []

    def attend(q, *_, with_lse):
        asked.append(with_lse)
        return q, jnp.zeros(q.shape[:2]) if with_lse else None

    available = what.pop("available")
    monkeypatch.setattr(cudnn, "available", lambda: available)
    monkeypatch.setattr(cudnn, "attend", attend)
    *inputs, marked = shapes(capacity=1280, **what)
    run |= {"capacity": 1280, "block_rows": what["block_rows"]}
    jax.eval_shape(
        lambda *x: scheduled_attention(*x[:4], **run, score_rows=x[4] if with_scores else None), *inputs, marked
    )
    assert asked == [with_scores] * chosen


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of a machine without a GPU")
def test_cudnn_needs_a_gpu():
    assert not cudnn.available()


@pytest.mark.parametrize("with_lse", [False, True])
def test_cudnn_lowers(monkeypatch: pytest.MonkeyPatch, with_lse):
    """To one call, which reads the cache as it is; it writes a log-sum-exp only where one is asked for."""
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 91000)
    inputs = shapes(8, 100, 1280, jnp.bfloat16, kv_heads=8)[:4]
    lowered = jax.jit(lambda *x: cudnn.attend(*x, with_lse=with_lse)).trace(*inputs)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "__cudnn$fmhaSoftmax" in line)
    assert ("tensor<8x32x100xf32>" in call) == with_lse
    of_cache = [line for line in text.splitlines() if "8x1280x8x128" in line and line != call]
    assert len(of_cache) == 2 and all("stablehlo.reshape" in line for line in of_cache)


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


ALIGNED = [(128, 32, 128), (100, 8, 128), (160, 32, 64), (956, 1, 64)]  # block_rows, kv_heads, head_dim


def of_aligned(unread, *, block_rows, kv_heads, head_dim, dtype, with_scores):
    """Inputs and call of blocks for cuDNN: one key and all, lengths beside the borders of tiles, some rows and none."""
    lengths = (1280, 64, 1, 63, 129, 777, 1279, 0)
    rows = (block_rows, block_rows, block_rows, 1, 65, block_rows - 1, block_rows, 0)
    shape = {"heads": 32, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": 1280, "slots": 8, "dtype": dtype}
    blocks = list(zip(range(8), lengths, rows, strict=True))
    inputs, marked = case(np.random.default_rng(), blocks, **shape, stride=block_rows, unread=unread)
    if not cudnn.preferred(inputs[0], blocks=8, block_rows=block_rows):
        pytest.skip("cuDNN does not run here")
    run = {"capacity": 1280, "block_rows": block_rows, "aligned": True}
    return inputs, run | {"score_rows": marked if with_scores else None}


def slot_errors(ours, expected):
    """The error of every slot by itself: few keys make large values, beside which errors of the others are small."""
    return [error(a, b) for x, y in zip(ours, expected, strict=True) for a, b in zip(*slots_of(x, y), strict=True)]


def slots_of(*arrays):
    return (np.asarray(x, np.float64).reshape(8, -1) for x in arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize(("block_rows", "kv_heads", "head_dim"), ALIGNED)
def test_cudnn_on_gpu(block_rows, kv_heads, head_dim, with_scores):
    """Cache rows that no block may read are large."""
    shape = {"block_rows": block_rows, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": jnp.bfloat16}
    inputs, run = of_aligned(1e3, **shape, with_scores=with_scores)
    assert "__cudnn$fmhaSoftmax" in attention.lower(*inputs, **run, kernels="pallas").as_text()
    expected = jax.tree.leaves(attention(*(x.astype(jnp.float32) for x in inputs[:3]), inputs[3], **run))
    ours = jax.tree.leaves(attention(*inputs, **run, kernels="pallas"))
    for leaves in (ours, expected):  # the last block is empty: its rows mean nothing
        leaves[0] = leaves[0].at[7 * block_rows :].set(0)
    assert max(slot_errors(ours, expected)) < BFLOAT16_ERROR
