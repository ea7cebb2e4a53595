"""What is said of damaged Orbax checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from convert import load, to_orbax
from convert.orbax_files import item_of, write_orbax
from tests.convert.checkpoints import SMALL, make


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax")
    to_orbax(make(folder / "safetensors"), folder / "orbax", lambda done, total: None)
    return folder / "orbax"


@pytest.fixture
def orbax(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "orbax")


def test_there_is_one_item_a_layer(orbax: Path) -> None:
    items = {item.name for item in (orbax / "parameters").iterdir()}
    assert items == {"embedding", "layers.0", "layers.1", "layers.2", "final_norm", "head"}


def test_orbax_reads_it(orbax: Path) -> None:
    _, parameters = load(orbax)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for item in ("embedding", "layers.2"):
            args = {
                item_of(path)[1]: ocp.RestoreArgs(restore_type=np.ndarray)
                for path in parameters
                if item_of(path)[0] == item
            }
            tree = checkpointer.restore(orbax / "parameters" / item, args=ocp.args.PyTreeRestore(restore_args=args))
            for leaf, array in tree.items():
                path = item if leaf == item else f"{item}.{leaf}"
                np.testing.assert_array_equal(array, np.asarray(parameters[path]), strict=True)


def test_it_moves_with_its_directory(orbax: Path) -> None:
    assert load(orbax.rename(orbax.parent / "elsewhere"))[0] == SMALL


def test_a_relative_path_will_do(orbax: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(orbax.parent)
    assert load(Path("orbax"))[0] == SMALL


def test_a_missing_item_is_named(orbax: Path) -> None:
    shutil.rmtree(orbax / "parameters" / "layers.1")
    shutil.rmtree(orbax / "parameters" / "head")
    with pytest.raises(
        ValueError, match=r"missing \(7\): layers.1.attn_norm \[16\], layers.1.qkv \[48, 16\].*head \[48, 16\]"
    ):
        load(orbax)


def test_an_unexpected_item_is_named(orbax: Path) -> None:
    write_orbax(orbax, [("layers.3", {"qkv": np.ones((2, 3), np.float32)})])
    with pytest.raises(ValueError, match=r"unexpected \(1\): layers.3.qkv \[2, 3\]"):
        load(orbax)


def test_misshapen_parameters_are_named(orbax: Path) -> None:
    (orbax / "config.json").write_text(json.dumps(SMALL.to_hf() | {"n_kv_heads": 2, "embedding_size": 64}))
    with pytest.raises(
        ValueError, match=r"wrong shape \(5\): embedding \[48, 16\] \(expected \[64, 16\]\), layers.0.qkv"
    ):
        load(orbax)


def empty(item: Path) -> None:
    shutil.rmtree(item)
    item.mkdir()


def without_metadata(item: Path) -> None:
    (item / "_METADATA").unlink()


def garbled_metadata(item: Path) -> None:
    (item / "_METADATA").write_text("{")


def without_manifest(item: Path) -> None:
    (item / "manifest.ocdbt").unlink()


def truncated_data(item: Path) -> None:
    for file in item.rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_data(item: Path) -> None:
    for folder in item.rglob("d"):
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "damage", [empty, without_metadata, garbled_metadata, without_manifest, truncated_data, without_data]
)
def test_a_damaged_item_is_named(orbax: Path, damage: Callable[[Path], None]) -> None:
    damage(orbax / "parameters" / "layers.1")
    with pytest.raises(ValueError, match=rf"(?s){orbax / 'parameters'}.*layers\.1"):
        load(orbax)


def test_zeros_keep_their_sign(tmp_path: Path) -> None:
    make(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = b"\x00\x80" * ((len(content) - start) // 2)
    file.write_bytes(content)
    to_orbax(tmp_path / "a", tmp_path / "b", lambda done, total: None)
    _, parameters = load(tmp_path / "b")
    assert all(jnp.signbit(array).all() for array in parameters.values())


def test_nan_weights_are_refused_by_the_tensors_name(orbax: Path) -> None:
    layer = {
        path.removeprefix("layers.1."): np.array(a)
        for path, a in load(orbax)[1].items()
        if path.startswith("layers.1.")
    }
    layer["qkv"][20, 3] = np.nan
    shutil.rmtree(orbax / "parameters" / "layers.1")
    write_orbax(orbax, [("layers.1", layer)])
    with pytest.raises(ValueError, match=r"model\.transformer\.blocks\.1\.k_proj\.weight holds NaN"):
        load(orbax)
