"""The table of names against LLaDA's own names, written out by hand, and against the declared parameters."""

import dataclasses

import pytest

from convert.orbax_files import item_of
from convert.table import TABLE, layout
from fdllm_jax.model import parameter_shapes
from tests.convert.checkpoints import SMALL

BLOCK = "model.transformer.blocks.2."


def test_the_names_and_shapes_of_a_layer() -> None:
    config = dataclasses.replace(SMALL, n_kv_heads=2, qkv_bias=True)
    tensors = {part.name: part.shape for parts in layout(config).values() for part in parts}
    assert {name: shape for name, shape in tensors.items() if name.startswith(BLOCK)} == {
        f"{BLOCK}attn_norm.weight": (16,),
        f"{BLOCK}q_proj.weight": (16, 16),
        f"{BLOCK}k_proj.weight": (8, 16),
        f"{BLOCK}v_proj.weight": (8, 16),
        f"{BLOCK}q_proj.bias": (16,),
        f"{BLOCK}k_proj.bias": (8,),
        f"{BLOCK}v_proj.bias": (8,),
        f"{BLOCK}attn_out.weight": (16, 16),
        f"{BLOCK}ff_norm.weight": (16,),
        f"{BLOCK}ff_proj.weight": (24, 16),
        f"{BLOCK}up_proj.weight": (24, 16),
        f"{BLOCK}ff_out.weight": (16, 24),
    }


def test_the_names_and_shapes_outside_the_layers() -> None:
    tensors = {part.name: part.shape for parts in layout(SMALL).values() for part in parts}
    assert {name: shape for name, shape in tensors.items() if ".blocks." not in name} == {
        "model.transformer.wte.weight": (48, 16),
        "model.transformer.ln_f.weight": (16,),
        "model.transformer.ff_out.weight": (48, 16),
    }
    tied = layout(dataclasses.replace(SMALL, weight_tying=True))
    assert "model.transformer.ff_out.weight" not in {part.name for parts in tied.values() for part in parts}


def test_the_order_within_packed_parameters() -> None:
    parts = layout(dataclasses.replace(SMALL, qkv_bias=True))
    assert [part.name for part in parts["layers.2.qkv"]] == [f"{BLOCK}{x}_proj.weight" for x in "qkv"]
    assert [part.name for part in parts["layers.2.qkv_bias"]] == [f"{BLOCK}{x}_proj.bias" for x in "qkv"]
    assert [part.name for part in parts["layers.2.gate_up"]] == [f"{BLOCK}ff_proj.weight", f"{BLOCK}up_proj.weight"]


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "weight_tying": True, "embedding_size": 64}])
def test_it_covers_the_declared_parameters(changes: dict[str, bool]) -> None:
    config = dataclasses.replace(SMALL, n_layers=12, **changes)
    shapes = parameter_shapes(config)
    parts = layout(config)
    assert parts.keys() == shapes.keys()
    assert all(sum(part.shape[0] for part in parts[path]) == shape[0] for path, shape in shapes.items())
    assert all(part.shape[1:] == shapes[path][1:] for path in parts for part in parts[path])
    names = [part.name for group in parts.values() for part in group]
    assert len(names) == len(set(names))


def test_no_row_of_it_is_unused() -> None:
    paths = parameter_shapes(dataclasses.replace(SMALL, n_layers=1, qkv_bias=True))
    assert {path.replace("layers.0.", "layers.{i}.") for path in paths} == TABLE.keys()


def test_items() -> None:
    assert item_of("layers.11.qkv") == ("layers.11", "qkv")
    assert item_of("head") == ("head", "head")
