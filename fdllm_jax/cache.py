"""The flat KV cache: per layer one array for K and one for V, row = slot * capacity + position."""

from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.config import ModelConfig
from fdllm_jax.pytree import pytree


@pytree
class KVCache:
    """K (rotated) and V of every position of every slot, one array a layer.

    A row holds what the last pass that wrote that position computed.
    """

    k: tuple[Float[Array, "cache_rows kv_heads head_dim"], ...]
    v: tuple[Float[Array, "cache_rows kv_heads head_dim"], ...]
    capacity: int = field(metadata={"static": True})

    def row(
        self, slot: Int[Array, "rows"], position: Int[Array, "rows"], write: Bool[Array, "rows"]
    ) -> Int[Array, "rows"]:
        """Cache rows of (slot, position); where `write` is off, a row beyond the end, which writes nothing."""
        return jnp.where(write, slot * self.capacity + position, self.k[0].shape[0])


def allocate(config: ModelConfig, *, slots: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: 2 * n_layers * slots * capacity * n_kv_heads * head_dim elements of `dtype`."""
    shape = (slots * capacity, config.n_kv_heads, config.head_dim)

    def layers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers))

    return KVCache(k=layers(), v=layers(), capacity=capacity)
