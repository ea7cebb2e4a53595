"""Checkpoints: safetensors to parameters, and to Orbax and back. `python -m convert --help`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.conversion import to_orbax as to_orbax
    from convert.conversion import to_safetensors as to_safetensors
    from convert.loading import load as load
    from convert.source import resolve as resolve

_EXPORTS = {
    "load": "convert.loading",
    "resolve": "convert.source",
    "to_orbax": "convert.conversion",
    "to_safetensors": "convert.conversion",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: resolving a name and `--help` need no JAX."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
