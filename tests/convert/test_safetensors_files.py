"""Safetensors files against the safetensors library, and what is said of damaged ones."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.loading import open_checkpoint
from convert.safetensors_files import write_safetensors
from convert.tensors import TensorInfo
from tests.convert.checkpoints import SMALL, edit_header, make, raw, rewrite

QUERY = "model.transformer.blocks.1.q_proj.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    make(tmp_path / "a")
    tensors = {name: np.frombuffer(data, "V2").reshape(shape) for name, (_, shape, data) in raw(tmp_path / "a").items()}
    save_file({name: array.view(ml_dtypes.bfloat16) for name, array in tensors.items()}, tmp_path / "a" / FILE)
    checkpoint = open_checkpoint(tmp_path / "a")
    for path, parts in checkpoint.layout.items():
        expected = b"".join(tensors[part.name].tobytes() for part in parts)
        assert checkpoint.read(path).tobytes() == expected, path


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(5, dtype=np.float16)}
    infos = {name: TensorInfo(dtype=tensor.dtype.name, shape=tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(tmp_path, infos, tensors.values())
    assert raw(tmp_path) == {name: (t.dtype.name, t.shape, t.tobytes()) for name, t in tensors.items()}


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    sizes = [300, 300, 300, 2000, 100, 100]
    tensors = {f"t{i}": np.full(size // 4, i, np.float32) for i, size in enumerate(sizes)}
    infos = {name: TensorInfo(dtype="float32", shape=tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(tmp_path, infos, tensors.values(), shard_bytes=700)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert [file[6:11] for file in index["weight_map"].values()] == [
        "00001",
        "00001",
        "00002",
        "00003",
        "00004",
        "00004",
    ]
    assert {name: data for name, (_, _, data) in raw(tmp_path).items()} == {n: t.tobytes() for n, t in tensors.items()}


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    file = make(tmp_path / "a") / FILE
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{file} is truncated"):
        open_checkpoint(tmp_path / "a")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    file = sorted(make(tmp_path / "a", shards=True).glob("*.safetensors"))[3]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{file} is truncated"):
        open_checkpoint(tmp_path / "a")


def test_a_file_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = make(tmp_path / "a") / FILE
    checkpoint = open_checkpoint(tmp_path / "a")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{file} ended within model.transformer.ff_out.weight"):
        checkpoint.read("head")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_offsets": [0, 10]}, "10 bytes for shape .16, 16. of bfloat16"),
        ({"data_offsets": [0, 512]}, "overlap or leave gaps"),
        ({"data_offsets": [-512, 0]}, "not whole numbers"),
        ({"data_offsets": None}, "damaged header"),
        ({"shape": "all"}, "damaged header"),
        ({"shape": [16.0, 16]}, "not whole numbers"),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    file = make(tmp_path / "a") / FILE
    edit_header(file, QUERY, **changes)
    with pytest.raises(ValueError, match=f"{file} .*{words}"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("content", [b"\x10" + bytes(7) + b"no json at all!!", b"\x04" + bytes(7) + b"[12]"])
def test_a_header_that_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    file = make(tmp_path / "a") / FILE
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} has a damaged header"):
        open_checkpoint(tmp_path / "a")


def test_bytes_after_the_tensors_are_refused(tmp_path: Path) -> None:
    file = make(tmp_path / "a") / FILE
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ValueError, match=f"{file} is damaged: its header speaks of"):
        open_checkpoint(tmp_path / "a")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = make(tmp_path / "a") / FILE
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=f"{file} cannot be read: Is a directory"):
        open_checkpoint(tmp_path / "a")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    file = make(tmp_path / "a") / FILE
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        open_checkpoint(tmp_path / "a")


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    files = sorted(make(tmp_path / "a", shards=True).glob("*.safetensors"))
    files[1].unlink()
    files[4].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{INDEX} .*\n.*\(2\): {files[1].name}, {files[4].name}"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"weight_map": [1]}', "cannot be read"),
        ('{"weight_map": {"a": 1}}', "cannot be read"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside its directory"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str, words: str) -> None:
    index = make(tmp_path / "a", shards=True) / INDEX
    index.write_text(content)
    with pytest.raises(ValueError, match=f"{index} .*{words}.*weight_map"):
        open_checkpoint(tmp_path / "a")


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    index = make(tmp_path / "a", shards=True) / INDEX
    content = json.loads(index.read_text())
    right = content["weight_map"][QUERY]
    wrong = next(file for file in content["weight_map"].values() if file != right)
    content["weight_map"][QUERY] = wrong
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"tensors not there .*{QUERY} in {wrong}\n.*another file .*{QUERY}"):
        open_checkpoint(tmp_path / "a")


def test_missing_unexpected_and_misshapen_tensors_are_reported_together(tmp_path: Path) -> None:
    make(tmp_path / "a")
    rewrite(
        tmp_path / "a",
        {
            "model.transformer.ln_f.weight": None,
            "model.transformer.blocks.0.q_proj.bias": np.zeros(16, np.float32),
            QUERY: np.zeros((8, 16), np.float32),
        },
    )
    with pytest.raises(ValueError) as caught:
        open_checkpoint(tmp_path / "a")
    assert str(caught.value).splitlines()[1:] == [
        "  missing (1): model.transformer.ln_f.weight [16]",
        "  unexpected (1): model.transformer.blocks.0.q_proj.bias [16]",
        "  wrong shape (1): model.transformer.blocks.1.q_proj.weight [8, 16] (expected [16, 16])",
    ]


def test_a_head_beside_tied_weights_is_unexpected(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps(dataclasses.replace(SMALL, weight_tying=True).to_hf()))
    with pytest.raises(ValueError, match=r"unexpected \(1\): model.transformer.ff_out.weight"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("word", ["I64", "F64", "F8_E4M3"])
def test_other_dtypes_are_refused(tmp_path: Path, word: str) -> None:
    edit_header(make(tmp_path / "a") / FILE, QUERY, dtype=word)
    with pytest.raises(ValueError, match=rf"dtype other than bfloat16, float16, float32 \(1\): {QUERY} {word}"):
        open_checkpoint(tmp_path / "a")


def test_packed_tensors_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    rewrite(tmp_path / "a", {QUERY: np.zeros((16, 16), np.float32)})
    with pytest.raises(ValueError, match=f"{QUERY} float32 . .*k_proj.weight bfloat16"):
        open_checkpoint(tmp_path / "a")


def test_parameters_may_differ_in_dtype(tmp_path: Path) -> None:
    make(tmp_path / "a")
    rewrite(tmp_path / "a", {"model.transformer.ln_f.weight": np.ones(16, np.float32)})
    assert open_checkpoint(tmp_path / "a").read("final_norm").dtype == np.float32
