"""What a decode state needs of a device's memory: weights, the cache of each slot, and the program's work space."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


def check(plan: Plan) -> None:
    """Raises OutOfMemory where a CPU's machine has too little left for a plan, beyond the weights that are there.

    A GPU says so itself; of a CPU's process, which would be killed, nothing would be heard again.
    """
    left = _host_bytes() if jax.default_backend() == "cpu" else None
    if left is not None and plan.total - plan.weights > left:
        raise OutOfMemory(_message(plan, f"; {_size(left)} are left"))


def _host_bytes() -> int | None:
    """Bytes that the machine has left for new programs; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kib = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest}
    return int(kib["MemAvailable"]) * 1024 if "MemAvailable" in kib else None


def _message(plan: Plan, more: str = "") -> str:
    return f"out of memory: this takes {plan}{more}. Use fewer slots, shorter prompts or a smaller gen_length"


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
        raise OutOfMemory(_message(plan)) from error


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
