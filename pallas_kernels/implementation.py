"""Which implementation of an operation runs."""

from collections.abc import Mapping
from typing import Literal

import jax
from jax.lax import Precision

Implementation = Literal["pallas", "xla", "interpret"]

# What each name on a command line stands for. "auto" is XLA until the kernels have been timed.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "auto": "xla",
    "pallas": "pallas",
    "xla": "xla",
    "interpret": "interpret",
}


def choose(kernels: str) -> Implementation:
    """The implementation that `kernels` stands for here.

    Raises ValueError for a name that is none of `IMPLEMENTATIONS`, and for "pallas" without an NVIDIA GPU.
    """
    if kernels not in IMPLEMENTATIONS:
        raise ValueError(f"{kernels=} is unknown: expected one of {', '.join(IMPLEMENTATIONS)}")
    if kernels == "pallas" and jax.default_backend() != "gpu":
        raise ValueError(f"{kernels=} needs an NVIDIA GPU, and JAX runs on {jax.default_backend()}: use 'xla'")
    return IMPLEMENTATIONS[kernels]


def precision_of(dtype: object) -> Precision:
    """fp32 operands are multiplied as fp32 (no TF32), so that parity in fp32 means what it says."""
    return Precision.HIGHEST if dtype == "float32" else Precision.DEFAULT
