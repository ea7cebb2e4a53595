"""Which implementation of an operation runs."""

from dataclasses import dataclass, fields
from typing import Literal, Self, cast, get_args

import jax
from jax.lax import Precision

Implementation = Literal["pallas", "xla", "interpret", "triton"]  # the last of `qkv_rope_cache` alone
NAMES = ("auto", "pallas", "xla", "interpret")  # on a command line


def check_kernels(kernels: Implementation) -> None:
    """Raises ValueError for a name that no operation knows."""
    if kernels not in get_args(Implementation):
        names = ", ".join(get_args(Implementation))
        raise ValueError(f"{kernels=} is no implementation of an operation: expected one of {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The implementation of each operation.

    Raises ValueError for an unknown name, and for "triton" (plain Triton, through jax_triton) of any operation but
    `qkv_rope_cache`.
    """

    qkv_rope_cache: Implementation
    scheduled_attention: Implementation
    verify_attention: Implementation
    head_statistics: Implementation
    linear_residual_norm: Implementation
    gate_up_silu: Implementation

    def __post_init__(self):
        for field in fields(self):
            check_kernels(getattr(self, field.name))
        names = (field.name for field in fields(self) if field.name != "qkv_rope_cache")
        if refused := [name for name in names if getattr(self, name) == "triton"]:
            raise ValueError(f"{', '.join(refused)}: there is no kernel in plain Triton ('triton'): use 'pallas'")

    @classmethod
    def all(cls, implementation: Implementation) -> Self:
        """One implementation for everything."""
        return cls(
            qkv_rope_cache=implementation,
            scheduled_attention=implementation,
            verify_attention=implementation,
            head_statistics=implementation,
            linear_residual_norm=implementation,
            gate_up_silu=implementation,
        )


XLA = Kernels.all("xla")


def choose(kernels: str) -> Kernels:
    """The implementations that `kernels` stands for here: "auto" is Pallas on an NVIDIA GPU, XLA elsewhere.

    Raises ValueError for a name that is none of `NAMES`, and for "pallas" without an NVIDIA GPU. "triton" is no such
    name: only `qkv_rope_cache` has it, and only `dataclasses.replace(choose(...), qkv_rope_cache="triton")` chooses it.
    """
    if kernels not in NAMES:
        alone = " ('triton' is of the operation qkv_rope_cache alone)" if kernels == "triton" else ""
        raise ValueError(f"{kernels=} is unknown: expected one of {', '.join(NAMES)}{alone}")
    gpu = jax.default_backend() == "gpu"
    if kernels == "pallas" and not gpu:
        raise ValueError(f"{kernels=} needs an NVIDIA GPU, and JAX runs on {jax.default_backend()}: use 'xla'")
    return Kernels.all(("pallas" if gpu else "xla") if kernels == "auto" else cast(Implementation, kernels))


def precision_of(dtype: object) -> Precision:
    """fp32 operands are multiplied as fp32 (no TF32), so that parity in fp32 means what it says."""
    return Precision.HIGHEST if dtype == "float32" else Precision.DEFAULT
