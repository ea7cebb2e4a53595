"""Flash attention for Pallas' Triton backend: what its kernels share.

One program attends a tile of a block's query rows, one head, to one part of the keys. Logarithms and exponentials are
to base 2, with log2(e) folded into the scale. A cache row is read unless it is `Hidden`: whole tiles of the cache
without a hidden row need no mask, and only what needs none is loaded ahead of its use.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import triton as plgpu
from pallas_kernels.implementation import precision_of

LOWEST = -1e30  # below every score, and finite: a row that has seen no key yet must not compute inf - inf
PROGRAMS = 264  # two for each of an H200's 132 multiprocessors; a launch with fewer is split along the keys
MOST_SPLITS = 8
MOST_PADDING = 1.1  # rows of all tiles of a block, over those of tiles of 64
# From so many rows of a block and so many of its programs (128 rows and a head each) on, cuDNN is faster than these
# kernels where it can run: here fewer rows are a narrower tile, and fewer programs are split along the keys.
CUDNN_ROWS = 65
CUDNN_PROGRAMS = 128  # about one for each of an H200's 132 multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Query rows and keys of a tile (powers of two from 16 on), and how a program runs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By bytes of an element: (most rows of a block, most programs with 64 rows each, tiles), the first that fits and does
# not leave much of its last tile empty. Where there are blocks enough, wide tiles read the keys half as often.
TILES = {
    2: (
        (16, math.inf, Tiles(rows=16, keys=64, num_warps=4, num_stages=3)),
        (32, math.inf, Tiles(rows=32, keys=64, num_warps=4, num_stages=3)),
        (64, math.inf, Tiles(rows=64, keys=64, num_warps=4, num_stages=3)),
        (math.inf, PROGRAMS, Tiles(rows=64, keys=64, num_warps=4, num_stages=3)),
        (math.inf, math.inf, Tiles(rows=128, keys=32, num_warps=8, num_stages=3)),
        (math.inf, math.inf, Tiles(rows=64, keys=64, num_warps=4, num_stages=3)),
    ),
    4: (
        (16, math.inf, Tiles(rows=16, keys=32, num_warps=4, num_stages=1)),
        (math.inf, math.inf, Tiles(rows=32, keys=32, num_warps=4, num_stages=1)),
    ),
}

State = tuple[jax.Array, jax.Array, jax.Array]  # largest score [rows], sum [rows], weighted values [rows, head_dim]


class Program(NamedTuple):
    """What one program works on: a tile of the rows of a block, one head, a part (`split`) of the keys."""

    tile: jax.Array
    split: jax.Array
    head: jax.Array
    kv_head: jax.Array
    block: jax.Array
    slot: jax.Array
    kv_length: jax.Array
    first_row: jax.Array
    rows: jax.Array  # of the block
    row: jax.Array  # [tile rows]
    mask: jax.Array  # [tile rows]: the row is in the block


def tiles_for(q: jax.Array, *, blocks: int, block_rows: int) -> Tiles:
    """The tiles for q's dtype and `blocks` blocks of `block_rows` rows.

    Raises ValueError for a head_dim that Triton cannot load.
    """
    heads, head_dim = q.shape[1:]
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"{head_dim=} has no Pallas kernel: expected a power of two from 16 on; use kernels='xla'")
    narrow = pl.cdiv(block_rows, 64)
    return next(
        tiles
        for most_rows, most_programs, tiles in TILES[q.dtype.itemsize]
        if block_rows <= most_rows
        and narrow * heads * blocks <= most_programs
        and pl.cdiv(block_rows, tiles.rows) * tiles.rows <= MOST_PADDING * narrow * 64
    )


def splits_for(programs: int, key_tiles: int) -> int:
    """Into how many parts the keys go, so that the launch fills the GPU and no part is shorter than two tiles."""
    return max(1, min(MOST_SPLITS, PROGRAMS // max(programs, 1), key_tiles // 2))


def this_program(block_table: jax.Ref, q: jax.Ref, k_cache: jax.Ref, *, tiles: Tiles, splits: int) -> Program:
    """The program of a grid (row tiles x splits, heads, blocks)."""
    tile, split = pl.program_id(0) // splits, pl.program_id(0) % splits
    head, block = pl.program_id(1), pl.program_id(2)
    slot, kv_length, first_row, rows = (block_table[block, i] for i in range(4))
    row_in_block = tile * tiles.rows + jnp.arange(tiles.rows)
    return Program(
        tile=tile,
        split=split,
        head=head,
        kv_head=head // (q.shape[1] // k_cache.shape[1]),
        block=block,
        slot=slot,
        kv_length=kv_length,
        first_row=first_row,
        rows=rows,
        row=first_row + row_in_block,
        mask=row_in_block < rows,
    )


class Hidden(NamedTuple):
    """Cache rows that no query row sees: those that `marked` (int8) marks; of the block, all in [first, end)."""

    marked: jax.Ref
    first: jax.Array
    end: jax.Array


def start(rows: int, head_dim: int) -> State:
    """The state of `rows` rows that have seen no key."""
    return (
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, head_dim), jnp.float32),
    )


def add_keys(state: State, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None) -> State:
    """The state after the keys of one tile. `visible` broadcasts to [rows, keys]; None means all."""
    largest, total, values = state
    product = plgpu.dot(q, k, trans_b=True, precision=precision_of(q.dtype))
    if visible is not None:
        product = jnp.where(visible, product, -jnp.inf)
    new = jnp.maximum(largest, jnp.max(product, axis=1) * scale(q.shape[-1]))
    weights = jnp.exp2(product * scale(q.shape[-1]) - new[:, None])  # one multiply-add an element
    keep = jnp.exp2(largest - new)
    added = plgpu.dot(weights.astype(v.dtype), v, precision=precision_of(v.dtype))
    return new, total * keep + jnp.sum(weights, axis=1), values * keep[:, None] + added


def scale(head_dim: int) -> float:
    """What a dot product is multiplied by so that exp2 of it is the softmax' weight."""
    return head_dim**-0.5 * math.log2(math.e)


