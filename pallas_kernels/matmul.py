"""The matmuls of a layer for few rows, fused with what follows them.

At 16 to 256 rows a matmul costs the reading of its weight. Which implementation reads it fastest is data: a kernel
where the tables below name tiles for the shape, XLA elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, precision_of
from pallas_kernels.weight_product import Case, Tiles, pairs, pieces, product_tile, starts, store_rows, tiles_for

LINEAR_RESIDUAL = (
    Case(rows=16, tiles=Tiles(rows=(16,), columns=(64,), inner=128, stages=4, splits=4)),
    Case(rows=32, tiles=Tiles(rows=(32,), columns=(64,), inner=128, stages=4, splits=4)),
    Case(rows=64, k=4096, tiles=Tiles(rows=(64,), columns=(64,), inner=64, stages=4, splits=2)),
    Case(rows=64, tiles=Tiles(rows=(64,), columns=(64,), inner=64, stages=4, splits=4)),
    Case(rows=128, k=4096, tiles=Tiles(rows=(128,), columns=(64,), inner=64, stages=4, splits=2)),
    Case(rows=128, tiles=Tiles(rows=(128,), columns=(64,), inner=64, stages=4, splits=4)),
)
GATE_UP_SILU = (
    Case(rows=16, tiles=Tiles(rows=(16,), columns=(128,), inner=64, stages=4)),
    Case(rows=32, tiles=Tiles(rows=(32,), columns=(128,), inner=64, stages=4)),
    Case(rows=64, tiles=Tiles(rows=(64,), columns=(128,), inner=64, stages=4)),
)


def linear(x: Float[Array, "*rows k"], weight: Float[Array, "n k"]) -> Float[Array, "*rows n"]:
    """X times the transposed weight, in x's dtype (XLA accumulates in fp32, on CPU and GPU)."""
    return jnp.einsum("...k,nk->...n", x, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)


def linear_residual(
    x: Float[Array, "*rows k"],
    weight: Float[Array, "n k"],
    residual: Float[Array, "*rows n"],
    *,
    kernels: Implementation = "xla",
) -> Float[Array, "*rows n"]:
    """Residual + x @ weight.T, accumulated in fp32; the result has the residual's dtype.

    The kernels take 2-D x of a shape that `LINEAR_RESIDUAL` covers; anything else is XLA's.
    """
    tiles = tiles_for(LINEAR_RESIDUAL, rows=x.shape[0], k=x.shape[-1]) if x.ndim == 2 else None
    if kernels == "xla" or tiles is None:
        return residual + linear(x, weight)
    return _linear_residual_pallas(x, weight, residual, tiles=tiles, interpret=kernels == "interpret")


def gate_up_silu(
    x: Float[Array, "*rows d"],
    weight: Float[Array, "gate_and_up d"],
    *,
    kernels: Implementation = "xla",
) -> Float[Array, "*rows mlp"]:
    """SwiGLU's silu(x @ gate.T) * (x @ up.T); weight [2 * mlp, d] holds the rows of gate, then up.

    The kernels take 2-D x of a shape that `GATE_UP_SILU` covers; anything else is XLA's.
    """
    tiles = tiles_for(GATE_UP_SILU, rows=x.shape[0], k=x.shape[-1]) if x.ndim == 2 else None
    if kernels == "xla" or tiles is None:
        gate, up = jnp.split(linear(x, weight), 2, axis=-1)
        return jax.nn.silu(gate) * up
    return _gate_up_silu_pallas(x, weight, tiles=tiles, interpret=kernels == "interpret")


def _linear_kernel(x_ref, weight_ref, partial_ref, *, tiles: Tiles):
    """One split's product of a tile of rows and a tile of columns; partial_ref [splits * rows, n] in fp32."""
    (rows, _), n, split = x_ref.shape, weight_ref.shape[0], pl.program_id(2)
    row = pieces(pl.program_id(0) * sum(tiles.rows), tiles.rows)
    column = pieces(pl.program_id(1) * sum(tiles.columns), tiles.columns)
    products = product_tile(
        x_ref,
        weight_ref,
        [jnp.minimum(piece, rows - 1) for piece in row],
        [jnp.minimum(piece, n - 1) for piece in column],
        tiles=tiles,
        split=split,
    )
    for a, of_row in zip(row, products, strict=True):
        for b, product in zip(column, of_row, strict=True):
            store_rows(partial_ref, split * rows + a, b, product, (a < rows)[:, None] & (b < n)[None, :])


def _linear_residual_pallas(x: Array, weight: Array, residual: Array, *, tiles: Tiles, interpret: bool) -> Array:
    rows, n = residual.shape
    partial = pl.pallas_call(
        functools.partial(_linear_kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((tiles.splits * rows, n), jnp.float32),
        # tiles of rows share a tile of the weight
        grid=(pl.cdiv(rows, sum(tiles.rows)), pl.cdiv(n, sum(tiles.columns)), tiles.splits),
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="linear_residual",
    )(x, weight)
    total = partial.reshape(tiles.splits, rows, n).sum(axis=0)
    return (residual.astype(jnp.float32) + total).astype(residual.dtype)


def _gate_up_kernel(x_ref, weight_ref, out_ref, *, tiles: Tiles):
    """A tile of rows times the same columns of gate and of up, which are the two halves of each piece's columns."""
    rows, mlp = x_ref.shape[0], out_ref.shape[1]
    row = pieces(pl.program_id(0) * sum(tiles.rows), tiles.rows)
    widths = [size // 2 for size in tiles.columns]
    first = starts(pl.program_id(1) * sum(widths), widths)
    products = product_tile(
        x_ref,
        weight_ref,
        [jnp.minimum(piece, rows - 1) for piece in row],
        [pairs(f, size, apart=mlp, limit=mlp) for f, size in zip(first, tiles.columns, strict=True)],
        tiles=tiles,
    )
    for a, of_row in zip(row, products, strict=True):
        for f, width, product in zip(first, widths, of_row, strict=True):
            gate, up = jnp.split(product, 2, axis=1)
            b = f + jnp.arange(width)
            mask = (a < rows)[:, None] & (b < mlp)[None, :]
            store_rows(out_ref, a, b, gate / (1 + jnp.exp(-gate)) * up, mask)


def _gate_up_silu_pallas(x: Array, weight: Array, *, tiles: Tiles, interpret: bool) -> Array:
    rows, mlp = x.shape[0], weight.shape[0] // 2
    return pl.pallas_call(
        functools.partial(_gate_up_kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((rows, mlp), x.dtype),
        grid=(pl.cdiv(rows, sum(tiles.rows)), pl.cdiv(mlp, sum(tiles.columns) // 2)),
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="gate_up_silu",
    )(x, weight)
