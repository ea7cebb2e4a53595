"""ModelConfig against the config.json of LLaDA's family: what is read, what is refused, and how it is said."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fdllm_jax.config import ModelConfig

# GSAI-ML/LLaDA-8B-Instruct's config.json, without the remote code's auto_map.
LLADA_8B: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}


UNSUPPORTED = {
    "alibi": True,
    "rope": False,
    "rope_full_precision": False,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "block_type": "sequential",
    "block_group_size": 2,
    "layer_norm_type": "default",
    "layer_norm_with_affine": False,
    "bias_for_layer_norm": True,
    "attention_layer_norm": True,
    "input_emb_norm": True,
    "activation_type": "swiglu",
    "include_bias": True,
    "clip_qkv": 8.0,
    "model_type": "llama",
}


def changed(**changes: Any) -> dict[str, Any]:
    return LLADA_8B | changes


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in changed(**changes).items() if key not in keys}


def test_llada_8b() -> None:
    config = ModelConfig.from_hf(LLADA_8B)
    assert config == ModelConfig(
        vocab_size=126464,
        embedding_size=126464,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        mlp_size=12288,
        rope_theta=500000.0,
        norm_eps=1e-5,
        max_sequence_length=4096,
        qkv_bias=False,
        weight_tying=False,
        scale_logits=False,
        mask_token_id=126336,
        eos_token_id=126081,
        pad_token_id=126081,
    )
    assert config.head_dim == 128


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (changed(n_kv_heads=8), 8),
        (changed(n_kv_heads=None), 32),
        (without("n_kv_heads", "multi_query_attention"), 32),
        (without("n_kv_heads", multi_query_attention=True), 1),
        (changed(n_kv_heads=None, multi_query_attention=False), 32),
        (changed(n_kv_heads=1, multi_query_attention=True), 1),
    ],
)
def test_key_value_heads(mapping: dict[str, Any], expected: int) -> None:
    assert ModelConfig.from_hf(mapping).n_kv_heads == expected


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (changed(mlp_hidden_size=768), 768),
        (changed(mlp_hidden_size=None), 16384),
        (without("mlp_hidden_size", mlp_ratio=2.5), 10240),
        (without("mlp_hidden_size", "mlp_ratio"), 16384),
    ],
)
def test_mlp_size(mapping: dict[str, Any], expected: int) -> None:
    assert ModelConfig.from_hf(mapping).mlp_size == expected


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (changed(embedding_size=126592), 126592),
        (changed(embedding_size=None), 126464),
        (without("embedding_size"), 126464),
    ],
)
def test_embedding_size(mapping: dict[str, Any], expected: int) -> None:
    assert ModelConfig.from_hf(mapping).embedding_size == expected


def test_absent_keys_are_what_the_familys_configuration_class_says() -> None:
    read = ("rope_theta", "rms_norm_eps", "include_qkv_bias", "weight_tying", "scale_logits", "pad_token_id")
    config = ModelConfig.from_hf(without(*read, *UNSUPPORTED))
    assert (config.rope_theta, config.norm_eps, config.pad_token_id) == (10000.0, 1e-5, 126081)
    assert (config.qkv_bias, config.weight_tying, config.scale_logits) == (False, True, False)


def test_settings_are_taken() -> None:
    config = ModelConfig.from_hf(
        changed(include_qkv_bias=True, weight_tying=True, scale_logits=True, rope_theta=10000, rms_norm_eps=1e-6)
    )
    assert (config.qkv_bias, config.weight_tying, config.scale_logits) == (True, True, True)
    assert (config.rope_theta, config.norm_eps) == (10000.0, 1e-6)
    assert isinstance(config.rope_theta, float)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_an_unsupported_setting_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}=.* is not supported"):
        ModelConfig.from_hf(changed(**{key: UNSUPPORTED[key]}))


def test_all_faults_are_in_one_message() -> None:
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(changed(**UNSUPPORTED, embedding_size=5, n_kv_heads=5))
    for words in (*(f"{key}=" for key in UNSUPPORTED), "embedding_size=5 is below", "not a multiple of n_kv_heads=5"):
        assert words in str(caught.value)


def test_missing_keys_are_reported_together() -> None:
    with pytest.raises(ValueError, match="missing: d_model, vocab_size, mask_token_id, eos_token_id") as caught:
        ModelConfig.from_hf(without("d_model", "vocab_size", "eos_token_id", mask_token_id=None, alibi=True))
    assert "alibi=True is not supported" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": 31, "n_kv_heads": 31}, "d_model=4096 is not a multiple of n_heads=31"),
        ({"n_kv_heads": 5}, "n_heads=32 is not a multiple of n_kv_heads=5"),
        ({"d_model": 96, "n_kv_heads": 32}, "head_dim=3 .* is odd"),
        ({"embedding_size": 126463}, "embedding_size=126463 is below vocab_size=126464"),
        ({"mask_token_id": 126464}, "mask_token_id=126464 is not an id of the vocabulary"),
        ({"eos_token_id": -1}, "eos_token_id=-1 is not an id"),
        ({"mask_token_id": 126081}, "mask_token_id=126081 is also eos_token_id"),
        ({"n_layers": 0}, "n_layers=0 must be positive"),
        ({"n_heads": 0}, "n_heads=0 must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be positive"),
        ({"rms_norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
        ({"multi_query_attention": True}, "n_kv_heads=32 contradicts multi_query_attention=True"),
        ({"n_kv_heads": 8, "multi_query_attention": False}, "n_kv_heads=8 contradicts multi_query_attention=False"),
        ({"multi_query_attention": "yes"}, "multi_query_attention='yes' must be true, false or null"),
        ({"mlp_hidden_size": None, "mlp_ratio": 2.6667}, "mlp_ratio=2.6667 .* is not a whole number"),
        ({"mlp_hidden_size": None, "mlp_ratio": "four"}, "mlp_ratio='four' must be a number"),
    ],
)
def test_inconsistent_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": "4096", "n_layers": 32.0}, "d_model='4096' must be an integer; n_layers=32.0 must be an integer"),
        ({"n_heads": True}, "n_heads=True must be an integer"),
        ({"eos_token_id": [126081, 126348]}, r"eos_token_id=\[126081, 126348\] must be an integer"),
        ({"weight_tying": "no"}, "weight_tying='no' must be true or false"),
        ({"rope_theta": "big"}, "rope_theta='big' must be a number"),
    ],
)
def test_wrong_types_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(changed(**changes))


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 1, "weight_tying": True, "include_qkv_bias": True}])
def test_to_hf_is_the_way_back(changes: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.from_hf(changed(**changes))
    assert ModelConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert ModelConfig.from_directory(tmp_path) == config


def test_changed_copies_are_checked_too() -> None:
    with pytest.raises(ValueError, match="n_layers=-1 must be positive"):
        dataclasses.replace(ModelConfig.from_hf(LLADA_8B), n_layers=-1)


def test_a_missing_directory_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no such directory: {tmp_path / 'nowhere'}"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"no config.json in {tmp_path}"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"d_model": 4096', "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[1, 2]", "must hold a JSON object, not list"),
        (b"{}", "missing: d_model"),
    ],
)
def test_a_damaged_file_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'config.json'}.*{words}"):
        ModelConfig.from_directory(tmp_path)


def test_a_folder_named_config_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        ModelConfig.from_directory(tmp_path)


def test_it_needs_no_jax() -> None:
    code = "import sys, fdllm_jax.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
