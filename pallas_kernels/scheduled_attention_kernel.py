"""The kernel of scheduled attention for Pallas' Triton backend."""

from jaxtyping import Array, Float, Int

from pallas_kernels.flash import Tiles, attend_cache, launch, load_rows, store_state, this_program


def _attention_kernel(block_table, q_ref, k_cache, v_cache, *refs, capacity: int, tiles: Tiles, splits: int):
    out, lse = refs
    here = this_program(block_table, q_ref, k_cache, tiles=tiles, splits=splits)
    q = load_rows(q_ref, here.row, here.head, here.mask)
    state, _ = attend_cache(here, q, k_cache, v_cache, capacity=capacity, tiles=tiles, splits=splits)
    store_state(here, state, out, lse)


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    block_table: Int[Array, "blocks 4"],
    *,
    capacity: int,
    block_rows: int,
    interpret: bool,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """Attended values and log-sum-exp (base 2) of every query row; see `launch`."""
    return launch(
        _attention_kernel,
        (block_table, q, k_cache, v_cache),
        name="scheduled_attention",
        q=q,
        blocks=block_table.shape[0],
        block_rows=block_rows,
        capacity=capacity,
        interpret=interpret,
    )
