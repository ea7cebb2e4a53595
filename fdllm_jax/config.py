"""ModelConfig: the shape and the special ids of a LLaDA model, from a Hugging Face `config.json`."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

CONFIG_FILE = "config.json"

# Settings of LLaDA's family that would make it another model: only these values are run, and an absent key means them.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "model_type": ("llada",),
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False, None),
    "input_emb_norm": (False, None),
    "activation_type": ("silu",),
    "include_bias": (False, None),
    "alibi": (False, None),
    "rope": (True,),
    "rope_full_precision": (True,),
    "rope_scaling": (None,),
    "clip_qkv": (None,),
}
_REQUIRED = ("d_model", "n_heads", "n_layers", "vocab_size", "max_sequence_length", "mask_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape, numerics and special ids of a LLaDA model.

    Sizes count elements. `embedding_size` is the number of rows of the embedding and of the head; rows from
    `vocab_size` on are padding, whose logits do not exist. Raises ValueError that names every inconsistent field.
    """

    vocab_size: int
    embedding_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlp_size: int
    rope_theta: float
    norm_eps: float
    max_sequence_length: int
    qkv_bias: bool
    weight_tying: bool
    scale_logits: bool
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self) -> None:
        faults = list(_inconsistencies(self))
        if faults:
            raise ValueError("the model's configuration is inconsistent: " + "; ".join(faults))

    @property
    def head_dim(self) -> int:
        """Elements of one attention head: d_model / n_heads."""
        return self.d_model // self.n_heads

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> Self:
        """Read LLaDA's `config.json` keys; keys that do not shape the model are ignored.

        An absent optional key has the default of LLaDA's own configuration class. Raises ValueError that lists every
        unsupported setting, missing key, wrong type and inconsistent value.
        """
        faults = [
            f"{key}={mapping[key]!r} is not supported (supported: {' or '.join(map(repr, values))})"
            for key, values in _SUPPORTED.items()
            if key in mapping and not any(_same(mapping[key], value) for value in values)
        ]
        missing = [key for key in _REQUIRED if mapping.get(key) is None]
        if missing:
            faults.append(f"missing: {', '.join(missing)}")
        else:
            try:
                config = cls(**_fields(mapping))
                if not faults:
                    return config
            except (ValueError, OverflowError) as error:
                faults.append(str(error))
        raise ValueError("this configuration is not a LLaDA model that can be run here: " + "; ".join(faults))

    @classmethod
    def from_directory(cls, directory: Path | str) -> Self:
        """Read `config.json` of a checkpoint directory.

        Raises FileNotFoundError if the directory or the file is missing, ValueError (with the file's path) otherwise.
        """
        directory = Path(directory)
        if not os.path.isdir(directory):  # which, unlike Path's, says no where it may not look
            raise FileNotFoundError(f"no such directory: {directory} (expected a checkpoint with a {CONFIG_FILE})")
        path = directory / CONFIG_FILE
        try:
            mapping = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no {CONFIG_FILE} in {directory}: a checkpoint directory must hold one") from error
        except (OSError, ValueError) as error:  # ValueError covers malformed JSON and malformed UTF-8
            raise ValueError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(mapping, dict):
            raise ValueError(f"{path} must hold a JSON object, not {type(mapping).__name__}")
        try:
            return cls.from_hf(mapping)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model: LLaDA's keys, of which `from_hf` makes an equal ModelConfig."""
        return {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "activation_type": "silu",
            "alibi": False,
            "attention_layer_norm": False,
            "bias_for_layer_norm": False,
            "block_group_size": 1,
            "block_type": "llama",
            "d_model": self.d_model,
            "embedding_size": self.embedding_size,
            "eos_token_id": self.eos_token_id,
            "include_bias": False,
            "include_qkv_bias": self.qkv_bias,
            "input_emb_norm": False,
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "mask_token_id": self.mask_token_id,
            "max_sequence_length": self.max_sequence_length,
            "mlp_hidden_size": self.mlp_size,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "n_layers": self.n_layers,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.norm_eps,
            "rope": True,
            "rope_full_precision": True,
            "rope_theta": self.rope_theta,
            "scale_logits": self.scale_logits,
            "vocab_size": self.vocab_size,
            "weight_tying": self.weight_tying,
        }


