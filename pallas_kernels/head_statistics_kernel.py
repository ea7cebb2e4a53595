"""The Triton kernel behind `head_statistics`: one pass over the head's weight, a few numbers a tile and row.

A program takes a tile of rows and a tile of ids: it multiplies them along d with fp32 sums and leaves, per row, what
the tile contributes to the argmax and to the softmax. The tiles' numbers are combined outside.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import triton as plgpu
from pallas_kernels.weight_product import Case, Tiles, product_tile


class Partial(NamedTuple):
    """What a tile of the vocabulary contributes; its removed ids have logit -inf.

    best, token: the largest noisy logit and the lowest id that has it. chosen: that id's noise-free logit.
    log_sum: logsumexp of the noise-free logits. given: the given token's logit, -inf where it is not in the tile.
    """

    best: Float[Array, "vocab_tiles rows"]
    token: Int[Array, "vocab_tiles rows"]
    chosen: Float[Array, "vocab_tiles rows"]
    log_sum: Float[Array, "vocab_tiles rows"]
    given: Float[Array, "vocab_tiles rows"]


# Up to 128 rows the weight is read from HBM once; more tiles of rows share it through the L2.
CASES = (
    Case(rows=64, tiles=Tiles(rows=64, columns=128, inner=64, warps=8, stages=4)),
    Case(tiles=Tiles(rows=128, columns=128, inner=64, warps=8, stages=3)),
)


def threefry_bits(
    key: tuple[UInt32[Array, "#*shape"], UInt32[Array, "#*shape"]], index: UInt32[Array, "#*shape"]
) -> UInt32[Array, "*shape"]:
    """Element `index` of `jax.random.bits(key, (n,))`, whatever n, for threefry keys given as their two words.

    Source: Threefry-2x32 with 20 rounds (Salmon et al. 2011) of the counter (0, index), its two words joined by xor;
    this is how JAX draws under `jax_threefry_partitionable`, its default.
    """
    words = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    a, b = jnp.zeros_like(index) + words[0], index + words[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ ((b << np.uint32(rotation)) | (b >> np.uint32(32 - rotation)))
        a = a + words[(group + 1) % 3]
        b = b + words[(group + 2) % 3] + np.uint32(group + 1)
    return a ^ b


def gumbel_at(
    key: tuple[UInt32[Array, "#*shape"], UInt32[Array, "#*shape"]], index: UInt32[Array, "#*shape"]
) -> Float[Array, "*shape"]:
    """Element `index` of `jax.random.gumbel(key, (n,))` in fp32: 23 random bits as the mantissa of a uniform number."""
    bits = (threefry_bits(key, index) >> np.uint32(9)) | np.uint32(0x3F800000)
    uniform = jax.lax.bitcast_convert_type(bits, jnp.float32) - np.float32(1)
    return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))


def _kernel(
    hidden_ref, head_ref, given_ref, key_ref, temperature_ref, *out_refs, vocab_size, scale, banned, tiles: Tiles
):
    rows = hidden_ref.shape[0]
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    token = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    row_exists = row < rows
    logits = product_tile(hidden_ref, head_ref, row, jnp.minimum(token, vocab_size - 1), tiles=tiles)
    allowed = token < vocab_size
    for one in banned:
        allowed &= token != one
    logits = jnp.where(allowed[None, :], logits * scale, -jnp.inf)

    def of_row(ref):
        return plgpu.load(ref.at[row], mask=row_exists, other=0)

    noisy = logits
    if key_ref is not None:
        temperature = of_row(temperature_ref)

        def word(i):
            return plgpu.load(key_ref.at[row, jnp.full_like(row, i)], mask=row_exists, other=0)[:, None]

        def add_noise():
            noise = gumbel_at((word(0), word(1)), token.astype(jnp.uint32)[None, :])
            return logits + temperature[:, None] * noise

        noisy = jax.lax.cond(jnp.max(temperature) > 0, add_noise, lambda: logits)
    best = jnp.max(noisy, axis=1)
    winner = jnp.min(jnp.where(noisy == best[:, None], token[None, :], vocab_size - 1), axis=1)
    largest = jnp.max(logits, axis=1)
    base = jnp.where(largest > -jnp.inf, largest, 0.0)  # a tile may have no id that is allowed
    log_sum = base + jnp.log(jnp.sum(jnp.exp(logits - base[:, None]), axis=1))

    def logit_of(id_of_row):
        return jnp.max(jnp.where(token[None, :] == id_of_row[:, None], logits, -jnp.inf), axis=1)

    chosen = best if key_ref is None else logit_of(winner)
    given = jnp.full_like(best, -jnp.inf) if given_ref is None else logit_of(of_row(given_ref))
    for ref, value in zip(out_refs, Partial(best, winner, chosen, log_sum, given), strict=True):
        ref[...] = value


def partials(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab_rows d"],
    given: Int[Array, "rows"] | None,
    key: UInt32[Array, "rows 2"] | None,
    temperature: Float[Array, "rows"] | None,
    *,
    vocab_size: int,
    scale: float,
    banned: tuple[int, ...],
    tiles: Tiles,
    interpret: bool,
) -> Partial:
    """The contributions of every tile of the vocabulary to each row's statistics."""
    rows = hidden.shape[0]
    grid = (pl.cdiv(rows, tiles.rows), pl.cdiv(vocab_size, tiles.columns))  # row tiles share a weight tile
    shape = (grid[1], grid[0] * tiles.rows)
    dtypes = Partial(best=jnp.float32, token=jnp.int32, chosen=jnp.float32, log_sum=jnp.float32, given=jnp.float32)
    body = functools.partial(_kernel, vocab_size=vocab_size, scale=scale, banned=banned, tiles=tiles)
    out = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes],
        out_specs=[pl.BlockSpec((None, tiles.rows), lambda i, j: (j, i))] * len(dtypes),
        grid=grid,
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="head_statistics",
    )(hidden, head, given, key, temperature)
    return Partial(*(x[:, :rows] for x in out))
