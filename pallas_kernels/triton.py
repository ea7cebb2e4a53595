"""The seam to Pallas' Triton backend: all that the kernels use of it. README.md says what takes its place."""

from jax.experimental.pallas.triton import CompilerParams as CompilerParams
from jax.experimental.pallas.triton import dot as dot
from jax.experimental.pallas.triton import load as load
from jax.experimental.pallas.triton import store as store
