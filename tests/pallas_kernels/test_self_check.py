"""The check at start-up: kernels pass, and every way to be wrong is found, in each output of each operation.

Wrong kernels are the reference with one thing changed. There only the references are jitted, so that a change compiles
nothing anew.
"""

import functools
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import XLA, Kernels, scheduled_attention_cudnn, self_check, self_check_cases
from pallas_kernels.flash import TILES
from pallas_kernels.flash import tiles_for as attention_tiles
from pallas_kernels.head_statistics_kernel import CASES as HEAD
from pallas_kernels.matmul import GATE_UP_SILU, LINEAR_RESIDUAL
from pallas_kernels.qkv_rope_cache_kernel import CASES as QKV
from pallas_kernels.self_check import LIMITS, ModelShape, _fault, _fault_of, _inputs, checked
from pallas_kernels.self_check_cases import BLOCK_ROWS, CHECKS, FEW, MANY, ROWS, Check, _block_table
from pallas_kernels.weight_product import tiles_for
from tests.pallas_kernels.lowering import lower_for_cuda

TINY = ModelShape(
    d_model=32, n_heads=4, n_kv_heads=2, head_dim=16, mlp_size=40, vocab_size=140, qkv_bias=True, rope_theta=1e4
)
LLADA_8B = ModelShape(
    d_model=4096, n_heads=32, n_kv_heads=32, head_dim=128, mlp_size=12288, vocab_size=126464, qkv_bias=False,
    rope_theta=5e5,
)  # fmt: skip
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
KERNELS = Kernels.all("interpret")
# function of an operation -> its arrays
OUTPUTS = {
    "qkv_rope_cache": ("q", "k_cache", "v_cache"),
    "qkv_rope_cache_returning": ("q", "k", "v", "k_cache", "v_cache"),
    "scheduled_attention": ("attended", "scores"),
    "verify_attention": ("attended", "scores"),
    "head_statistics": ("token", "confidence", "given_probability"),
    "linear_residual_norm": ("sum", "norm"),
    "gate_up_silu": ("rows",),
}


KERNELS_OF = {  # where they are not one of its name
    "qkv_rope_cache": ("qkv_rope_cache", "qkv_rope_cache_returning", "rope_cache"),
    "linear_residual_norm": ("linear_parts", "add_and_norm"),
}


def operation(function: str) -> str:
    return function.removesuffix("_returning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _fault_of.cache_clear()
    yield
    _fault_of.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small cases, of few shapes to compile."""
    sizes = {"ROWS": (13,), "FEW": 13, "MANY": 13, "MORE": 13, "BLOCK_ROWS": ((13, False),), "PROGRAMS": 8}
    sizes |= {"CAPACITY": 100, "KV_LENGTHS": (75, 33)}
    for name, value in sizes.items():
        monkeypatch.setattr(self_check_cases, name, value)


@pytest.fixture
def eager(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check without its jit, on inputs that are made once."""
    monkeypatch.setattr(self_check, "_inputs", inputs_once)
    monkeypatch.setattr(self_check, "_outputs", outputs_eagerly)


@functools.cache
def inputs_once(check: Check, shape: ModelShape, dtype: np.dtype) -> Any:
    return _inputs(check, shape, dtype)


def outputs_eagerly(check: Check, inputs: Any, shape: ModelShape, kernels: str) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, dict(check.outputs(inputs, shape, kernels)))


STATICS = ("eps", "n_heads", "rope_theta", "vocab_size", "capacity", "block_rows", "aligned", "most_scored")
REFERENCES = {
    name: jax.jit(
        function := getattr(self_check_cases, name),
        static_argnames=[n for n in STATICS if n in inspect.signature(function).parameters],
    )
    for name in OUTPUTS
}


