"""Small checkpoints for the tests of conversion."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.synthetic import write_checkpoint
from convert.safetensors_files import write_safetensors
from convert.tensors import TensorInfo
from fdllm_jax.config import ModelConfig

SMALL = ModelConfig(
    vocab_size=48,
    embedding_size=48,
    d_model=16,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    mlp_size=24,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_sequence_length=64,
    qkv_bias=False,
    weight_tying=False,
    scale_logits=False,
    mask_token_id=47,
    eos_token_id=46,
    pad_token_id=46,
)
COMPANIONS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}\r\n",
    "special_tokens_map.json": b"{ }",
    "chat_template.jinja": "{{ messages }} \u00e9\n".encode(),
    "generation_config.json": b"\n\n{}",
    "vocab.json": b'{"a": 0}',
    "merges.txt": b"a b\n",
}


def make(
    directory: Path, config: ModelConfig = SMALL, *, dtype: str = "bfloat16", seed: int = 0, shards: bool = False
) -> Path:
    """A checkpoint with tokenizer files, in one file or in many."""
    write_checkpoint(directory, config, dtype=dtype, seed=seed, shard_bytes=1024 if shards else 2**30)
    for name, content in COMPANIONS.items():
        (directory / name).write_bytes(content)
    return directory


def raw(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor's dtype, shape and bytes, as the safetensors library reads them."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            for name in map(str, opened.keys()):
                tensor = opened.get_tensor(name)
                assert name not in tensors
                tensors[name] = (tensor.dtype.name, tensor.shape, tensor.tobytes())
    return tensors


def rewrite(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Write the single-file checkpoint anew with some tensors changed, added, or removed (None)."""
    with safe_open(directory / "model.safetensors", framework="numpy") as opened:
        tensors: dict[str, np.ndarray] = {name: opened.get_tensor(name) for name in map(str, opened.keys())}
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    infos = {name: TensorInfo(dtype=tensor.dtype.name, shape=tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(directory, infos, tensors.values())


def edit_header(file: Path, name: str, **changes: Any) -> None:
    """Change one entry of a safetensors file's header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[name] |= changes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
