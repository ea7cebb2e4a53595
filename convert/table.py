"""The table of names: how LLaDA's Hugging Face tensors make up the parameters. Read in both directions."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from fdllm_jax.config import ModelConfig
from fdllm_jax.model import parameter_shapes

Rows = Callable[[ModelConfig], int]


def _query_rows(config: ModelConfig) -> int:
    return config.n_heads * config.head_dim


def _kv_rows(config: ModelConfig) -> int:
    return config.n_kv_heads * config.head_dim


def _mlp_rows(config: ModelConfig) -> int:
    return config.mlp_size


# Parameter pattern -> the tensors stacked along its rows (axis 0), in order, each with its rows; None: all rows.
TABLE: dict[str, tuple[tuple[str, Rows | None], ...]] = {
    "embedding": (("model.transformer.wte.weight", None),),
    "layers.{i}.attn_norm": (("model.transformer.blocks.{i}.attn_norm.weight", None),),
    "layers.{i}.qkv": (
        ("model.transformer.blocks.{i}.q_proj.weight", _query_rows),
        ("model.transformer.blocks.{i}.k_proj.weight", _kv_rows),
        ("model.transformer.blocks.{i}.v_proj.weight", _kv_rows),
    ),
    "layers.{i}.qkv_bias": (
        ("model.transformer.blocks.{i}.q_proj.bias", _query_rows),
        ("model.transformer.blocks.{i}.k_proj.bias", _kv_rows),
        ("model.transformer.blocks.{i}.v_proj.bias", _kv_rows),
    ),
    "layers.{i}.attn_out": (("model.transformer.blocks.{i}.attn_out.weight", None),),
    "layers.{i}.mlp_norm": (("model.transformer.blocks.{i}.ff_norm.weight", None),),
    "layers.{i}.gate_up": (
        ("model.transformer.blocks.{i}.ff_proj.weight", _mlp_rows),
        ("model.transformer.blocks.{i}.up_proj.weight", _mlp_rows),
    ),
    "layers.{i}.down": (("model.transformer.blocks.{i}.ff_out.weight", None),),
    "final_norm": (("model.transformer.ln_f.weight", None),),
    "head": (("model.transformer.ff_out.weight", None),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A Hugging Face tensor: its name and shape; its rows are consecutive rows of a parameter."""

    name: str
    shape: tuple[int, ...]


def layout(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Every parameter's path -> the tensors stacked in it.

    With tied weights there is no head: the format never stores one, so a head in the files is an unexpected tensor.
    """
    return {path: _parts(path, shape, config) for path, shape in parameter_shapes(config).items()}


def _parts(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[Part, ...]:
    layer = re.match(r"layers\.(\d+)\.", path)
    pattern = re.sub(r"^layers\.\d+\.", "layers.{i}.", path)
    parts = tuple(
        Part(name=name.format(i=layer and layer[1]), shape=(rows(config) if rows else shape[0], *shape[1:]))
        for name, rows in TABLE[pattern]
    )
    assert sum(part.shape[0] for part in parts) == shape[0], path
    return parts