@pytest.fixture
def kernel(eager: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Every kernel is the reference; `kernel(function, change)` makes one return `change` of the reference's result."""

    def set_kernel(function: str, change: Callable[[Any], Any]) -> None:
        @functools.wraps(REFERENCES[function])
        def run(*inputs, kernels, **call):
            out = REFERENCES[function](*inputs, **call)
            return out if kernels == "xla" else change(out)

        monkeypatch.setattr(self_check_cases, function, run)

    monkeypatch.setattr(self_check_cases, "BLOCK_ROWS", ((13, False), (13, True)))
    for function in OUTPUTS:
        set_kernel(function, lambda out: out)
    return set_kernel


def changed(which: int, change: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
    """A change of one array of a result, if it has that many."""

    def run(out):
        leaves, structure = jax.tree.flatten(out)
        if which < len(leaves):
            leaves[which] = change(leaves[which])
        return structure.unflatten(leaves)

    return run


def the_warning(kernels: Kernels, shape: ModelShape = TINY, dtype: np.dtype = FLOAT32) -> tuple[Kernels, str]:
    """What `checked` makes of the kernels, and the text of its one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = checked(kernels, shape, dtype)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    return result, str(warning.message)


def test_every_operation_has_a_check():
    assert set(CHECKS) == {field.name for field in fields(Kernels)} == {operation(name) for name in OUTPUTS}


@pytest.mark.parametrize("op", CHECKS)
def test_kernels_pass(op: str, small: None):
    kernels = replace(XLA, **{op: "interpret"})
    assert checked(kernels, TINY, FLOAT32) == kernels  # a warning would be an error


def test_kernels_pass_in_bfloat16(small: None):
    kernels = replace(XLA, gate_up_silu="interpret")
    assert checked(kernels, TINY, BFLOAT16) == kernels


@pytest.mark.parametrize("function", OUTPUTS)
def test_a_wrong_kernel_falls_back_alone(function: str, kernel: Callable[..., None]):
    kernel(function, changed(0, lambda x: x + 1))
    result, message = the_warning(KERNELS)
    assert result == replace(KERNELS, **{operation(function): "xla"})
    assert f"the kernel of {operation(function)} failed its check on {jax.devices()[0].device_kind}" in message
    assert "limit 1e-05" in message and "XLA runs, slower" in message


@pytest.mark.parametrize("fault", ["wrong", "NaN"])
@pytest.mark.parametrize(("function", "which"), [(f, i) for f, names in OUTPUTS.items() for i in range(len(names))])
def test_every_output_is_compared(function: str, which: int, fault: str, kernel: Callable[..., None]):
    """Three times the limit off everywhere, one token of many, or one NaN."""

    def change(x: jax.Array) -> jax.Array:
        at = np.random.default_rng().integers(x.size)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x.at[at].set((x[at] + 1) % TINY.vocab_size)
        if fault == "NaN":
            return x.reshape(-1).at[at].set(jnp.nan).reshape(x.shape)
        return x * (1 + 3 * LIMITS[4])

    kernel(function, changed(which, change))
    op = operation(function)
    result, message = the_warning(replace(XLA, **{op: "interpret"}))
    assert result == XLA
    kind = OUTPUTS[function][which]
    assert kind in message and ("error inf" in message) == (fault == "NaN" or kind in ("token", "k_cache", "v_cache"))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", ["linear_residual_norm", "gate_up_silu"])
def test_the_limit_is_that_of_the_dtype(op: str, dtype: np.dtype, kernel: Callable[..., None]):
    def off_by(error: float) -> None:
        kernel(op, changed(0, lambda x: (x.astype(jnp.float32) * (1 + error)).astype(x.dtype)))

    limit, kernels = LIMITS[dtype.itemsize], replace(XLA, **{op: "interpret"})
    off_by(limit / 2)
    assert checked(kernels, TINY, dtype) == kernels
    _fault_of.cache_clear()
    off_by(2 * limit)
    assert the_warning(kernels, dtype=dtype)[0] == XLA


@pytest.mark.parametrize("cache", [-2, -1])
@pytest.mark.parametrize(("function", "caches"), [("qkv_rope_cache", (1, 2)), ("qkv_rope_cache_returning", (3, 4))])
def test_a_row_that_must_not_be_written(function: str, caches: tuple, cache: int, kernel: Callable[..., None]):
    kernel(function, changed(caches[cache], lambda x: x.at[0, 0, 0].add(1e-6)))
    result, message = the_warning(replace(XLA, qkv_rope_cache="interpret"))
    assert result == XLA
    assert f"rows kept of {OUTPUTS[function][cache]}" in message


def test_tokens_that_are_as_good_are_no_fault(kernel: Callable[..., None]):
    def inputs(*arguments):
        made = CHECKS["head_statistics"].inputs(*arguments)
        return made | {"head": jnp.zeros_like(made["head"]), "noise": made["noise"]._replace(temperature=jnp.zeros(13))}

    kernel("head_statistics", changed(0, lambda token: token + 1))
    assert _fault(CHECKS["head_statistics"]._replace(inputs=inputs), "interpret", TINY, FLOAT32) is None


@pytest.mark.parametrize("function", OUTPUTS)
def test_a_kernel_that_raises(function: str, kernel: Callable[..., None]):
    def fail(out):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory\nand a long report")

    kernel(function, fail)
    op = operation(function)
    result, message = the_warning(replace(XLA, **{op: "interpret"}))
    assert result == XLA
    assert f"{op} failed" in message and "JaxRuntimeError: RESOURCE_EXHAUSTED: shared memory)" in message


def test_a_shape_without_a_kernel_falls_back(eager: None):
    shape = replace(TINY, head_dim=24)  # no power of two
    result, message = the_warning(replace(XLA, scheduled_attention="interpret"), shape)
    assert result == XLA and "head_dim=24 has no Pallas kernel" in message


def test_nothing_is_checked_twice(kernel: Callable[..., None]):
    runs = []
    kernel("gate_up_silu", lambda out: runs.append(1) or out)
    kernel("linear_residual_norm", lambda out: runs.append(1) or out * 2)
    kernels = replace(XLA, gate_up_silu="interpret", linear_residual_norm="interpret")
    expected = replace(kernels, linear_residual_norm="xla")
    assert the_warning(kernels)[0] == expected
    once = len(runs)
    assert the_warning(kernels)[0] == expected
    assert len(runs) == once
    for n, (shape, dtype) in enumerate([(TINY, BFLOAT16), (replace(TINY, mlp_size=48), FLOAT32)], start=2):
        assert the_warning(kernels, shape, dtype)[0] == expected
        assert len(runs) == n * once


def test_programs_are_compiled_side_by_side_and_run_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """Two that run at once abort the process on a GPU (see `pallas_kernels.turns`)."""
    running, together, compiling = [], [], threading.Barrier(len(CHECKS), timeout=60)

    def slow(x: np.ndarray) -> np.ndarray:
        running.append(1)
        together.append(len(running))
        time.sleep(0.01)
        running.pop()
        return x

    def inputs(*_: Any) -> jax.Array:
        compiling.wait()
        return outputs(jnp.zeros(2))["x"]

    def outputs(x: jax.Array, *_: Any) -> dict[str, jax.Array]:
        return {"x": jax.pure_callback(slow, x, x)}

    for op in list(CHECKS):
        monkeypatch.setitem(CHECKS, op, Check(inputs, lambda *of: outputs(*of).items()))
    assert checked(KERNELS, TINY, FLOAT32) == KERNELS
    assert together == [1] * 3 * len(CHECKS)


def test_xla_is_not_checked(monkeypatch: pytest.MonkeyPatch):
    for op in list(CHECKS):
        monkeypatch.delitem(CHECKS, op)
    assert checked(XLA, TINY, FLOAT32) == XLA


def test_the_engine_checks_its_kernels(monkeypatch: pytest.MonkeyPatch):
    from fdllm_jax import engine  # which needs more packages than the rest of this file

    calls = []
    monkeypatch.setattr(engine, "checked", lambda *arguments: calls.append(arguments) or XLA)
    llm = engine.LLM(dtype="float32", kernels="interpret")
    config = llm.config
    ((kernels, shape, dtype),) = calls
    assert kernels == KERNELS and dtype == FLOAT32
    assert shape == ModelShape.of(config) and shape.head_dim * shape.n_heads == config.d_model


def test_every_case_of_the_tables_is_reached():
    def reached(cases, rows, k=LLADA_8B.d_model):
        return {tiles_for(cases, rows=n, k=k) for n in rows}

    def all_of(cases):
        return {case.tiles for case in cases}

    assert reached(QKV, ROWS) >= all_of(QKV)
    assert reached(GATE_UP_SILU, ROWS) >= all_of(GATE_UP_SILU)
    assert reached(LINEAR_RESIDUAL, ROWS) | reached(LINEAR_RESIDUAL, ROWS, k=12288) >= all_of(LINEAR_RESIDUAL)
    assert reached(HEAD, (FEW, MANY)) >= all_of(HEAD)
    for dtype in (BFLOAT16, FLOAT32):
        q = jnp.zeros((1, LLADA_8B.n_heads, LLADA_8B.head_dim), dtype)
        tables = {(rows, wide): _block_table(rows, LLADA_8B.n_heads, wide=wide) for rows, wide in BLOCK_ROWS}
        tiles = {attention_tiles(q, blocks=len(table), block_rows=rows) for (rows, _), table in tables.items()}
        assert tiles == {tiles for *_, tiles in TILES[dtype.itemsize]}


@pytest.mark.parametrize("n_heads", [4, 32])
def test_cudnn_is_reached(n_heads: int, monkeypatch: pytest.MonkeyPatch):
    """With scores and without, and by aligned blocks alone."""
    found: list[bool] = []

    def attend(q, *_, with_lse):
        found.append(with_lse)
        return q, jnp.zeros(q.shape[:2]) if with_lse else None

    monkeypatch.setattr(scheduled_attention_cudnn, "available", lambda: True)
    monkeypatch.setattr(scheduled_attention_cudnn, "attend", attend)
    check, shape = CHECKS["scheduled_attention"], replace(LLADA_8B, n_heads=n_heads, n_kv_heads=4)
    inputs = jax.eval_shape(lambda: check.inputs(jax.random.key(0), shape, BFLOAT16))
    outputs = {
        kernels: jax.eval_shape(lambda x, kernels=kernels: dict(check.outputs(x, shape, kernels)), inputs)
        for kernels in ("pallas", "xla")
    }
    assert found == [False, True]
    assert outputs["pallas"] == outputs["xla"]
    assert sum("aligned" in name for name in outputs["xla"]) == 3


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("op", CHECKS)
def test_lowers_for_llada_8b(op: str, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduled_attention_cudnn, "available", lambda: False)  # it lowers for a GPU at hand only
    check = CHECKS[op]
    inputs = jax.eval_shape(lambda: check.inputs(jax.random.key(0), LLADA_8B, dtype))
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs))
    assert weights < 320e6 * dtype.itemsize / 2
    text = lower_for_cuda(lambda inputs: dict(check.outputs(inputs, LLADA_8B, "pallas")), inputs)
    for name in KERNELS_OF.get(op, (op,)):
        assert f'name = "{name}"' in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("shape", [LLADA_8B, replace(LLADA_8B, n_kv_heads=8, qkv_bias=True)], ids=["8B", "GQA"])
def test_kernels_pass_on_gpu(shape: ModelShape, dtype: np.dtype):
    assert checked(Kernels.all("pallas"), shape, dtype) == Kernels.all("pallas")
