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
from fdllm_jax.decoding.loop import run
from fdllm_jax.decoding.methods import method_of
from fdllm_jax.decoding.passes import packed_rows
from fdllm_jax.engine import SHIPPED
from fdllm_jax.model import LLaDA
from fdllm_jax.settings import METHODS, Settings
from tests.decode import empty, load
from tests.reference.checkpoint import random_checkpoint

SLOTS, CAPACITY, HEAD_DIM, VOCAB = 3, 96, 16, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> LLaDA:
    """One KV head of four, so that no other array has the cache's shape."""
    directory = tmp_path_factory.mktemp("checkpoint")
    shape = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 1, "mlp_hidden_size": 80}
    return load(random_checkpoint(directory, seed=1, **shape), kernels=kernels)


@pytest.mark.parametrize("name", METHODS)
def test_the_cache_is_never_copied_and_only_windows_have_logits(model: LLaDA, name: str) -> None:
    settings = Settings(method=name, gen_length=64)
    graphdef, parameters = nnx.split(model)
    state = jax.eval_shape(lambda: empty(model, SLOTS, CAPACITY, settings))
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
    small = ModelConfig.from_hf(json.loads((SHIPPED / CONFIG_FILE).read_text(encoding="utf-8")))
    large = replace(small, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_size=12288)
    assert (packed_rows(small), packed_rows(large)) == (4096, 512)
