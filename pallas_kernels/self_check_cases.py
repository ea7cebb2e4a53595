"""What the check at start-up runs of each operation: random inputs of a model's shape, and what to compare.

The numbers of rows are such that every case of the tables of tiles has its turn.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import scheduled_attention_cudnn
from pallas_kernels.flash import CUDNN_PROGRAMS, PROGRAMS
from pallas_kernels.head_statistics import Noise, head_statistics
from pallas_kernels.implementation import Implementation, precision_of
from pallas_kernels.matmul import gate_up_silu, linear_residual_norm
from pallas_kernels.qkv_rope_cache import qkv_rope_cache, qkv_rope_cache_returning
from pallas_kernels.scheduled_attention import scheduled_attention
from pallas_kernels.verify_attention import Visibility, verify_attention

ROWS = (13, 32, 64, 128)  # the first ends within a tile
FEW, MANY = ROWS[0], ROWS[-1]
MORE = 131  # rows of a product that XLA makes at a large model's shape
FEW_SCORED = 40  # of the rows of a block
BLOCK_ROWS = ((FEW, False), (32, False), (MANY, False), (MANY, True))  # True: many blocks
POSITIONS = 4096
CAPACITY, KV_LENGTHS = 320, (300, 77)  # of two slots; no length is a multiple of a tile
VOCABULARY = 8100  # most ids of the head that are looked at; they end within a tile
EPS = 1e-5
TIE = 1e-4  # noisy logits (fp32 sums whatever the dtype) that differ by less, relatively, are as good as equal

Outputs = Iterable[tuple[str, Array]]  # what it is, value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the shapes of a model's operations derive from. Sizes count elements."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    qkv_bias: bool
    rope_theta: float

    @classmethod
    def of(cls, model: Any) -> Self:
        """The shape of anything that has these attributes, such as a model's configuration."""
        return cls(**{field.name: getattr(model, field.name) for field in fields(cls)})


class Check(NamedTuple):
    """inputs: random inputs from (key, shape, dtype). outputs: what to compare, from (inputs, shape, kernels)."""

    inputs: Callable[[Array, ModelShape, np.dtype], Any]
    outputs: Callable[[Any, ModelShape, Implementation], Outputs]


class _Random:
    """Random arrays, each from a key of its own."""

    def __init__(self, key: Array, dtype: np.dtype):
        self.keys, self.dtype = iter(jax.random.split(key, 16)), dtype

    def normal(self, *size: int, scale: float = 1.0) -> Array:
        return (scale * jax.random.normal(next(self.keys), size, self.dtype)).astype(self.dtype)

    def weight(self, columns: int, k: int) -> Array:
        """Of which a product with normal numbers is normal."""
        return self.normal(columns, k, scale=k**-0.5)

    def below(self, end: int, *size: int) -> Array:
        return jax.random.randint(next(self.keys), size, 0, end, jnp.int32)

    def truth(self, probability: float, *size: int) -> Array:
        return jax.random.bernoulli(next(self.keys), probability, size)


