"""LLaDA in plain PyTorch: dense bidirectional attention, no cache, no packing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

PREFIX = "model.transformer."


class ReferenceLLaDA:
    """LLaDA read from a state dict with Hugging Face names and the values of its config.json.

    Runs in the dtype of the weights. RMSNorm statistics, rotary embedding, attention and the returned logits are fp32, or
    fp64 where the weights are; rotary angles are fp32 always, as the model defines them.
    """

    def __init__(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]):
        self.weights = state_dict
        self.d_model: int = config["d_model"]
        self.n_layers: int = config["n_layers"]
        self.n_heads: int = config["n_heads"]
        self.n_kv_heads = kv_heads(config)
        self.head_dim = self.d_model // self.n_heads
        self.vocab_size: int = config["vocab_size"]
        self.rope_theta: float = config.get("rope_theta", 10000.0)
        self.norm_eps: float = config.get("rms_norm_eps", 1e-5)
        self.weight_tying: bool = config.get("weight_tying", True)
        self.scale_logits: bool = config.get("scale_logits", False)

    @classmethod
    def from_directory(cls, directory: Path, dtype: torch.dtype | None = None) -> "ReferenceLLaDA":
        """Read config.json and every safetensors file of a directory; dtype None keeps the stored one."""
        config = json.loads((directory / "config.json").read_text())
        state_dict = {
            name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        if dtype is not None:
            state_dict = {name: tensor.to(dtype) for name, tensor in state_dict.items()}
        return cls(config, state_dict)

    @torch.no_grad()
    def __call__(self, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Logits of every position.

        ids: [batch, length] int64. valid: [batch, length] bool, True where a position may be attended to; None is all
        of them. Returns [batch, length, vocab_size] fp32 or fp64; what stands at positions that are not valid means nothing.
        Rotary positions count from the row's first column, padding included (only their differences matter).
        """
        if valid is None:
            valid = torch.ones_like(ids, dtype=torch.bool)
        x = self.weights[f"{PREFIX}wte.weight"][ids]
        for i in range(self.n_layers):
            block = f"{PREFIX}blocks.{i}."
            x = x + self._attention(block, self._norm(f"{block}attn_norm", x), valid)
            x = x + self._mlp(block, self._norm(f"{block}ff_norm", x))
        x = self._norm(f"{PREFIX}ln_f", x)
        head = "wte.weight" if self.weight_tying else "ff_out.weight"
        logits = wide(functional.linear(x, self.weights[PREFIX + head]))[..., : self.vocab_size]
        return logits / self.d_model**0.5 if self.scale_logits else logits

    def sequence(self, ids: Tensor) -> Tensor:
        """Logits of one unpadded sequence: [length] -> [length, vocab_size]. What the reference samplers call."""
        return self(ids[None])[0]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        exact = wide(x)
        normed = exact / torch.sqrt((exact * exact).mean(-1, keepdim=True) + self.norm_eps)
        return self.weights[f"{name}.weight"] * normed.to(x.dtype)

    def _attention(self, block: str, x: Tensor, valid: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self._linear(f"{block}q_proj", x).view(batch, length, self.n_heads, self.head_dim)
        k = self._linear(f"{block}k_proj", x).view(batch, length, self.n_kv_heads, self.head_dim)
        v = self._linear(f"{block}v_proj", x).view(batch, length, self.n_kv_heads, self.head_dim)
        q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) / self.head_dim**0.5
        scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide(v)).to(x.dtype)
        return self._linear(f"{block}attn_out", mixed.reshape(batch, length, -1))

    def _mlp(self, block: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{block}ff_proj", x), self._linear(f"{block}up_proj", x)
        return self._linear(f"{block}ff_out", functional.silu(gate) * up)


def kv_heads(config: Mapping[str, Any]) -> int:
    """Number of key/value heads: `n_kv_heads`, else 1 with `multi_query_attention`, else `n_heads`."""
    if config.get("n_kv_heads") is not None:
        return config["n_kv_heads"]
    return 1 if config.get("multi_query_attention") else config["n_heads"]


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding, rotate-half form, in fp32. x: [batch, length, heads, head_dim]."""
    half = x.shape[-1] // 2
    inverse_frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None, None] * inverse_frequency  # [length, 1, half]
    first, second = wide(x).split(half, dim=-1)
    cos, sin = angle.to(first.dtype).cos(), angle.to(first.dtype).sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is if that is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
