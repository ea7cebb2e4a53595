"""Inference for masked-diffusion language models (LLaDA and its kin) in JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdllm_jax.engine import LLM as LLM
    from fdllm_jax.job import Interrupted as Interrupted
    from fdllm_jax.job import Refusal as Refusal
    from fdllm_jax.job import Result as Result
    from fdllm_jax.settings import Settings as Settings

_EXPORTS = {
    "LLM": "fdllm_jax.engine",
    "Interrupted": "fdllm_jax.job",
    "Refusal": "fdllm_jax.job",
    "Result": "fdllm_jax.job",
    "Settings": "fdllm_jax.settings",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `python -m convert` and `--help` need no engine."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