def load_rows(ref: jax.Ref, row: jax.Array, head: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Rows of one head of `ref` [rows, heads, head_dim]; where the mask is off nothing is read and the row is 0."""
    dim = jnp.arange(ref.shape[-1])
    at = ref.at[row[:, None], head, dim[None]]
    if mask is None:
        return plgpu.load(at)
    return plgpu.load(at, mask=jnp.broadcast_to(mask[:, None], (row.shape[0], dim.shape[0])), other=0.0)


def store_state(here: Program, state: State, out: jax.Ref, lse: jax.Ref) -> None:
    """Write the normalised values and the log-sum-exp; 0 and -inf for rows that saw no key."""
    largest, total, values = state
    seen = total > 0
    values = jnp.where(seen[:, None], values / jnp.where(seen, total, 1.0)[:, None], 0.0)
    dim = jnp.arange(values.shape[1])
    plgpu.store(
        out.at[here.split, here.row[:, None], here.head, dim[None]],
        values.astype(out.dtype),
        mask=jnp.broadcast_to(here.mask[:, None], values.shape),
    )
    log_sum = jnp.where(seen, largest + jnp.log2(total), -jnp.inf)
    plgpu.store(lse.at[here.split, here.row, here.head], log_sum, mask=here.mask)


def shares(here: Program, splits: int, *counts: jax.Array | int) -> list[tuple[jax.Array, jax.Array]]:
    """A program's part of runs of tiles that are gone through one after the other: of each run, from where to where."""
    part = pl.cdiv(sum(counts), splits)
    begin, ranges = here.split * part, []
    for count in counts:
        ranges.append((jnp.clip(begin, 0, count), jnp.clip(begin + part, 0, count)))
        begin -= count
    return ranges


def attend_cache(
    here: Program, q: jax.Array, k_cache: jax.Ref, v_cache: jax.Ref, hidden: Hidden | None = None, *,
    capacity: int, tiles: Tiles, splits: int, behind: jax.Array | int = 0,
) -> tuple[State, tuple[jax.Array, jax.Array]]:  # fmt: skip
    """The state of a program's rows after its part of the cache; nothing is read where it has no row.

    First come the tiles that need no mask. behind: tiles that the caller attends after the cache's; the part of these
    is returned too.
    """

    def step(masked: bool, tile_at: Callable[[jax.Array], jax.Array], i: jax.Array, state: State) -> State:
        key = tile_at(i) * tiles.keys + jnp.arange(tiles.keys)
        at = here.slot * capacity + key
        mask = seen = key < here.kv_length if masked else None
        if mask is not None and hidden is not None:
            seen = mask & (plgpu.load(hidden.marked.at[at], mask=mask) == 0)
        # k is loaded without waiting for `seen`: its scores are masked, while 0 * v may be NaN
        k, v = load_rows(k_cache, at, here.kv_head, mask), load_rows(v_cache, at, here.kv_head, seen)
        return add_keys(state, q, k, v, None if seen is None else seen[None])

    kv_length = jnp.where(here.tile * tiles.rows < here.rows, here.kv_length, 0)
    whole, in_all = kv_length // tiles.keys, pl.cdiv(kv_length, tiles.keys)
    first = holding = jnp.zeros_like(whole)
    if hidden is not None:
        first = jnp.minimum(hidden.first // tiles.keys, whole)
        holding = jnp.clip(pl.cdiv(hidden.end, tiles.keys), first, whole) - first  # whole tiles that hold hidden rows
    free, masked, more = shares(here, splits, whole - holding, holding + in_all - whole, behind)
    of_free = functools.partial(step, False, lambda i: jnp.where(i < first, i, i + holding))
    of_masked = functools.partial(step, True, lambda i: jnp.where(i < holding, first + i, whole - holding + i))
    state = jax.lax.fori_loop(*free, of_free, start(tiles.rows, q.shape[1]))
    return jax.lax.fori_loop(*masked, of_masked, state), more


def launch(
    kernel: Callable, operands: tuple[jax.Array, ...], *, name: str, q: jax.Array, blocks: int, block_rows: int,
    capacity: int, interpret: bool, wide: bool = True,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:  # fmt: skip
    """Run an attention kernel over (row tiles x splits, heads, blocks) and combine the splits.

    wide: whether it may have the tiles of many blocks.

    `kernel` takes refs of the operands and of the outputs (values, log-sum-exp), and as keywords capacity, tiles and
    splits. It writes the rows of its blocks, 0 and -inf where a row saw no key in its part.

    Returns the attended values and the log-sum-exp (base 2). Rows in no block are not written: they hold what the
    memory held.
    """
    rows, heads, head_dim = q.shape
    tiles = tiles_for(q, blocks=blocks if wide else 1, block_rows=block_rows)
    row_tiles = pl.cdiv(block_rows, tiles.rows)
    splits = splits_for(row_tiles * heads * blocks, pl.cdiv(capacity, tiles.keys))
    values, lse = pl.pallas_call(
        functools.partial(kernel, capacity=capacity, tiles=tiles, splits=splits),
        grid=(row_tiles * splits, heads, blocks),
        out_shape=(
            jax.ShapeDtypeStruct((splits, rows, heads, head_dim), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=name,
    )(*operands)
    if splits == 1:
        return values[0], lse[0]
    # part by part, so that XLA makes one kernel of it
    largest = functools.reduce(jnp.maximum, lse)
    weight = [jnp.exp2(part - jnp.maximum(largest, LOWEST)) for part in lse]
    total = functools.reduce(jnp.add, weight)
    parts = [v * (w / jnp.maximum(total, 1e-30))[..., None] for v, w in zip(values, weight, strict=True)]
    return functools.reduce(jnp.add, parts).astype(q.dtype), largest + jnp.log2(total)
