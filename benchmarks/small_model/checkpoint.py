"""Files of a training run: the state to resume from, and the checkpoint in LLaDA's Hugging Face form. Both atomic."""

import json
import os
import shutil
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from fdllm_jax.config import CONFIG_FILE, ModelConfig

State = TypeVar("State")
TOP = {"embedding": "wte", "final_norm": "ln_f", "head": "ff_out"}
LAYER = {"attn_norm": "attn_norm", "attn_out": "attn_out", "mlp_norm": "ff_norm", "down": "ff_out"}


def save_state(path: Path, state: object) -> None:
    """Write the arrays of a pytree to `path` (npz). bf16 is stored as its bits: npz knows no such type."""
    leaves = [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(state))]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, *(leaf.view(np.uint16) if leaf.dtype == jnp.bfloat16 else leaf for leaf in leaves))
    os.replace(partial, path)


def load_state(path: Path, like: State) -> State:
    """Read what `save_state` wrote of a pytree of `like`'s structure, shapes and dtypes.

    Raises FileNotFoundError if there is no such file, ValueError if it holds another structure.
    """
    if not path.exists():
        raise FileNotFoundError(f"no training state to resume from: {path}")
    expected, structure = jax.tree.flatten(like)
    with np.load(path) as file:
        leaves = [file[f"arr_{i}"] for i in range(len(file.files))]
    leaves = [
        leaf.view(jnp.bfloat16) if leaf.dtype == np.uint16 and want.dtype == jnp.bfloat16 else leaf
        for leaf, want in zip(leaves, expected, strict=False)
    ]
    given, wanted = ([(x.shape, x.dtype) for x in side] for side in (leaves, expected))
    if given != wanted:
        raise ValueError(f"{path} is the state of another model or optimiser: start again without --resume")
    return jax.tree.unflatten(structure, leaves)


def hugging_face_names(config: ModelConfig, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by path -> LLaDA's Hugging Face tensors, the packed matrices taken apart."""
    tensors = {}
    for path, value in parameters.items():
        if not path.startswith("layers."):
            tensors[f"{TOP[path]}.weight"] = value
            continue
        _, i, name = path.split(".")
        if name == "qkv":
            heads = (config.n_heads, config.n_heads + config.n_kv_heads)
            pieces = dict(
                zip(("q_proj", "k_proj", "v_proj"), np.split(value, [n * config.head_dim for n in heads]), strict=True)
            )
        elif name == "gate_up":
            pieces = dict(zip(("ff_proj", "up_proj"), np.split(value, 2), strict=True))
        else:
            pieces = {LAYER[name]: value}
        tensors |= {f"blocks.{i}.{piece}.weight": part for piece, part in pieces.items()}
    return {f"model.transformer.{name}": np.ascontiguousarray(value) for name, value in tensors.items()}


def export(directory: Path, config: ModelConfig, parameters: dict[str, jax.Array], tokenizer: Path) -> None:
    """Write config.json, model.safetensors (bf16) and the tokenizer's files; each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        if file.is_file() and file.name != CONFIG_FILE and file.suffix != ".safetensors":
            shutil.copyfile(file, directory / f"{file.name}.partial")
            os.replace(directory / f"{file.name}.partial", directory / file.name)
    tensors = hugging_face_names(
        config, {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in parameters.items()}
    )
    save_file(tensors, directory / "model.safetensors.partial", metadata={"format": "pt"})
    os.replace(directory / "model.safetensors.partial", directory / "model.safetensors")
    (directory / "config.json.partial").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    os.replace(directory / "config.json.partial", directory / CONFIG_FILE)
