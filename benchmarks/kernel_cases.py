"""What `benchmarks.kernels` measures: each operation's inputs, call and floor, at the LLaDA-8B shape or a tiny one."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import roofline
from benchmarks.roofline import LLADA_8B, Shape, Work
from pallas_kernels import (
    Visibility,
    gate_up_silu,
    head_statistics,
    linear_residual_norm,
    matmul,
    qkv_rope_cache,
    qkv_rope_cache_returning,
    scheduled_attention,
    verify_attention,
)
from pallas_kernels.verify_attention import CACHED, DRAFT, PRIVATE, UNDECODED
from pallas_kernels.weight_product import tiles_for

DTYPE = jnp.bfloat16
ROPE_THETA = 500000.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: a model's shape, queries a slot (a draft's, a verify's, a one-pass verify's: ten times its
    candidates) and keys; row counts and slots.
    """

    shape: Shape
    queries: int
    verify_rows: int
    onepass_rows: int
    keys: int
    rows: tuple[int, ...]
    slots: tuple[int, ...]


LARGE = Sizes(
    shape=LLADA_8B, queries=128, verify_rows=32, onepass_rows=96, keys=1280, rows=(64, 96, 128, 1024, 4096),
    slots=(1, 8, 32),
)  # fmt: skip
TINY = Sizes(
    shape=Shape(d_model=64, heads=2, head_dim=32, mlp=96, vocab=300, layers=1),
    queries=16, verify_rows=8, onepass_rows=24, keys=40, rows=(16,), slots=(2,),
)  # fmt: skip
MOST_HEAD_ROWS = 512  # more are never committed at once: 16 a slot

