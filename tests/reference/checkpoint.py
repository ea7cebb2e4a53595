"""Small random LLaDA checkpoints in Hugging Face form, for tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .model import PREFIX, kv_heads

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SHARPNESS = 5.0  # standard deviation of the logits


def random_config(**overrides: Any) -> dict[str, Any]:
    """The values of a small LLaDA's config.json; overrides replace or add keys.

    Unless given, the mask token is the vocabulary's last id, and EOS and padding the one before it.
    """
    vocab_size = overrides.get("vocab_size", 96)
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 500.0,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "scale_logits": False,
        "vocab_size": vocab_size,
        "embedding_size": vocab_size,
        "max_sequence_length": 512,
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 160,
        "mlp_ratio": 4,
        "mask_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 2,
        "pad_token_id": vocab_size - 2,
    }
    return config | overrides


def random_state_dict(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Random fp32 weights under Hugging Face names.

    Scaled so that attention is selective, masked positions predict from their context, and the logits are varied: some
    predictions are nearly certain and some nearly flat.
    """
    generator = torch.Generator().manual_seed(seed)
    d_model, head_dim = config["d_model"], config["d_model"] // config["n_heads"]
    kv_size = kv_heads(config) * head_dim
    mlp_size = config["mlp_hidden_size"] or config["mlp_ratio"] * d_model
    embedding_size = config["embedding_size"] or config["vocab_size"]
    # Logits are head @ normalized x, so their deviation is that of the head's entries times sqrt(d_model).
    head_scale = SHARPNESS / d_model**0.5 * (d_model**0.5 if config["scale_logits"] else 1.0)
    weights: dict[str, Tensor] = {}

    def add(name: str, *shape: int, scale: float, centre: float = 0.0) -> None:
        weights[PREFIX + name] = centre + scale * torch.randn(*shape, generator=generator)

    def add_linear(name: str, rows: int, columns: int, gain: float) -> None:
        add(f"{name}.weight", rows, columns, scale=gain / columns**0.5)

    add("wte.weight", embedding_size, d_model, scale=head_scale if config["weight_tying"] else 1.0)
    weights[PREFIX + "wte.weight"][config["mask_token_id"]] *= 0.1
    for i in range(config["n_layers"]):
        block = f"blocks.{i}."
        for name, rows in (("q_proj", d_model), ("k_proj", kv_size), ("v_proj", kv_size)):
            add_linear(block + name, rows, d_model, 2.0)
            if config["include_qkv_bias"]:
                add(f"{block}{name}.bias", rows, scale=0.5)
        add_linear(f"{block}attn_out", d_model, d_model, 1.5)
        add_linear(f"{block}ff_proj", mlp_size, d_model, 1.0)
        add_linear(f"{block}up_proj", mlp_size, d_model, 1.0)
        add_linear(f"{block}ff_out", d_model, mlp_size, 1.5)
        add(f"{block}attn_norm.weight", d_model, scale=0.1, centre=1.0)
        add(f"{block}ff_norm.weight", d_model, scale=0.1, centre=1.0)
    add("ln_f.weight", d_model, scale=0.1, centre=1.0)
    if not config["weight_tying"]:
        add("ff_out.weight", embedding_size, d_model, scale=head_scale)
    return weights


def random_checkpoint(
    directory: Path,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer_from: Path | None = None,
    **overrides: Any,
) -> Path:
    """Write a random LLaDA checkpoint (config.json and safetensors) into a directory, made if missing; returns it.

    shards > 1 writes that many safetensors files and their index. tokenizer_from is a directory whose tokenizer files
    are copied; the ids and the vocabulary size are then the caller's to override. overrides go to `random_config`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = random_config(**overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    weights = {name: tensor.to(dtype) for name, tensor in random_state_dict(config, seed).items()}
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(directory, weights, shards)
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).exists():
                shutil.copy(tokenizer_from / name, directory)
    return directory


def _save_shards(directory: Path, weights: dict[str, Tensor], shards: int) -> None:
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
