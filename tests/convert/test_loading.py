"""Loading against the safetensors library's arrays, stacked by hand."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from convert import load, to_orbax
from fdllm_jax.model import parameter_shapes
from tests.convert.checkpoints import SMALL, make, rewrite

CONFIGS = {
    "plain": SMALL,
    "grouped": dataclasses.replace(SMALL, n_kv_heads=2),
    "multi-query, biases, tied, padded": dataclasses.replace(
        SMALL, n_kv_heads=1, qkv_bias=True, weight_tying=True, embedding_size=64
    ),
}
BLOCK = "model.transformer.blocks.1."


def checkpoint_of(folder: Path, source: str, **options: object) -> Path:
    """A checkpoint's directory in the format `source`."""
    directory = make(folder / "safetensors", **options)
    if source == "orbax":
        to_orbax(directory, folder / "orbax", lambda done, total: None)
    return folder / source


def bits(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("source", ["safetensors", "orbax"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_the_tensors_stacked(tmp_path: Path, config, source: str) -> None:
    directory = checkpoint_of(tmp_path, source, config=config)
    loaded, parameters = load(directory)
    assert loaded == config
    assert {path: array.shape for path, array in parameters.items()} == parameter_shapes(config)
    tensors = load_file(tmp_path / "safetensors" / "model.safetensors")
    expected = {
        "embedding": tensors["model.transformer.wte.weight"],
        "layers.1.attn_norm": tensors[f"{BLOCK}attn_norm.weight"],
        "layers.1.qkv": jnp.concatenate([tensors[f"{BLOCK}{x}_proj.weight"] for x in "qkv"]),
        "layers.1.attn_out": tensors[f"{BLOCK}attn_out.weight"],
        "layers.1.mlp_norm": tensors[f"{BLOCK}ff_norm.weight"],
        "layers.1.gate_up": jnp.concatenate([tensors[f"{BLOCK}{x}_proj.weight"] for x in ("ff", "up")]),
        "layers.1.down": tensors[f"{BLOCK}ff_out.weight"],
        "final_norm": tensors["model.transformer.ln_f.weight"],
    }
    if config.qkv_bias:
        expected["layers.1.qkv_bias"] = jnp.concatenate([tensors[f"{BLOCK}{x}_proj.bias"] for x in "qkv"])
    if not config.weight_tying:
        expected["head"] = tensors["model.transformer.ff_out.weight"]
    for path, array in expected.items():
        assert parameters[path].dtype == jnp.bfloat16
        assert bits(parameters[path]) == bits(array), path


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_shards_and_single_file_load_alike(tmp_path: Path, stored: str) -> None:
    _, single = load(make(tmp_path / "single", dtype=stored))
    _, shards = load(make(tmp_path / "shards", dtype=stored, shards=True))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 10
    assert all(array.dtype == stored for array in shards.values())
    assert {path: bits(array) for path, array in single.items()} == {
        path: bits(array) for path, array in shards.items()
    }


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")]
)
def test_dtype_casts_as_astype_does(tmp_path: Path, stored: str, dtype: str) -> None:
    directory = make(tmp_path / "a", dtype=stored)
    _, kept = load(directory)
    _, cast = load(directory, dtype=jnp.dtype(dtype))
    for path, array in cast.items():
        assert array.dtype == dtype
        assert bits(array) == bits(kept[path].astype(dtype)), path


def test_they_are_on_the_default_device(tmp_path: Path) -> None:
    _, parameters = load(make(tmp_path / "a"))
    assert {device for array in parameters.values() for device in array.devices()} == {jax.devices()[0]}


def test_they_do_not_change_with_the_file(tmp_path: Path) -> None:
    _, parameters = load(make(tmp_path / "a"))
    before = {path: bits(array) for path, array in parameters.items()}
    file = tmp_path / "a" / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert {path: bits(array) for path, array in parameters.items()} == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [f"{BLOCK}k_proj.weight", "model.transformer.ln_f.weight", f"{BLOCK}up_proj.weight"])
def test_nan_and_infinite_weights_are_refused_by_name(tmp_path: Path, name: str, bad: float) -> None:
    make(tmp_path / "a", dtype="float32")
    array = np.zeros({"ln_f": (16,), "k_pr": (16, 16), "up_p": (24, 16)}[name.split(".")[-2][:4]], np.float32)
    array.reshape(-1)[-1] = bad
    rewrite(tmp_path / "a", {name: array})
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite weights"):
        load(tmp_path / "a")


def test_weights_beyond_the_range_of_dtype_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path / "a", dtype="float32")
    rewrite(tmp_path / "a", {"model.transformer.ln_f.weight": np.full(16, 1e6, np.float32)})
    assert load(tmp_path / "a", dtype=jnp.dtype("bfloat16"))
    with pytest.raises(ValueError, match="beyond the range of float16: model.transformer.ln_f.weight"):
        load(tmp_path / "a", dtype=jnp.dtype("float16"))


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_hf()))
    with pytest.raises(
        FileNotFoundError, match=rf"no weights in {tmp_path}: .*model\.safetensors, .*index\.json.*parameters/"
    ):
        load(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no such directory: {tmp_path / 'x'}"):
        load(tmp_path / "x")
