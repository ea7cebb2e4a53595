"""Conversion there and back is bit-exact, and leaves nothing behind when it fails."""

import dataclasses
import errno
import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convert import conversion, orbax_files, safetensors_files, to_orbax, to_safetensors
from tests.convert.checkpoints import COMPANIONS, SMALL, make, raw, rewrite

CONFIGS = {
    "plain": SMALL,
    "grouped, padded": dataclasses.replace(SMALL, n_kv_heads=2, embedding_size=64),
    "multi-query, biases, tied": dataclasses.replace(SMALL, n_kv_heads=1, qkv_bias=True, weight_tying=True),
    "eleven layers": dataclasses.replace(SMALL, n_layers=11),
}


def silent(done: int, total: int) -> None:
    """No progress is shown."""


def there_and_back(folder: Path) -> Path:
    to_orbax(folder / "source", folder / "orbax", silent)
    to_safetensors(folder / "orbax", folder / "back", silent)
    assert {entry.name for entry in folder.iterdir()} == {"source", "orbax", "back"}
    return folder / "back"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tensor_comes_back_as_it_was(tmp_path: Path, config) -> None:
    make(tmp_path / "source", config, seed=7)
    assert raw(there_and_back(tmp_path)) == raw(tmp_path / "source")


@pytest.mark.parametrize("shards", [False, True], ids=["single file", "shards"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_comes_back_as_it_was(tmp_path: Path, dtype: str, shards: bool) -> None:
    make(tmp_path / "source", dtype=dtype, shards=shards, seed=8)
    before = raw(tmp_path / "source")
    assert {name for name, _, _ in before.values()} == {dtype}
    assert raw(there_and_back(tmp_path)) == before


def test_subnormals_negatives_and_mixed_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    make(tmp_path / "source")
    bits = np.random.default_rng(9).integers(0, 2**32, (48, 16), dtype=np.uint32)
    values = np.where(bits >> 23 & 0xFF == 0xFF, bits & 0x807FFFFF, bits).astype(np.uint32).view(np.float32)
    rewrite(tmp_path / "source", {"model.transformer.wte.weight": values})
    assert raw(there_and_back(tmp_path)) == raw(tmp_path / "source")


def test_the_way_back_is_sharded_where_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "source")
    monkeypatch.setattr(
        conversion,
        "write_safetensors",
        lambda *arguments: safetensors_files.write_safetensors(*arguments, shard_bytes=4000),
    )
    back = there_and_back(tmp_path)
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 3
    assert raw(back) == raw(tmp_path / "source")


def test_configuration_and_tokenizer_are_carried_along(tmp_path: Path) -> None:
    make(tmp_path / "source")
    config = (tmp_path / "source" / "config.json").read_bytes().replace(b"{", b'{ "custom": 1,', 1)
    (tmp_path / "source" / "config.json").write_bytes(config)
    (tmp_path / "source" / "modeling_llada.py").write_text("code")
    there_and_back(tmp_path)
    for folder in (tmp_path / "orbax", tmp_path / "back"):
        for name, content in (COMPANIONS | {"config.json": config}).items():
            assert (folder / name).read_bytes() == content, name
        assert not list(folder.glob("*.py"))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    to_orbax(make(tmp_path / "source"), tmp_path / "orbax", lambda done, total: seen.append((done, total)))
    total = sum(len(data) for _, _, data in raw(tmp_path / "source").values())
    assert seen[-1] == (total, total)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))


def test_missing_parents_of_the_destination_are_made_and_removed(tmp_path: Path) -> None:
    make(tmp_path / "source")
    to_orbax(tmp_path / "source", tmp_path / "a" / "b" / "orbax", silent)
    assert (tmp_path / "a" / "b" / "orbax" / "config.json").exists()
    rewrite(tmp_path / "source", {"model.transformer.ln_f.weight": np.full(16, np.nan, np.float32)})
    with pytest.raises(ValueError, match="ln_f.weight holds NaN"):
        to_orbax(tmp_path / "source", tmp_path / "c" / "d" / "orbax", silent)
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "a"}


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_destination_is_left_alone(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "source")
    destination = tmp_path / "there"
    if kind == "folder":
        destination.mkdir()
    elif kind == "file":
        destination.write_text("mine")
    else:
        destination.symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"{destination} exists"):
        to_orbax(tmp_path / "source", destination, silent)
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "there"}
    assert kind != "file" or destination.read_text() == "mine"


def test_the_wrong_direction_is_said(tmp_path: Path) -> None:
    to_orbax(make(tmp_path / "source"), tmp_path / "orbax", silent)
    with pytest.raises(ValueError, match="is an Orbax checkpoint already"):
        to_orbax(tmp_path / "orbax", tmp_path / "x", silent)
    with pytest.raises(ValueError, match="is a safetensors checkpoint already"):
        to_safetensors(tmp_path / "source", tmp_path / "x", silent)


def failing(action: Any, after: int, error: BaseException) -> Any:
    """The action, which raises at its call number `after`."""
    calls = itertools.count()

    def act(*arguments: Any) -> Any:
        if next(calls) == after:
            raise error
        return action(*arguments)

    return act


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint in both formats."""
    folder = tmp_path_factory.mktemp("pair")
    to_orbax(make(folder / "safetensors"), folder / "orbax", silent)
    return folder


@pytest.mark.parametrize("after", [0, 11, 29])
@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (ValueError("something"), ValueError, "something"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (FULL, ValueError, "the disk is too full for .*; nothing was kept"),
    ],
)
@pytest.mark.parametrize("direction", ["to_orbax", "to_safetensors"])
def test_a_failure_leaves_nothing(
    pair: Path,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
    error: BaseException,
    expected: type[BaseException],
    words: str | None,
    after: int,
) -> None:
    convert, files, source = {
        "to_orbax": (to_orbax, safetensors_files, "safetensors"),
        "to_safetensors": (to_safetensors, orbax_files, "orbax"),
    }[direction]
    monkeypatch.setattr(files, "check_finite", failing(files.check_finite, after, error))
    with pytest.raises(expected, match=words):
        convert(pair / source, pair / "new", silent)
    assert {entry.name for entry in pair.iterdir()} == {"safetensors", "orbax"}


@pytest.mark.parametrize("direction", ["to_orbax", "to_safetensors"])
def test_too_little_space_is_said_before_anything_is_read(
    pair: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    source = pair / ("safetensors" if direction == "to_orbax" else "orbax")
    with pytest.raises(ValueError, match=r"the disk is too full for .*: 0\.00 GB are needed and 0\.00 GB are free"):
        getattr(conversion, direction)(source, pair / "new", silent)
    assert {entry.name for entry in pair.iterdir()} == {"safetensors", "orbax"}


def test_a_disk_that_fills_while_orbax_writes_is_said(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import orbax.checkpoint as ocp

    def save(self: Any, *arguments: Any, **options: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 12 bytes: No space left on device [os_error_code='28']")

    monkeypatch.setattr(ocp.Checkpointer, "save", save)
    with pytest.raises(ValueError, match="the disk is too full for .*No space left on device"):
        to_orbax(pair / "safetensors", pair / "new", silent)
    assert {entry.name for entry in pair.iterdir()} == {"safetensors", "orbax"}
