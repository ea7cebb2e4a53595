"""What a decode state needs of a device's memory: weights, the cache of each slot, and the program's work space."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from fdllm_jax.config import ModelConfig

MOST_OF_FREE = 0.9  # of the memory that is free, what slots may take: the allocator cannot use every gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes. weights: of the model. cache: of one slot. work_space: temporary arrays of the compiled program."""

    weights: int
    cache: int
    slots: int
    work_space: int

    @property
    def total(self) -> int:
        """Of everything."""
        return self.weights + self.slots * self.cache + self.work_space

    def __str__(self) -> str:
        """The plan in words."""
        return (
            f"{_size(self.total)}: weights {_size(self.weights)}, cache {self.slots} x {_size(self.cache)}, "
            f"work space {_size(self.work_space)}"
        )


class OutOfMemory(RuntimeError):
    """The device has no room for a plan."""


def cache_bytes(config: ModelConfig, *, capacity: int, itemsize: int) -> int:
    """Bytes of a slot's cache: K and V of every layer, position and KV head."""
    return 2 * config.n_layers * capacity * config.n_kv_heads * config.head_dim * itemsize


def bytes_of(tree: Any) -> int:
    """Bytes of a pytree's arrays."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """Bytes that the device has left; None where it does not say (a CPU)."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def ran_out(error: RuntimeError) -> bool:
    """Whether JAX has run out of the device's memory: its own error has no narrower name that lasts."""
    return isinstance(error, OutOfMemory) or "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def told(plan: Plan) -> Iterator[None]:
    """Raises OutOfMemory, with the plan, where the device has too little memory for what is done meanwhile."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(
            f"out of memory: this takes {plan}. Use fewer slots, shorter prompts or a smaller gen_length"
        ) from error


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
