"""Which implementation of an operation runs."""

from typing import Literal, get_args

from jax.lax import Precision

Kernels = Literal["auto", "xla"]
IMPLEMENTATIONS: tuple[Kernels, ...] = get_args(Kernels)


def choose(kernels: str) -> Literal["xla"]:
    """The implementation that `kernels` stands for here.

    Raises ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if kernels not in IMPLEMENTATIONS:
        raise ValueError(f"{kernels=} is unknown: expected one of {', '.join(IMPLEMENTATIONS)}")
    return "xla"


def precision_of(dtype: object) -> Precision:
    """fp32 operands are multiplied as fp32 (no TF32), so that parity in fp32 means what it says."""
    return Precision.HIGHEST if dtype == "float32" else Precision.DEFAULT