def _qkv_inputs(key: Array, shape: ModelShape, dtype: np.dtype) -> dict[str, Any]:
    """Every third row writes nothing."""
    random, columns = _Random(key, dtype), (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    row, cache_rows = jnp.arange(MORE, dtype=jnp.int32), 2 * MORE
    cache = (cache_rows, shape.n_kv_heads, shape.head_dim)
    return {
        "x": random.normal(MORE, shape.d_model),
        "weight": random.weight(columns, shape.d_model),
        "bias": random.normal(columns) if shape.qkv_bias else None,
        "position": random.below(POSITIONS, MORE),
        "cache_row": jnp.where(row % 3 == 0, cache_rows, row * 7 % cache_rows),
        "k_cache": random.normal(*cache),
        "v_cache": random.normal(*cache),
    }


def _qkv_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    call = {"n_heads": shape.n_heads, "rope_theta": shape.rope_theta, "kernels": kernels}
    caches, per_row = [inputs[name] for name in ("k_cache", "v_cache")], ("x", "position", "cache_row")
    of_op = {qkv_rope_cache: (MANY, MORE), qkv_rope_cache_returning: (*ROWS, MORE)}
    for op, rows in ((op, rows) for op, its in of_op.items() for rows in its):
        some = inputs | {name: inputs[name][:rows] for name in per_row}
        *of_rows, k_cache, v_cache = op(**some, **call)
        for name, value in zip("qkv", of_rows, strict=False):
            yield f"{name} of {op.__name__} at {rows} rows", value
        written = jnp.zeros(len(k_cache), bool).at[some["cache_row"]].set(True, mode="drop")
        for name, before, after in zip(("k_cache", "v_cache"), caches, (k_cache, v_cache), strict=True):
            mask = written[:, None, None]
            yield f"rows written to {name} at {rows} rows ({op.__name__})", jnp.where(mask, after, 0)
            kept = jnp.all(mask | (before == after), axis=(1, 2))
            yield f"rows kept of {name} at {rows} rows ({op.__name__})", kept


def _linear_residual_norm_inputs(key: Array, shape: ModelShape, dtype: np.dtype) -> dict[str, Any]:
    random, sizes = _Random(key, dtype), {"attention": shape.n_heads * shape.head_dim, "MLP": shape.mlp_size}
    return {
        name: (
            random.normal(MORE, k),
            random.weight(shape.d_model, k),
            random.normal(MORE, shape.d_model),
            random.normal(shape.d_model),
        )
        for name, k in sizes.items()
    }


def _linear_residual_norm_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    for name, (x, weight, residual, norm) in inputs.items():
        for rows in (*ROWS, MORE):
            out = linear_residual_norm(x[:rows], weight, residual[:rows], norm, eps=EPS, kernels=kernels)
            yield from zip((f"{what} {rows} rows after {name}" for what in ("sum of", "norm of")), out, strict=True)


def _gate_up_silu_inputs(key: Array, shape: ModelShape, dtype: np.dtype) -> tuple[Array, Array]:
    random = _Random(key, dtype)
    return random.normal(MANY, shape.d_model), random.weight(2 * shape.mlp_size, shape.d_model)


def _gate_up_silu_outputs(inputs: tuple[Array, Array], shape: ModelShape, kernels: Implementation) -> Outputs:
    x, weight = inputs
    for rows in ROWS:
        yield f"{rows} rows", gate_up_silu(x[:rows], weight, kernels=kernels)


def _head_statistics_inputs(key: Array, shape: ModelShape, dtype: np.dtype) -> dict[str, Any]:
    """Logits of a unit or two: the rounding of a larger one shows in its probability. Half the temperatures are 0."""
    random, vocabulary = _Random(key, dtype), min(shape.vocab_size, VOCABULARY)
    return {
        "hidden": random.normal(MANY, shape.d_model, scale=0.5),
        "head": random.weight(vocabulary, shape.d_model),
        "given": random.below(vocabulary, MANY),
        "noise": Noise(jax.random.split(next(random.keys), MANY), 0.2 * (jnp.arange(MANY) % 2).astype(jnp.float32)),
    }


def _head_statistics_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    """The token as whether it is the best one, up to ties; its probability as a multiple of what it should be."""
    head = inputs["head"]
    for rows in (FEW, MANY):
        hidden, given, noise = jax.tree.map(lambda x, n=rows: x[:n], [inputs[n] for n in ("hidden", "given", "noise")])
        logits = jnp.einsum(
            "rd,vd->rv", hidden, head, precision=precision_of(hidden.dtype), preferred_element_type=jnp.float32
        )
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (len(head),)))(noise.key)
        for case in (None, noise):
            found = head_statistics(hidden, head, vocab_size=len(head), given=given, noise=case, kernels=kernels)
            noisy = logits if case is None else logits + case.temperature[:, None] * gumbel
            token, best = found.token[:, None], jnp.max(noisy, axis=1)
            of_token, probability = (
                jnp.take_along_axis(x, token, axis=1)[:, 0] for x in (noisy, jax.nn.softmax(logits, axis=1))
            )
            at = f"at {rows} rows {'without' if case is None else 'with'} noise"
            yield f"token {at}", best - of_token <= TIE * jnp.abs(best)
            yield f"confidence {at}", found.confidence / probability
            assert found.given_probability is not None
            yield f"given_probability {at}", found.given_probability


def _attention_inputs(key: Array, shape: ModelShape, dtype: np.dtype) -> dict[str, Any]:
    """Rows of two blocks; a cache of two slots."""
    random, rows, cache_rows = _Random(key, dtype), 2 * MANY, 2 * CAPACITY
    of_heads, of_kv_heads = (shape.n_heads, shape.head_dim), (shape.n_kv_heads, shape.head_dim)
    return {
        "q": random.normal(rows, *of_heads),
        "k": random.normal(rows, *of_kv_heads),
        "v": random.normal(rows, *of_kv_heads),
        "k_cache": random.normal(cache_rows, *of_kv_heads),
        "v_cache": random.normal(cache_rows, *of_kv_heads),
        "score_rows": random.truth(0.3, rows),
        "buffered": random.truth(0.2, cache_rows),
        "visibility": Visibility(
            kind=random.below(5, rows),
            rank=random.below(16, rows),
            draft_cutoff=random.below(16, rows),
            undecoded_cutoff=random.below(16, rows),
            sees_self=random.truth(0.5, rows),
        ),
    }