Outputs = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one shape.

    make: from a key, the first call's input and, for each call, its operands. call(carry, operands, kernels): outputs.
    follow(carry, outputs): the next call's input, and what must be kept so that no output goes unused.
    join(carry, kept): makes the next round's input depend on what was kept; the identity where `follow` does already.
    tiled: whether there are tiles for this shape. triton: whether the operation has a kernel in plain Triton too.
    """

    op: str
    at: Mapping[str, int]
    work: Work
    make: Callable[[jax.Array, int], tuple[Any, tuple[Any, ...]]]
    call: Callable[[Any, Any, Any], Outputs]
    follow: Callable[[Any, Outputs], tuple[Any, Any]]
    join: Callable[[Any, Any], Any] = lambda carry, kept: carry
    operand_bytes: float
    tiled: bool = True
    triton: bool = False

    @property
    def name(self) -> str:
        return " ".join([self.op, *(f"{key} {value}" for key, value in self.at.items())])


def _normal(key: jax.Array, *size: int, scale: float = 1.0) -> jax.Array:
    return jax.random.normal(key, size, DTYPE) * jnp.asarray(scale, DTYPE)


def _held(carry: jax.Array, out: jax.Array) -> jax.Array:
    """The carry, not available before the output is: keeps XLA from merging products that share an input."""
    return jax.lax.optimization_barrier((carry, out))[0]


def _qkv_cases(sizes: Sizes, op: str) -> list[Case]:
    """`qkv_rope_cache`, or what a buffer takes, k and v returned."""
    shape, cases, returning = sizes.shape, [], op == "qkv_rope_cache_returning"
    width = shape.heads * shape.head_dim

    def make(rows: int, key: jax.Array, sets: int) -> tuple[Any, tuple[Any, ...]]:
        keys = jax.random.split(key, 4 + sets)
        cache_rows = rows + 64
        row = jax.random.permutation(keys[0], cache_rows)[:rows].astype(jnp.int32)
        position = jax.random.randint(keys[1], (rows,), 0, 4096, jnp.int32)
        caches = (_normal(k, cache_rows, shape.heads, shape.head_dim) for k in keys[2:4])
        x = _normal(keys[3], rows, shape.d_model)
        weights = tuple(_normal(k, 3 * width, shape.d_model, scale=shape.d_model**-0.5) for k in keys[4:])
        return (x, *caches), tuple((weight, position, row) for weight in weights)

    def call(carry: Any, operands: Any, kernels: Any) -> Outputs:
        (x, *caches), (weight, position, row) = carry, operands
        run: dict[str, Any] = {"n_heads": shape.heads, "rope_theta": ROPE_THETA, "kernels": kernels}
        if not returning:
            return qkv_rope_cache(x, weight, None, position, row, *caches, **run)
        q, k, v, *caches = qkv_rope_cache_returning(x, weight, None, position, row, *caches, **run)
        return q, *caches, k, v

    for rows in sizes.rows:
        cases.append(
            Case(
                op=op,
                at={"rows": rows},
                work=roofline.qkv_rope_cache(shape, rows=rows),
                make=lambda key, sets, rows=rows: make(rows, key, sets),
                call=call,
                follow=lambda carry, outputs: ((outputs[0].reshape(carry[0].shape), *outputs[1:3]), outputs[3:]),
                operand_bytes=2 * 3 * width * shape.d_model,
                triton=not returning,
            )
        )
    return cases


def _linear_cases(sizes: Sizes, op: str) -> list[Case]:
    """`linear_residual_norm` as the out-projection or the down-projection."""
    shape, n = sizes.shape, sizes.shape.d_model
    k = shape.heads * shape.head_dim if op == "out" else shape.mlp

    def make(rows: int, key: jax.Array, sets: int) -> tuple[Any, tuple[Any, ...]]:
        keys = jax.random.split(key, 2 + sets)
        weights = tuple(_normal(one, n, k, scale=0.5 * k**-0.5) for one in keys[2:])
        return (_normal(keys[0], rows, k), _normal(keys[1], rows, n)), weights

    def call(carry: Any, weight: Any, kernels: Any) -> Outputs:
        x, residual = carry
        return linear_residual_norm(x, weight, residual, jnp.ones(n, DTYPE), eps=1e-5, kernels=kernels)

    def join(carry: Any, _: Any) -> Any:
        x, residual = carry
        width = min(k, n)
        return x.at[:1, :width].set(jnp.clip(residual[:1, :width], -1, 1)), residual

    return [
        Case(
            op=op,
            at={"rows": rows},
            work=roofline.linear_residual(rows=rows, k=k, n=n),
            make=lambda key, sets, rows=rows: make(rows, key, sets),
            call=call,
            follow=lambda carry, outputs: ((_held(carry[0], outputs[0]), outputs[0]), outputs[1]),
            join=join,
            operand_bytes=2 * n * k,
        )
        for rows in sizes.rows
    ]


def _gate_up_cases(sizes: Sizes) -> list[Case]:
    shape = sizes.shape

    def make(rows: int, key: jax.Array, sets: int) -> tuple[Any, tuple[Any, ...]]:
        keys = jax.random.split(key, 1 + sets)
        weights = tuple(_normal(one, 2 * shape.mlp, shape.d_model, scale=shape.d_model**-0.5) for one in keys[1:])
        return _normal(keys[0], rows, shape.d_model), weights

    return [
        Case(
            op="gate_up_silu",
            at={"rows": rows},
            work=roofline.gate_up_silu(shape, rows=rows),
            make=lambda key, sets, rows=rows: make(rows, key, sets),
            call=lambda x, weight, kernels: (gate_up_silu(x, weight, kernels=kernels),),
            follow=lambda x, outputs: (_held(x, outputs[0]), outputs[0]),
            join=lambda x, kept: x.at[:1].set(jnp.clip(kept[-1][:1, : shape.d_model], -1, 1)),
            operand_bytes=4 * shape.mlp * shape.d_model,
            tiled=tiles_for(matmul.GATE_UP_SILU, rows=rows, k=shape.d_model) is not None,
        )
        for rows in sizes.rows
    ]


def _head_cases(sizes: Sizes) -> list[Case]:
    shape = sizes.shape

    def make(rows: int, key: jax.Array, sets: int) -> tuple[Any, tuple[Any, ...]]:
        keys = jax.random.split(key, 2 + sets)
        given = jax.random.randint(keys[0], (rows,), 0, shape.vocab, jnp.int32)
        heads = tuple(_normal(one, shape.vocab, shape.d_model, scale=2 * shape.d_model**-0.5) for one in keys[2:])
        return _normal(keys[1], rows, shape.d_model), tuple((head, given) for head in heads)

    def call(hidden: Any, operands: Any, kernels: Any) -> Outputs:
        head, given = operands
        token, confidence, probability = head_statistics(
            hidden, head, vocab_size=shape.vocab, given=given, kernels=kernels
        )
        assert probability is not None
        return token, confidence, probability

    return [
        Case(
            op="head_statistics",
            at={"rows": rows},
            work=roofline.head_statistics(shape, rows=rows),
            make=lambda key, sets, rows=rows: make(rows, key, sets),
            call=call,
            follow=lambda hidden, outputs: (_held(hidden, outputs[1]), outputs),
            join=lambda hidden, kept: hidden.at[0, 0].set(kept[-1][1][0].astype(hidden.dtype)),
            operand_bytes=2 * shape.vocab * shape.d_model,
        )
        for rows in sizes.rows
        if rows <= MOST_HEAD_ROWS
    ]


def _attention_cases(sizes: Sizes, op: str) -> list[Case]:
    """`scheduled_attention`, the same with scores of half of the rows, or a buffer's."""
    keys_a_slot, rows = sizes.keys, sizes.queries
    scored = op == "scheduled_attention_scores"

    def make(slots: int, key: jax.Array, sets: int) -> tuple[Any, tuple[Any, ...]]:
        q, _, _, caches, table = _attention_inputs(sizes, rows, slots, key, sets)
        marked = jnp.tile(jnp.arange(rows) >= rows // 2, slots)
        return q, tuple((*pair, table, marked) for pair in caches)

    def call(q: Any, operands: Any, kernels: Any) -> Outputs:
        k_cache, v_cache, table, marked = operands
        run: dict[str, Any] = {"capacity": keys_a_slot, "block_rows": rows, "kernels": kernels, "aligned": True}
        if scored:
            return tuple(scheduled_attention(q, k_cache, v_cache, table, score_rows=marked, **run))
        return (scheduled_attention(q, k_cache, v_cache, table, **run),)

    work = partial(roofline.scheduled_attention, sizes.shape, rows=rows, kv_length=keys_a_slot, scores=scored)
    return _by_slots(sizes, op, rows, work, make, call)


def _buffer_cases(sizes: Sizes, op: str) -> list[Case]:
    """`verify_attention` of a verify pass's buffer, or of a one-pass verify's, with scores."""
    keys_a_slot, one_pass = sizes.keys, op == "onepass_attention"
    rows = sizes.onepass_rows if one_pass else sizes.verify_rows
    # By sixths or halves of the rows. One pass: the window's candidates, the rest of it, of each candidate its plain
    # and its draft view, and what is tracked. Two: a draft and an undecoded row of each candidate.
    candidates = rows // 6 if one_pass else rows // 2
    kinds = (UNDECODED, CACHED, PRIVATE, DRAFT, CACHED, CACHED) if one_pass else (DRAFT, UNDECODED)
    marks = (False, True, True, False, False, False) if one_pass else (False, False)

    def make(slots: int, key: jax.Array, sets: int) -> tuple[Any, tuple[Any, ...]]:
        q, k, v, caches, table = _attention_inputs(sizes, rows, slots, key, sets)
        kind, marked = (jnp.tile(jnp.repeat(jnp.array(x), candidates), slots) for x in (kinds, marks))
        rank = jnp.tile(jnp.arange(rows, dtype=jnp.int32) % candidates, slots)
        seen = Visibility(kind.astype(jnp.int32), rank, rank + 1, rank + 1, jnp.ones(slots * rows, bool))
        buffered = jnp.tile(jnp.arange(keys_a_slot) >= keys_a_slot - candidates, slots)
        return q, tuple((k, v, *pair, table, buffered, seen, marked) for pair in caches)

    def call(q: Any, operands: Any, kernels: Any) -> Outputs:
        *inputs, marked = operands
        run: dict[str, Any] = {"capacity": keys_a_slot, "block_rows": rows, "kernels": kernels}
        if one_pass:
            return tuple(verify_attention(q, *inputs, **run, score_rows=marked))
        return (verify_attention(q, *inputs, **run),)

    work = partial(roofline.verify_attention, sizes.shape, rows=rows, kv_length=keys_a_slot, scores=one_pass)
    return _by_slots(sizes, op, rows, work, make, call)


def _by_slots(
    sizes: Sizes,
    op: str,
    rows: int,
    work: Callable[..., Work],
    make: Callable[[int, jax.Array, int], tuple[Any, tuple[Any, ...]]],
    call: Callable[[Any, Any, Any], Outputs],
) -> list[Case]:
    """A case of attention for each number of slots."""
    return [
        Case(
            op=op,
            at={"slots": slots, "rows": rows, "keys": sizes.keys},
            work=work(slots=slots),
            make=partial(make, slots),
            call=call,
            follow=lambda q, outputs: (outputs[0], outputs[1:]),
            operand_bytes=4 * slots * sizes.keys * sizes.shape.heads * sizes.shape.head_dim,
        )
        for slots in sizes.slots
    ]


def _attention_inputs(
    sizes: Sizes, rows: int, slots: int, key: jax.Array, sets: int
) -> tuple[jax.Array, jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]], jax.Array]:
    """q, k and v of `rows` rows a slot, `sets` caches, and the block table."""
    shape, keys = sizes.shape, jax.random.split(key, 3 + 2 * sets)
    slot = jnp.arange(slots, dtype=jnp.int32)
    table = jnp.stack([slot, jnp.full_like(slot, sizes.keys), slot * rows, jnp.full_like(slot, rows)], axis=1)
    q, k, v = (_normal(one, slots * rows, shape.heads, shape.head_dim) for one in keys[:3])
    caches = [_normal(one, slots * sizes.keys, shape.heads, shape.head_dim) for one in keys[3:]]
    return q, k, v, list(zip(caches[::2], caches[1::2], strict=True)), table


OPS: Mapping[str, Callable[[Sizes], list[Case]]] = {
    "qkv_rope_cache": lambda sizes: _qkv_cases(sizes, "qkv_rope_cache"),
    "qkv_rope_cache_returning": lambda sizes: _qkv_cases(sizes, "qkv_rope_cache_returning"),
    "out": lambda sizes: _linear_cases(sizes, "out"),
    "gate_up_silu": _gate_up_cases,
    "down": lambda sizes: _linear_cases(sizes, "down"),
    "head_statistics": _head_cases,
    "scheduled_attention": lambda sizes: _attention_cases(sizes, "scheduled_attention"),
    "scheduled_attention_scores": lambda sizes: _attention_cases(sizes, "scheduled_attention_scores"),
    "verify_attention": lambda sizes: _buffer_cases(sizes, "verify_attention"),
    "onepass_attention": lambda sizes: _buffer_cases(sizes, "onepass_attention"),
}
