"""Pools of sequences on the devices, filled part by part by worker processes while training goes on."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from benchmarks.small_model.step import Bin, Pool

# Tokens [rows, length], prompt lengths [rows], lengths [rows]: see noise.Sequence.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
# seed -> one part of the pools: the rows of every bin.
Build = Callable[[int], tuple[Rows, ...]]
HELD_OUT_PART = 999_983  # a part number that no pool reaches


def _append(pool: Pool, token: jax.Array, prompt: jax.Array, length: jax.Array) -> Pool:
    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, pool.filled, 0)

    filled = pool.filled + len(token)
    return Pool(write(pool.token, token), write(pool.prompt, prompt), write(pool.length, length), filled)


class Feed:
    """The pools of all bins. A part holds rows of every bin, always as many."""

    def __init__(
        self,
        build: Build,
        executor: Executor,
        sharding: Sharding,
        bins: tuple[Bin, ...],
        *,
        parts: int,
        part_rows: tuple[int, ...],
        seed: int,
    ):
        """Order `parts` parts of `part_rows` sequences (a number for each bin), and one that is held out."""
        self.sharding, self.parts = sharding, parts
        self._append = jax.jit(_append, donate_argnums=0)
        self._held_out = executor.submit(build, seed_of(seed, HELD_OUT_PART))
        self._ordered = deque(executor.submit(build, seed_of(seed, part)) for part in range(parts))
        self.pools = tuple(
            Pool(
                token=self._zeros((parts * rows, bin.length), jnp.uint16),
                prompt=self._zeros((parts * rows,), jnp.int32),
                length=self._zeros((parts * rows,), jnp.int32),
                filled=self._zeros((), jnp.int32),
            )
            for bin, rows in zip(bins, part_rows, strict=True)
        )

    def _zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=self.sharding)()

    def take(self, at_least: int = 0) -> None:
        """Move finished parts, in order, to the devices; wait until `at_least` parts have been moved in all."""
        while self._ordered and (self.parts - len(self._ordered) < at_least or self._ordered[0].done()):
            part = self._ordered.popleft().result()
            self.pools = tuple(
                self._append(pool, *self._put(rows)) for pool, rows in zip(self.pools, part, strict=True)
            )

    def held_out(self) -> tuple[Pool, ...]:
        """Sequences that are in no pool, of every bin."""
        return tuple(Pool(*self._put(rows), filled=jnp.int32(len(rows[1]))) for rows in self._held_out.result())

    def cancel(self) -> None:
        """Forget what is ordered and not begun."""
        for future in (self._held_out, *self._ordered):
            future.cancel()

    def _put(self, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        token, prompt, length = rows
        host = (np.asarray(token, np.uint16), np.asarray(prompt, np.int32), np.asarray(length, np.int32))
        return jax.device_put(host, self.sharding)


def seed_of(seed: int, part: int) -> int:
    """The seed of one part of the pools."""
    return seed * 1_000_000 + part
