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

    Runs in the dtype of the weights. RMSNorm statistics, rotary embedding, attention and the returned logits are fp32,
    or fp64 where the weights are; rotary angles are fp32 always, as the model defines them.
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
        of them. Returns [batch, length, vocab_size] fp32 or fp64; what stands at positions that are not valid means
        nothing. Rotary positions count from the row's first column, padding included (only their differences matter).
        """
        if valid is None:
            valid = torch.ones_like(ids, dtype=torch.bool)
        positions = torch.arange(ids.shape[1])
        x = self.embed(ids)
        for layer in range(self.n_layers):
            q, k, v = self.project(layer, x, positions)
            mixed, _ = attend(q, k, v, valid[:, None, :])
            x = self.finish(layer, x, mixed)
        return self.logits(x)

    def sequence(self, ids: Tensor) -> Tensor:
        """Logits of one unpadded sequence: [length] -> [length, vocab_size]. What the reference samplers call."""
        return self(ids[None])[0]

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., d_model]."""
        return self.weights[f"{PREFIX}wte.weight"][ids]

    def project(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (both rotated) and v of a layer's input [batch, rows, d_model].

        positions: [rows] int64, where in the sequence the rows stand. q: [batch, rows, heads, head_dim]; k and v have
        the KV heads.
        """
        block = f"{PREFIX}blocks.{layer}."
        x = self._norm(f"{block}attn_norm", x)
        q = self._linear(f"{block}q_proj", x).unflatten(-1, (self.n_heads, self.head_dim))
        k = self._linear(f"{block}k_proj", x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v = self._linear(f"{block}v_proj", x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        return rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta), v

    def finish(self, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        """A layer's output from its input and what its heads attended to, [batch, rows, heads, head_dim]."""
        block = f"{PREFIX}blocks.{layer}."
        x = x + self._linear(f"{block}attn_out", mixed.flatten(-2))
        return x + self._mlp(block, self._norm(f"{block}ff_norm", x))

    def logits(self, x: Tensor) -> Tensor:
        """Logits, fp32 or fp64, of the last layer's output: [..., d_model] -> [..., vocab_size]."""
        x = self._norm(f"{PREFIX}ln_f", x)
        head = "wte.weight" if self.weight_tying else "ff_out.weight"
        logits = wide(functional.linear(x, self.weights[PREFIX + head]))[..., : self.vocab_size]
        return logits / self.d_model**0.5 if self.scale_logits else logits

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        exact = wide(x)
        normed = exact / torch.sqrt((exact * exact).mean(-1, keepdim=True) + self.norm_eps)
        return self.weights[f"{name}.weight"] * normed.to(x.dtype)

    def _mlp(self, block: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{block}ff_proj", x), self._linear(f"{block}up_proj", x)
        return self._linear(f"{block}ff_out", functional.silu(gate) * up)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention, scale 1/sqrt(head_dim), in fp32 (or fp64).

    q: [batch, queries, heads, head_dim]. k, v: [batch, keys, KV heads, head_dim]. visible: [batch, queries or 1, keys]
    bool. Returns the mixed values, [batch, queries, heads, head_dim] in q's dtype, and the probabilities,
    [batch, heads, queries, keys].
    """
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) / q.shape[-1] ** 0.5
    probabilities = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, wide(v)).to(q.dtype), probabilities


def kv_heads(config: Mapping[str, Any]) -> int:
    """Number of key/value heads: `n_kv_heads`, else 1 with `multi_query_attention`, else `n_heads`."""
    if config.get("n_kv_heads") is not None:
        return config["n_kv_heads"]
    return 1 if config.get("multi_query_attention") else config["n_heads"]


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding, rotate-half form, in fp32. x: [batch, rows, heads, head_dim]; positions: [rows]."""
    half = x.shape[-1] // 2
    inverse_frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.to(torch.float32)[:, None, None] * inverse_frequency  # [rows, 1, half]
    first, second = wide(x).split(half, dim=-1)
    cos, sin = angle.to(first.dtype).cos(), angle.to(first.dtype).sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is if that is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
