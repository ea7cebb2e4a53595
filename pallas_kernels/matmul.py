"""The matmuls of a layer for few rows, fused with what follows them.

At 16 to 256 rows a matmul costs the reading of its weight. Which implementation reads it fastest is data: a kernel
where the tables below name tiles for the shape, XLA elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.checks import check_shapes
from pallas_kernels.implementation import Implementation, check_kernels, precision_of
from pallas_kernels.rms_norm import add_and_norm_pallas, rms_norm
from pallas_kernels.weight_product import Case, Tiles, product_tile, store_rows, tiles_for

LINEAR_RESIDUAL = (
    Case(rows=16, tiles=Tiles(rows=16, columns=64, inner=128, stages=4, splits=4)),
    Case(rows=32, tiles=Tiles(rows=32, columns=64, inner=128, stages=4, splits=4)),
    Case(rows=128, k=4096, tiles=Tiles(rows=64, columns=64, inner=64, stages=5, splits=2)),
    Case(rows=64, tiles=Tiles(rows=64, columns=64, inner=64, stages=5, splits=4)),
)
GATE_UP = Tiles(rows=64, columns=256, inner=64, warps=8, stages=4)
GATE_UP_SILU = (
    Case(rows=16, tiles=Tiles(rows=16, columns=128, inner=64, stages=4)),
    Case(rows=32, tiles=Tiles(rows=32, columns=128, inner=64, stages=4)),
    Case(rows=64, tiles=GATE_UP),
    Case(k=512, tiles=GATE_UP),  # a small model: one launch, not two
)


def linear(x: Float[Array, "*rows k"], weight: Float[Array, "n k"]) -> Float[Array, "*rows n"]:
    """X times the transposed weight, in x's dtype (XLA accumulates in fp32, on CPU and GPU)."""
    return jnp.einsum("...k,nk->...n", x, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)


def linear_residual_norm(
    x: Float[Array, "*rows k"],
    weight: Float[Array, "n k"],
    residual: Float[Array, "*rows n"],
    norm: Float[Array, "n"],
    *,
    eps: float,
    kernels: Implementation = "xla",
) -> tuple[Float[Array, "*rows n"], Float[Array, "*rows n"]]:
    """Residual + x @ weight.T, accumulated in fp32, and its RMSNorm with the weight `norm`, both in residual's dtype.

    The kernels take 2-D x. Where `LINEAR_RESIDUAL` does not cover its shape, the product is XLA's.
    """
    check_kernels(kernels)
    rows = " ".join(map(str, x.shape[:-1]))
    arrays = {"x": (x, f"{rows} k"), "weight": (weight, "n k"), "residual": (residual, f"{rows} n")}
    check_shapes({}, arrays | {"norm": (norm, "n")})
    if kernels == "xla" or x.ndim != 2 or not x.size:
        new = residual + linear(x, weight)
        return new, rms_norm(new, norm, eps)
    tiles, interpret = tiles_for(LINEAR_RESIDUAL, rows=x.shape[0], k=x.shape[-1]), kernels == "interpret"
    update = linear(x, weight) if tiles is None else _linear_parts_pallas(x, weight, tiles=tiles, interpret=interpret)
    return add_and_norm_pallas(update, residual, norm, eps=eps, interpret=interpret)


def gate_up_silu(
    x: Float[Array, "*rows d"],
    weight: Float[Array, "gate_and_up d"],
    *,
    kernels: Implementation = "xla",
) -> Float[Array, "*rows mlp"]:
    """SwiGLU's silu(x @ gate.T) * (x @ up.T); weight [2 * mlp, d] holds the rows of gate, then up.

    The kernels take 2-D x of a shape that `GATE_UP_SILU` covers; anything else is XLA's.
    """
    check_kernels(kernels)
    sizes = {"d": x.shape[-1], "gate_and_up": 2 * (weight.shape[0] // 2)}
    check_shapes(sizes, {"weight": (weight, "gate_and_up d")})
    tiles = tiles_for(GATE_UP_SILU, rows=x.shape[0], k=x.shape[-1]) if x.ndim == 2 and x.size else None
    if kernels == "xla" or tiles is None:
        gate, up = jnp.split(linear(x, weight), 2, axis=-1)
        return jax.nn.silu(gate) * up
    return _gate_up_silu_pallas(x, weight, tiles=tiles, interpret=kernels == "interpret")


def _linear_kernel(x_ref, weight_ref, partial_ref, *, tiles: Tiles):
    """One split's product of a tile of rows and a tile of columns; partial_ref [splits * rows, n] in fp32."""
    (rows, _), n, split = x_ref.shape, weight_ref.shape[0], pl.program_id(2)
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    column = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns)
    product = product_tile(x_ref, weight_ref, row, jnp.minimum(column, n - 1), tiles=tiles, split=split)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    store_rows(partial_ref, split * rows + row, column, product, mask)


def _linear_parts_pallas(
    x: Float[Array, "rows k"], weight: Float[Array, "n k"], *, tiles: Tiles, interpret: bool
) -> Float[Array, "splits_rows n"]:
    """The product in parts to be added up, one below the other, in fp32."""
    rows, n = x.shape[0], weight.shape[0]
    return pl.pallas_call(
        functools.partial(_linear_kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((tiles.splits * rows, n), jnp.float32),
        grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(n, tiles.columns), tiles.splits),  # row tiles share a weight tile
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="linear_parts",
    )(x, weight)


def _gate_up_kernel(x_ref, weight_ref, out_ref, *, tiles: Tiles):
    """A tile of rows times the same columns of gate and of up, which are the two halves of the product's columns."""
    rows, mlp, width = x_ref.shape[0], out_ref.shape[1], tiles.columns // 2
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    first = pl.program_id(1) * width
    both = jnp.arange(tiles.columns)
    weight_row = jnp.minimum(first + jax.lax.rem(both, width), mlp - 1) + jax.lax.div(both, width) * mlp
    gate, up = jnp.split(product_tile(x_ref, weight_ref, row, weight_row, tiles=tiles), 2, axis=1)
    column = first + jnp.arange(width)
    mask = (row < rows)[:, None] & (column < mlp)[None, :]
    store_rows(out_ref, row, column, gate / (1 + jnp.exp(-gate)) * up, mask)


def _gate_up_silu_pallas(x: Array, weight: Array, *, tiles: Tiles, interpret: bool) -> Array:
    rows, mlp = x.shape[0], weight.shape[0] // 2
    return pl.pallas_call(
        functools.partial(_gate_up_kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((rows, mlp), x.dtype),
        grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(mlp, tiles.columns // 2)),
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="gate_up_silu",
    )(x, weight)
