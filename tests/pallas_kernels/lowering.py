"""Lowering to CUDA where there is no GPU: what the Triton backend refuses is found, and the kernels' IR can be read."""

from collections.abc import Callable

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lower_for_cuda(f: Callable, *shapes: jax.ShapeDtypeStruct) -> str:
    """The module text of jitted `f` at `shapes`, lowered for an H200."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
