"""What an operation refuses, whichever implementation runs: a kernel would compute something else without a word."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array


def check_shapes(sizes: Mapping[str, int], arrays: Mapping[str, tuple[Array | None, str]]) -> None:
    """Check the shapes of arrays by name against their axes: names or numbers, separated by blanks. None is left out.

    sizes: what names of axes are known to be; another name is as long as where it stands first. Raises ValueError that
    says of each array at fault what it is and what was expected, and where there are no "rows".
    """
    known, faults = dict(sizes), []
    for name, (array, axes) in arrays.items():
        if array is None:
            continue
        names = axes.split()
        if len(names) == array.ndim:
            sized = zip(names, array.shape, strict=True)
            if all((int(n) if n.isdigit() else known.setdefault(n, size)) == size for n, size in sized):
                continue
        wanted = ", ".join(f"{n}={known[n]}" if n in known else n for n in names)
        faults.append(f"{name} is {list(array.shape)}: expected [{wanted}]")
    if known.get("rows") == 0:
        faults.append("there are no rows: expected at least one")
    if faults:
        raise ValueError("; ".join(faults))


def check_blocks(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, score_rows: Array | None, *, capacity: int,
    block_rows: int, others: Mapping[str, tuple[Array | None, str]] | None = None,
) -> None:  # fmt: skip
    """Check what both attentions take; others: more arrays, as in `check_shapes`. Raises ValueError."""
    of_cache = "cache_rows kv_heads head_dim"
    arrays = {
        "q": (q, "rows heads head_dim"), "k_cache": (k_cache, of_cache), "v_cache": (v_cache, of_cache),
        "block_table": (block_table, "blocks 4"), "score_rows": (score_rows, "rows"),
    }  # fmt: skip
    check_shapes({}, {**arrays, **(others or {})})
    if capacity < 1 or block_rows < 1 or k_cache.shape[0] % capacity:
        raise ValueError(f"{k_cache.shape[0]} cache rows, {capacity=}, {block_rows=}: expected whole slots and blocks")
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} heads for {k_cache.shape[1]} KV heads: expected a multiple")
    if not block_table.shape[0]:
        raise ValueError("block_table has no block: expected at least one")
    if score_rows is not None and score_rows.dtype != jnp.bool_:
        raise ValueError(f"score_rows is of {score_rows.dtype}: expected booleans")
