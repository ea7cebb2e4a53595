"""Activations times a weight inside a Triton kernel: the tile of one program, and the sizes of such tiles as data."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton as plgpu
from pallas_kernels.implementation import precision_of

ANY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a kernel cuts x [rows, k] times weight [columns, k].

    rows, columns: of the weight product that one program computes. inner: elements of k of one loop step, for 16-bit
    operands; 32-bit ones take half as many. splits: parts of k, each the work of programs of its own.
    """

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3
    splits: int = 1

    def __post_init__(self):
        for name in ("rows", "columns", "inner"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name}={size} must be a power of two of at least 16")

    def compiler_params(self) -> plgpu.CompilerParams:
        """What the Triton compiler is told."""
        return plgpu.CompilerParams(num_warps=self.warps, num_stages=self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Tiles for up to `rows` rows and `k` elements of the inner dimension; None: XLA is faster."""

    rows: int = ANY
    k: int = ANY
    tiles: Tiles | None


def tiles_for(cases: Sequence[Case], *, rows: int, k: int) -> Tiles | None:
    """The tiles of the first case that covers the shape; None where none does."""
    return next((case.tiles for case in cases if rows <= case.rows and k <= case.k), None)


def product_tile(
    x_ref, weight_ref, row: jax.Array, weight_row: jax.Array, *, tiles: Tiles, split: jax.Array | int = 0
) -> jax.Array:
    """Rows `row` of x [rows, k] times rows `weight_row` of weight [columns, k], summed over part `split` of k, in fp32.

    Rows beyond x's are its first ones over again (one that stood for all of them would be read from one place by all
    programs), so the caller masks what it stores. Every `weight_row` must be in range.
    """
    rows, k = x_ref.shape
    row = jax.lax.rem(row, rows)
    inner = tiles.inner if x_ref.dtype.itemsize == 2 else max(16, tiles.inner // 2)
    steps = pl.cdiv(pl.cdiv(k, inner), tiles.splits)
    whole = steps * inner * tiles.splits == k

    def load(ref, index: jax.Array, column: jax.Array) -> jax.Array:
        view = ref.at[index[:, None], column[None, :]]
        if whole:
            return plgpu.load(view)
        return plgpu.load(view, mask=jnp.broadcast_to((column < k)[None, :], (len(index), inner)), other=0)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        column = (split * steps + i) * inner + jnp.arange(inner)
        x, weight = load(x_ref, row, column), load(weight_ref, weight_row, column)
        return total + plgpu.dot(x, weight, trans_b=True, precision=precision_of(x.dtype))

    return jax.lax.fori_loop(0, steps, step, jnp.zeros((len(row), len(weight_row)), jnp.float32))


def store_rows(ref, row: jax.Array, column: jax.Array, value: jax.Array, mask: jax.Array) -> None:
    """Store value [rows, columns] in a 2-D ref; `mask` ([rows, 1] or [rows, columns]) says which elements."""
    view = ref.at[row[:, None], column[None, :]]
    plgpu.store(view, value.astype(ref.dtype), mask=jnp.broadcast_to(mask, value.shape))
