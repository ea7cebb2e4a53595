"""The plain Triton kernel of `qkv_rope_cache`, where Triton is installed: interpreted against the XLA reference,
compiled for Hopper, and its call through jax_triton lowered. What runs on a GPU is in test_qkv_rope_cache.py."""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Kernels, choose
from pallas_kernels.qkv_rope_cache import qkv_rope_cache, qkv_rope_cache_returning, rope_frequency
from pallas_kernels.qkv_rope_cache_kernel import CASES
from pallas_kernels.weight_product import Tiles, tiles_for
from tests.pallas_kernels.lowering import lower_for_cuda
from tests.pallas_kernels.test_qkv_rope_cache import THETA, TOLERANCE, Shape, abstract, arguments, distance


@pytest.fixture
def jax_triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """jax_triton, set to compile for a Hopper GPU; the test is skipped where it or JAX's GPU plugin is missing."""
    module = pytest.importorskip("jax_triton", exc_type=ImportError)
    plugin = module.triton_lib.triton_kernel_call_lib
    if not hasattr(plugin, "TritonKernel"):
        pytest.skip("JAX has no GPU support here")
    monkeypatch.setattr(plugin, "get_compute_capability", lambda device: 90)
    return module


@pytest.mark.parametrize("op", [qkv_rope_cache, qkv_rope_cache_returning])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("jax_triton")
def test_writes_the_caches_in_place(op: Callable, bias: bool):
    """The call lowers, in a loop too, with its caches aliased: operands 6 and 7."""

    def call(*values):
        def step(_, caches):
            *_, k_cache, v_cache = op(*values[:5], *caches, n_heads=32, rope_theta=THETA, kernels="triton")
            return k_cache, v_cache

        return jax.lax.fori_loop(0, 3, step, values[5:])

    text = lower_for_cuda(call, *abstract(128, 1280, kv_heads=8, bias=bias))
    assert text.count("custom_call @triton_kernel_call") == 1
    assert [i for i in range(9) if f"operand_index = {i}," in text] == [6, 7]


def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of the Triton kernel's module that Triton interprets: that is decided where a kernel is defined."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = importlib.util.find_spec("pallas_kernels.qkv_rope_cache_triton")
    assert found is not None
    spec = importlib.util.spec_from_file_location("interpreted_triton", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("returning", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(33, 40, 2, 2, bias=True), Shape(20, 64, head_dim=128), Shape(1, 100, 1, 4, head_dim=32, bias=True)]
)
def test_interpreted_is_the_reference(shape: Shape, returning: bool, monkeypatch: pytest.MonkeyPatch):
    """In float32: Triton's interpreter gets products of bfloat16 wrong."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    module = interpreted_triton(monkeypatch)
    values = arguments(shape, seed=int(np.random.default_rng().integers(2**32)))
    expected = qkv_rope_cache_returning(*values, n_heads=shape.kv_heads * shape.group, rope_theta=THETA)
    x, weight, bias, position, cache_row, *caches = values
    tiles = Tiles(rows=16, columns=32, inner=32)
    grid, statics = module.launch(x, weight, bias, caches[0], returning=returning, tiles=tiles)
    inputs = (x, weight, x if bias is None else bias, rope_frequency(shape.head_dim, THETA), position, cache_row)
    pointers = [torch.tensor(np.asarray(value)) for value in (*inputs, *caches)]
    outputs = [torch.full(value.shape, torch.nan) for value in expected[: 3 if returning else 1]]
    module.kernel[grid](*pointers, outputs[0], None, None, *outputs[1:], **statics)
    expected = expected if returning else (expected[0], *expected[3:])
    assert max(map(distance, (*outputs, *pointers[6:]), expected)) < TOLERANCE["float32"]


@pytest.mark.parametrize(("dtype", "returning"), [("bf16", False), ("bf16", True), ("fp32", False)])
@pytest.mark.parametrize("rows", sorted({min(case.rows, 128) for case in CASES}))
def test_compiles_for_hopper(rows: int, dtype: str, returning: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every case's tiles fit the shared memory; 16-bit products are the tensor cores', a warp group's from 64 rows."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from pallas_kernels.qkv_rope_cache_triton import kernel, launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, weight, bias, _, _, cache, _ = abstract(rows, 1280, kv_heads=8, bias=returning)
    if dtype == "fp32":
        x = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    tiles = tiles_for(CASES, rows=rows, k=x.shape[1])
    assert tiles is not None
    _, constants = launch(x, weight, bias, cache, returning=returning, tiles=tiles)
    constants |= {"k_cache_again": None, "v_cache_again": None}
    types = {"frequency": "*fp32", "position": "*i32", "cache_row": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, f"*{dtype}") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
    compiled = triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True},
    )
    assert compiled.metadata.shared <= 227 * 1024
    products = {name for name in ("wgmma.mma_async", "mma.sync") if name in compiled.asm["ptx"]}
    assert products == (set() if dtype == "fp32" else {"wgmma.mma_async" if rows >= 64 else "mma.sync"})


def test_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="'triton' is unknown: expected .* of the operation qkv_rope_cache alone"):
        choose("triton")
    with pytest.raises(
        ValueError, match="scheduled_attention, verify_attention, .*: there is no kernel in plain Triton"
    ):
        Kernels.all("triton")
    assert dataclasses.replace(Kernels.all("xla"), qkv_rope_cache="triton").qkv_rope_cache == "triton"
    monkeypatch.setattr(sys.modules["pallas_kernels.qkv_rope_cache"], "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install fdllm-jax\[triton\]"):
        qkv_rope_cache(*arguments(Shape(rows=16), seed=0), n_heads=1, rope_theta=THETA, kernels="triton")