def _fields(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig's fields from LLaDA's keys, of the types that it declares."""
    values = {
        "vocab_size": mapping["vocab_size"],
        "embedding_size": _or(mapping.get("embedding_size"), mapping["vocab_size"]),
        "d_model": mapping["d_model"],
        "n_layers": mapping["n_layers"],
        "n_heads": mapping["n_heads"],
        "n_kv_heads": _kv_heads(mapping),
        "mlp_size": _mlp_size(mapping),
        "rope_theta": _number(_or(mapping.get("rope_theta"), 10000.0)),
        "norm_eps": _number(_or(mapping.get("rms_norm_eps"), 1e-5)),
        "max_sequence_length": mapping["max_sequence_length"],
        "qkv_bias": _or(mapping.get("include_qkv_bias"), False),
        "weight_tying": _or(mapping.get("weight_tying"), True),
        "scale_logits": _or(mapping.get("scale_logits"), False),
        "mask_token_id": mapping["mask_token_id"],
        "eos_token_id": mapping["eos_token_id"],
        "pad_token_id": _or(mapping.get("pad_token_id"), mapping["eos_token_id"]),
    }
    wrong = list(_wrong_types(values))
    if wrong:
        raise ValueError("; ".join(wrong))
    return values


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _same(value: object, supported: object) -> bool:
    """Equal, and of one kind: 1 is not True."""
    return value == supported and isinstance(value, bool) == isinstance(supported, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    """A float where JSON has a whole number."""
    return float(value) if _is_int(value) else value


def _kv_heads(mapping: Mapping[str, Any]) -> Any:
    """Key/value heads: `n_kv_heads`, or what `multi_query_attention` says; a contradiction of the two is refused."""
    heads, multi_query = mapping.get("n_kv_heads"), mapping.get("multi_query_attention")
    if multi_query not in (None, True, False):
        raise ValueError(f"multi_query_attention={multi_query!r} must be true, false or null")
    implied = 1 if multi_query else mapping["n_heads"]
    if heads is None:
        return implied
    if multi_query is not None and heads != implied:
        raise ValueError(f"n_kv_heads={heads!r} contradicts multi_query_attention={multi_query!r} (means {implied!r})")
    return heads


def _mlp_size(mapping: Mapping[str, Any]) -> Any:
    """`mlp_hidden_size`, or `mlp_ratio` (4 if absent) times `d_model` where it is null."""
    size, width = mapping.get("mlp_hidden_size"), mapping["d_model"]
    ratio = _number(_or(mapping.get("mlp_ratio"), 4))
    if size is not None or not isinstance(width, int):
        return size
    if not isinstance(ratio, float):
        raise ValueError(f"mlp_ratio={ratio!r} must be a number")
    if not (ratio * width).is_integer():
        raise ValueError(f"mlp_ratio={ratio!r} times d_model={width!r} is not a whole number; give mlp_hidden_size")
    return int(ratio * width)


def _wrong_types(values: Mapping[str, Any]) -> Iterator[str]:
    """JSON has its own idea of types; a field's is what ModelConfig declares."""
    for field in fields(ModelConfig):
        value = values[field.name]
        if field.type is int and not _is_int(value):
            yield f"{field.name}={value!r} must be an integer"
        if field.type is bool and not isinstance(value, bool):
            yield f"{field.name}={value!r} must be true or false"
        if field.type is float and not isinstance(value, float):
            yield f"{field.name}={value!r} must be a number"


def _inconsistencies(config: ModelConfig) -> Iterator[str]:
    sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "mlp_size", "max_sequence_length")
    for name in (*sizes, "rope_theta", "norm_eps"):
        value = getattr(config, name)
        if not 0 < value < math.inf:
            yield f"{name}={value!r} must be positive"
    if config.n_heads > 0 and config.d_model > 0:
        if config.d_model % config.n_heads:
            yield f"d_model={config.d_model} is not a multiple of n_heads={config.n_heads}"
        elif config.head_dim % 2:
            yield f"head_dim={config.head_dim} (d_model / n_heads) is odd, which rotary embeddings cannot be"
    if config.n_kv_heads > 0 and config.n_heads % config.n_kv_heads:
        yield f"n_heads={config.n_heads} is not a multiple of n_kv_heads={config.n_kv_heads}"
    if config.embedding_size < config.vocab_size:
        yield f"embedding_size={config.embedding_size} is below vocab_size={config.vocab_size}"
    for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        if not 0 <= value < config.vocab_size:
            yield f"{name}={value} is not an id of the vocabulary (0 to {config.vocab_size - 1})"
    if config.mask_token_id == config.eos_token_id:
        yield f"mask_token_id={config.mask_token_id} is also eos_token_id: the mask must be a token of its own"
