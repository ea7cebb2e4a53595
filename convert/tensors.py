"""What a checkpoint says of its tensors, and the checks made on them: names, shapes, dtypes, finite values."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
# Bits of an infinity without its sign; a NaN's are above.
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
_BLOCK = 1 << 18  # elements checked at a time: they stay in the processor's cache
_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """dtype: a key of DTYPES, or the file's own word for another one. shape: as stored."""

    dtype: str
    shape: tuple[int, ...]


def check_tensors(where: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorInfo]) -> None:
    """Raise one ValueError that lists every missing, unexpected and misshapen tensor, and every unsupported dtype."""
    both = [name for name in expected if name in found]
    faults = {
        "missing": [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found],
        "unexpected": [f"{name} {list(info.shape)}" for name, info in found.items() if name not in expected],
        "wrong shape": [
            f"{name} {list(found[name].shape)} (expected {list(expected[name])})"
            for name in both
            if found[name].shape != expected[name]
        ],
        f"dtype other than {', '.join(DTYPES)}": [
            f"{name} {found[name].dtype}" for name in both if found[name].dtype not in DTYPES
        ],
    }
    if any(faults.values()):
        raise ValueError(f"the tensors of {where} do not fit its config.json:" + listing(faults))


def listing(faults: Mapping[str, list[str]]) -> str:
    """One paragraph a kind of fault, at most 20 of each."""
    return "".join(
        f"\n  {kind} ({len(names)}): {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for kind, names in faults.items()
        if names
    )


def is_finite(values: np.ndarray) -> bool:
    """Whether a contiguous array of a dtype of DTYPES holds neither NaN nor infinity."""
    bits = values.reshape(-1).view(np.uint16 if values.dtype.itemsize == 2 else np.uint32)
    infinity, magnitude = _INFINITY[values.dtype.name], np.iinfo(bits.dtype).max >> 1
    return all(
        int((bits[start : start + _BLOCK] & magnitude).max()) < infinity for start in range(0, bits.size, _BLOCK)
    )


def check_finite(name: str, values: np.ndarray) -> None:
    """Raise ValueError with the tensor's Hugging Face name if a value is NaN or infinite."""
    if not is_finite(values):
        raise ValueError(f"{name} holds NaN or infinite weights: the checkpoint is damaged")
