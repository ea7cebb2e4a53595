"""Rung 1 of the exactness ladder: a packed forward equals the PyTorch reference, any batch mix, any padding."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from fdllm_jax.cache import KVCache, allocate
from fdllm_jax.model import LLaDA, from_parameters, parameter_shapes, parameters_of
from fdllm_jax.query import Query, packed_query
from tests.decode import load
from tests.reference.checkpoint import random_checkpoint
from tests.reference.model import ReferenceLLaDA

CAPACITY = 24
SHAPES = {
    "plain": {},
    "grouped": {"n_heads": 4, "n_kv_heads": 2},
    "one KV head": {"n_heads": 4, "n_kv_heads": None, "multi_query_attention": True},
    "biases": {"include_qkv_bias": True, "n_kv_heads": 1},
    "tied": {"weight_tying": True},
    "scaled, padded vocabulary": {"scale_logits": True, "embedding_size": 128, "vocab_size": 90},
    "MLP by ratio": {"mlp_hidden_size": None, "mlp_ratio": 3},
    "wide heads": {"n_heads": 1, "n_kv_heads": 1, "rope_theta": 500000.0},
}


def relative(ours: jax.Array | np.ndarray, reference: torch.Tensor) -> float:
    """max |a - b| / max |b|."""
    b = reference.detach().numpy()
    return float(np.abs(np.asarray(ours, b.dtype) - b).max() / np.abs(b).max())


def distance(ours: jax.Array | np.ndarray, reference: torch.Tensor) -> float:
    """|a - b| / |b|, Euclidean norms over everything."""
    b = reference.detach().float().numpy()
    return float(np.linalg.norm(np.asarray(ours, np.float32) - b) / np.linalg.norm(b))


@nnx.jit
def all_logits(model: LLaDA, query: Query, cache: KVCache) -> jax.Array:
    return model.logits(model(query, cache).hidden)


def packed_logits(model: LLaDA, sequences: list[list[int]], capacity: int) -> list[jax.Array]:
    """Logits of each whole sequence, all in one packed pass; slots and padding hold garbage."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (len(sequences), capacity))
    for slot, sequence in enumerate(sequences):
        tokens[slot, : len(sequence)] = sequence
    cache = allocate(model.config, slots=len(sequences), capacity=capacity, dtype=model.embedding[...].dtype)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)  # what is not written must not be read
    lengths = jnp.array([len(s) for s in sequences], jnp.int32)
    query, first = packed_query(jnp.asarray(tokens, jnp.int32), lengths, rows=len(sequences) * capacity)
    logits = all_logits(model, query, cache)
    return [logits[start : start + len(sequence)] for start, sequence in zip(first.tolist(), sequences, strict=True)]


