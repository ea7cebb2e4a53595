"""A check at start-up: every kernel against its XLA reference, at the model's shape, on the device at hand.

A kernel that does not compile there, or computes something else, is left out: XLA runs in its place.
"""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from pallas_kernels.implementation import Implementation, Kernels
from pallas_kernels.self_check_cases import CHECKS, Check
from pallas_kernels.self_check_cases import ModelShape as ModelShape
from pallas_kernels.turns import RUNNING

LIMITS = {2: 1e-2, 4: 1e-5}  # of an error, by bytes of an element: fp32 leaves no room for TF32


def checked(kernels: Kernels, shape: ModelShape, dtype: np.dtype) -> Kernels:
    """`kernels`, with "xla" for every operation whose kernel fails here.

    Each kernel runs on small random inputs of `dtype` and is compared with the XLA reference, once in a process for a
    kind of device, a shape and a dtype. One that raises, or that differs by more than rounding (`LIMITS`), is named by
    a RuntimeWarning. Memory, until it returns: about twice the weights of a layer.
    """
    device = jax.devices()[0].device_kind
    chosen = {op: implementation for op, implementation in asdict(kernels).items() if implementation != "xla"}
    with ThreadPoolExecutor(len(CHECKS) or 1) as pool:  # nearly all the time is the compiler's
        faults = pool.map(lambda item: _fault_of(*item, shape, dtype, device), chosen.items())
    for op, fault in zip(chosen, faults, strict=True):
        if fault is not None:
            kernels = replace(kernels, **{op: "xla"})
            message = f"the kernel of {op} failed its check on {device} and is not used ({fault}): XLA runs, slower"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return kernels


@functools.cache
def _fault_of(op: str, implementation: Implementation, shape: ModelShape, dtype: np.dtype, device: str) -> str | None:
    """What is wrong with the kernel of `op`, or None."""
    try:
        return _fault(CHECKS[op], implementation, shape, dtype)
    except Exception as exception:  # of any layer: lowering, the Triton compiler, memory, the driver
        return f"{type(exception).__name__}: {str(exception).strip() or 'no message'}".splitlines()[0]


def _fault(check: Check, implementation: Implementation, shape: ModelShape, dtype: np.dtype) -> str | None:
    """What differs most between implementation and reference, if by more than the limit."""
    inputs = _inputs(check, shape, dtype)
    actual, expected = (_outputs(check, inputs, shape, kernels) for kernels in (implementation, "xla"))
    errors = {what: _error(actual[what], expected[what]) for what in expected}
    worst, limit = max(errors, key=lambda what: errors[what]), LIMITS[dtype.itemsize]
    return None if errors[worst] <= limit else f"{worst}: error {errors[worst]:.1e}, limit {limit:.0e}"


def _inputs(check: Check, shape: ModelShape, dtype: np.dtype) -> Any:
    def of_key(key: Array) -> Any:
        return check.inputs(jax.random.wrap_key_data(key, impl="threefry2x32"), shape, dtype)

    return _run(jax.jit(of_key), np.zeros(2, np.uint32))


def _outputs(check: Check, inputs: Any, shape: ModelShape, kernels: Implementation) -> dict[str, np.ndarray]:
    """All cases in one program."""
    # XLA times no candidates for its own matmuls here: that would take longer than all the rest.
    options = {"xla_gpu_autotune_level": 0}
    outputs = jax.jit(lambda inputs: dict(check.outputs(inputs, shape, kernels)), compiler_options=options)
    return jax.tree.map(np.asarray, _run(outputs, inputs))


def _run(function: jax.stages.Wrapped, inputs: Any) -> Any:
    """Compile beside other threads, and run when it is this one's turn."""
    program = function.lower(inputs).compile()
    with RUNNING:
        return jax.block_until_ready(program(inputs))


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    """||actual - expected|| / ||expected||; infinite for a NaN, and for truth values that differ."""
    if expected.dtype == bool:
        return 0.0 if np.array_equal(actual, expected) else np.inf
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    error = float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))
    return error if np.isfinite(error) else np.inf
