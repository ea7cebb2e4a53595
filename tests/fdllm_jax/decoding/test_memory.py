"""The compiled decode step works on the cache in place."""

import json
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fdllm_jax.config import CONFIG_FILE, ModelConfig
from fdllm_jax.decoding import passes
from fdllm_jax.decoding.loop import run
from fdllm_jax.decoding.methods import method_of
from fdllm_jax.decoding.passes import narrower, packed_rows
from fdllm_jax.engine import SHIPPED
from fdllm_jax.model import LLaDA
from fdllm_jax.settings import METHODS, Settings
from tests.decode import empty, load
from tests.reference.checkpoint import random_checkpoint

SLOTS, CAPACITY, HEAD_DIM, VOCAB = 3, 96, 16, 40
SMALL = ModelConfig.from_hf(json.loads((SHIPPED / CONFIG_FILE).read_text(encoding="utf-8")))
LARGE = replace(SMALL, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_size=12288)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> LLaDA:
    """One KV head of four, so that no other array has the cache's shape."""
    directory = tmp_path_factory.mktemp("checkpoint")
    shape = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 1, "mlp_hidden_size": 80}
    return load(random_checkpoint(directory, seed=1, **shape), kernels=kernels)


@pytest.mark.parametrize(
    ("name", "narrow"),
    [*((name, None) for name in METHODS), ("llada", 80), ("fast-dllm-dual", 80), ("flash-dllm-onepass", 80)],
)
def test_the_cache_is_never_copied_and_only_windows_have_logits(
    model: LLaDA, name: str, narrow: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MOST_PACKED_ROWS", 64)
    settings = Settings(method=name, gen_length=64)
    graphdef, parameters = nnx.split(model)
    state = jax.eval_shape(lambda: replace(empty(model, SLOTS, CAPACITY, settings), narrow=narrow))
    lowered = run.lower(parameters, state, jnp.int32(0), graphdef=graphdef, method=method_of(settings, eos_ids=(38,)))
    compiled = lowered.compile()
    shape = re.escape(f"f32[{SLOTS * CAPACITY},1,{HEAD_DIM}]")
    hlo = compiled.as_text()
    assert re.search(shape, hlo)
    assert re.findall(rf"= {shape}\S* copy(?:-start)?\(.*", hlo) == []
    cache = 2 * 2 * SLOTS * CAPACITY * HEAD_DIM * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > cache
    rows = [math.prod(map(int, sizes.split(","))) for sizes in re.findall(rf"f32\[([\d,]+),{VOCAB}\]", hlo)]
    assert max(rows) <= SLOTS * 3 * settings.block_length  # one-pass verify's: fewer than a whole response's


def test_a_packed_pass_is_as_much_work_at_any_size_of_model() -> None:
    assert (packed_rows(SMALL), packed_rows(LARGE)) == (4096, 512)


@pytest.mark.parametrize(
    ("lengths", "capacity", "narrow"),
    [
        ([700] * 1000, 1344, 768),
        ([1000] * 999 + [4000], 4032, 1024),
        ([300] * 500 + [1000] * 1000, 1344, 1024),
        ([300] * 1000, 1344, 512),
        ([700] * 64, 1344, None),  # 36,864 rows: about a second
        ([1344] * 1000, 1344, None),
        ([500] * 1000, 512, None),
        ([100], 128, None),
    ],
)
def test_a_narrower_pass_is_for_many_shorter_sequences(lengths: list[int], capacity: int, narrow: int | None) -> None:
    assert narrower(LARGE, lengths, capacity) == narrow
    assert narrower(SMALL, lengths, capacity) is None