def ragged(seed: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in (CAPACITY, 1, 17, 0, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_forward_equals_reference(tmp_path: Path, shape: str, kernels: str) -> None:
    random_checkpoint(tmp_path, seed=1, **SHAPES[shape])
    # a reference in fp64: only our rounding counts, not its own, which the sharp random model makes as large
    model, reference = load(tmp_path, kernels=kernels), ReferenceLLaDA.from_directory(tmp_path, torch.float64)
    sequences = ragged(1, model.config.vocab_size)
    for sequence, ours in zip(sequences, packed_logits(model, sequences, CAPACITY), strict=True):
        if sequence:
            assert relative(ours, reference.sequence(torch.tensor(sequence))) < 1e-5


@pytest.mark.parametrize("shape", ["grouped", "biases"])
def test_kernels_equal_reference_in_the_whole_model(tmp_path: Path, shape: str) -> None:
    """Rung 8, end to end: the kernels' code, in interpret mode."""
    test_packed_forward_equals_reference(tmp_path, shape, "interpret")


def test_bf16_forward_is_as_near_to_fp32_as_the_reference_in_bf16(tmp_path: Path) -> None:
    """Both round, in another order: ours may be off fp32 by 5 % (of the norm), and by no more than 1.2 times theirs."""
    random_checkpoint(tmp_path, seed=2)
    exact = ReferenceLLaDA.from_directory(tmp_path)
    rounded = ReferenceLLaDA.from_directory(tmp_path, torch.bfloat16)
    model = load(tmp_path, jnp.dtype(jnp.bfloat16))
    ours, theirs = [], []
    for sequence in ragged(2, model.config.vocab_size):
        if sequence:
            truth = exact.sequence(torch.tensor(sequence))
            ours.append(distance(packed_logits(model, [sequence], CAPACITY)[0], truth))
            theirs.append(distance(rounded.sequence(torch.tensor(sequence)).float().detach().numpy(), truth))
    assert max(ours) < 0.05
    assert np.mean(ours) < 1.2 * np.mean(theirs)


def test_padding_and_batch_mates_have_no_influence(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, seed=3)
    model = load(tmp_path)
    sequences = ragged(3, model.config.vocab_size)
    others = [*ragged(4, model.config.vocab_size)[:2], sequences[2], *ragged(5, model.config.vocab_size)[3:]]
    together, mixed = packed_logits(model, sequences, CAPACITY)[2], packed_logits(model, others, CAPACITY)[2]
    assert np.array_equal(together, mixed)


def test_partial_query_through_the_cache_equals_full_pass(tmp_path: Path) -> None:
    """Rows packed in any order and blocks of any size: a second pass over some rows sees the others in the cache."""
    random_checkpoint(tmp_path, seed=4, n_layers=1)
    model = load(tmp_path)
    sequences = ragged(6, model.config.vocab_size)[:3]
    lengths = jnp.array([len(s) for s in sequences], jnp.int32)
    tokens = np.zeros((3, CAPACITY), np.int32)
    for slot, sequence in enumerate(sequences):
        tokens[slot, : len(sequence)] = sequence
    cache = allocate(model.config, slots=3, capacity=CAPACITY, dtype=jnp.dtype(jnp.float32))
    query, first = packed_query(jnp.asarray(tokens), lengths, rows=3 * CAPACITY)
    full = model(query, cache)
    slot = np.array([2, 2, 2, 0, 0, 0, 0, 1], np.int32)
    position = np.array([16, 3, 9, 23, 0, 5, 6, 0], np.int32)
    query = Query(
        token=jnp.asarray(tokens[slot, position]),
        position=jnp.asarray(position),
        slot=jnp.asarray(slot),
        write=jnp.array([True] * 8),
        block_table=jnp.array([[2, 17, 0, 3], [0, 24, 3, 2], [0, 24, 5, 2], [1, 1, 7, 1], [0, 0, 0, 0]], jnp.int32),
        block_rows=3,
    )
    partial = model(query, full.cache)
    expected = full.hidden[first[slot] + position]
    np.testing.assert_allclose(partial.hidden, expected, rtol=1e-5, atol=1e-5)
    for before, after in zip(jax.tree.leaves(full.cache), jax.tree.leaves(partial.cache), strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_write_leave_the_cache(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, seed=5)
    model = load(tmp_path)
    cache = allocate(model.config, slots=1, capacity=CAPACITY, dtype=jnp.dtype(jnp.float32))
    token, length = jnp.arange(CAPACITY, dtype=jnp.int32)[None], jnp.array([CAPACITY], jnp.int32)
    query, _ = packed_query(token, length, rows=CAPACITY)
    write = query.write & (jnp.arange(CAPACITY) % 2 == 0)
    query = Query(
        token=query.token, position=query.position, slot=query.slot, write=write,
        block_table=query.block_table, block_rows=query.block_rows,
    )  # fmt: skip
    for array in jax.tree.leaves(model(query, cache).cache):
        assert np.asarray(array[1::2] == 0).all()
        assert not np.asarray(array[::2] == 0).all(axis=(1, 2)).any()


def test_dense_pass_equals_reference(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, seed=6, include_qkv_bias=True)
    model, reference = load(tmp_path), ReferenceLLaDA.from_directory(tmp_path, torch.float64)
    tokens = np.random.default_rng(6).integers(0, 90, (2, 9))
    embedded = model.embedding[...][jnp.asarray(tokens, jnp.int32)]
    with jax.default_matmul_precision("highest"):  # for the attention: the model names its own
        hidden = model.dense(embedded, lambda q, k, v: jax.nn.dot_product_attention(q, k, v))
    assert relative(model.logits(hidden), reference(torch.tensor(tokens))) < 1e-5


def test_parameters_round_trip_and_are_checked(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, seed=7, include_qkv_bias=True, weight_tying=True)
    model = load(tmp_path)
    parameters = parameters_of(model)
    assert {name: value.shape for name, value in parameters.items()} == parameter_shapes(model.config)
    del parameters["final_norm"]
    parameters["layers.1.qkv"] = parameters["layers.1.qkv"].T
    with pytest.raises(ValueError, match=r"final_norm, layers\.1\.qkv"):
        from_parameters(model.config, parameters)
