"""Lowering to CUDA where there is no GPU: what the Triton backend refuses is found, and the kernels' IR can be read."""

from collections.abc import Callable

import jax
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect


def lower_for_cuda(f: Callable, *shapes: jax.ShapeDtypeStruct) -> str:
    """The module text of jitted `f` at `shapes`, lowered for an H200.

    The Triton IR of every kernel in it is verified: lowering alone lets some that is invalid pass.
    """
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",))
    for kernel in _kernels(lowered.compiler_ir()):
        with ir.Context() as context:
            dialect.register_dialect(context)
            context.load_all_available_dialects()
            ir.Module.parse(kernel)
    return lowered.as_text()


def _kernels(module: ir.Module) -> list[bytes]:
    """The Triton IR of every kernel of a lowered module."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        if "mhlo.backend_config" in operation.attributes and "ir" in operation.attributes["mhlo.backend_config"]:
            found.append(ir.StringAttr(operation.attributes["mhlo.backend_config"]["ir"]).value_bytes)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return found