def _block_table(rows: int, heads: int, *, wide: bool) -> Array:
    """Two blocks of up to `rows` rows, each a slot, then empty ones; `wide`: enough for the tiles of large batches."""
    blocks = [(1, KV_LENGTHS[1], 0, rows - 3), (0, KV_LENGTHS[0], rows - 3, rows)]
    return jnp.array(blocks + [(0, 0, 0, 0)] * (1 + wide * PROGRAMS // (2 * heads)), jnp.int32)


def _attention_outputs(
    inputs: dict[str, Any],
    shape: ModelShape,
    kernels: Implementation,
    *,
    op: Callable[..., Any],
    of_rows: tuple[str, ...],
    of_cache: tuple[str, ...],
) -> Outputs:
    """Attention and, but for the widest tiles, its scores; the operation takes these inputs."""
    for rows, wide in BLOCK_ROWS:
        used = 2 * rows - 3  # rows in no block mean nothing
        some = {name: inputs[name] for name in of_cache}
        some |= {name: jax.tree.map(lambda x, n=used: x[:n], inputs[name]) for name in of_rows}
        table = _block_table(rows, shape.n_heads, wide=wide)
        score_rows = None if wide else inputs["score_rows"][:used]
        out = op(**some, block_table=table, capacity=CAPACITY, block_rows=rows, score_rows=score_rows, kernels=kernels)
        for name, value in zip(("attended", "scores"), jax.tree.leaves(out), strict=False):
            yield f"{name}, blocks of {rows} rows{' and many blocks' * wide}", value


def _scheduled_attention_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    of_cache = ("k_cache", "v_cache")
    yield from _attention_outputs(inputs, shape, kernels, op=scheduled_attention, of_rows=("q",), of_cache=of_cache)
    yield from _aligned_outputs(inputs, shape, kernels)
    yield from _few_scored_outputs(inputs, shape, kernels)


def _few_scored_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    """Scores of blocks with few marked rows, as those of a prefill."""
    used = 2 * MANY - 3
    some = {name: inputs[name] for name in ("k_cache", "v_cache")} | {"q": inputs["q"][:used]}
    marked = inputs["score_rows"][:used] & (jnp.arange(used) % MANY < FEW_SCORED)
    call: dict[str, Any] = {"capacity": CAPACITY, "block_rows": MANY, "score_rows": marked, "most_scored": FEW_SCORED}
    table = _block_table(MANY, shape.n_heads, wide=False)
    _, scores = scheduled_attention(**some, block_table=table, **call, kernels=kernels)
    yield "scores of few rows", scores


def _aligned_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    """As many aligned blocks as cuDNN is used for, if it is, with scores and without: the two slots over and over."""
    copies = -(-CUDNN_PROGRAMS // (2 * shape.n_heads))
    slots, rows = 2 * copies, MANY - 3
    q, k_cache, v_cache = (jnp.tile(inputs[name], (copies, 1, 1)) for name in ("q", "k_cache", "v_cache"))
    if not scheduled_attention_cudnn.preferred(q, blocks=slots, block_rows=MANY):
        return
    table = jnp.array([(i, KV_LENGTHS[i % 2], i * MANY, rows) for i in range(slots)], jnp.int32)
    for score_rows in (None, jnp.tile(inputs["score_rows"], copies)):
        call: dict[str, Any] = {"capacity": CAPACITY, "block_rows": MANY, "aligned": True, "kernels": kernels}
        out = scheduled_attention(q, k_cache, v_cache, table, score_rows=score_rows, **call)
        attended, *scores = jax.tree.leaves(out)
        at = f"of aligned blocks with{'out' * (score_rows is None)} scores"
        yield f"attended {at}", attended.reshape(slots, MANY, -1)[:, :rows]
        yield from ((f"scores {at}", value) for value in scores)


def _verify_attention_outputs(inputs: dict[str, Any], shape: ModelShape, kernels: Implementation) -> Outputs:
    of_rows, of_cache = ("q", "k", "v", "visibility"), ("k_cache", "v_cache", "buffered")
    return _attention_outputs(inputs, shape, kernels, op=verify_attention, of_rows=of_rows, of_cache=of_cache)


CHECKS = {
    "qkv_rope_cache": Check(_qkv_inputs, _qkv_outputs),
    "scheduled_attention": Check(_attention_inputs, _scheduled_attention_outputs),
    "verify_attention": Check(_attention_inputs, _verify_attention_outputs),
    "head_statistics": Check(_head_statistics_inputs, _head_statistics_outputs),
    "linear_residual_norm": Check(_linear_residual_norm_inputs, _linear_residual_norm_outputs),
    "gate_up_silu": Check(_gate_up_silu_inputs, _gate_up_silu_outputs),
}
