"""Rungs 1, 2 and 7 of the exactness ladder: our decoding against the PyTorch reference, and against itself.

Refreshing everything in every step through the cache must equal a reference that has no cache, token for token.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fdllm_jax.decoding.state import DecodeState
from fdllm_jax.model import LLaDA
from fdllm_jax.sampling import gumbel, uniform
from fdllm_jax.settings import METHODS, Settings
from tests.decode import decode, empty, load, put, response
from tests.reference.cached_model import CachedLLaDA
from tests.reference.checkpoint import random_checkpoint
from tests.reference.fast_dllm import generate_fast_dllm
from tests.reference.flash import Options, generate_flash
from tests.reference.model import ReferenceLLaDA
from tests.reference.sampler import Sample, generate_llada, generate_threshold

VOCAB, CAPACITY, SLOTS = 40, 32, 4
EOT, EOS = VOCAB - 3, VOCAB - 2  # [MASK] is the last id

_gumbel, _uniform = jax.jit(partial(gumbel, vocab=VOCAB)), jax.jit(uniform)

LLADA = {
    "one a step": Settings(method="llada", gen_length=13, block_length=5),
    "few steps": Settings(method="llada", gen_length=14, block_length=4, steps=7),
    "uneven steps": Settings(method="llada", gen_length=17, block_length=6, steps=5),
    "more steps than tokens": Settings(method="llada", gen_length=9, block_length=4, steps=20),
    "one block": Settings(method="llada", gen_length=12, block_length=30, steps=5),
    "random": Settings(method="llada", gen_length=12, block_length=5, remasking="random", seed=5),
    "temperature": Settings(method="llada", gen_length=12, block_length=5, temperature=0.7, seed=2**32 - 1),
    "guidance": Settings(method="llada", gen_length=12, block_length=5, cfg_scale=1.5, steps=6),
    "no eos": Settings(method="llada", gen_length=14, block_length=4, logits_eos_inf=True),
    "eos last": Settings(method="llada", gen_length=14, block_length=4, confidence_eos_eot_inf=True),
    "all": Settings(
        method="llada", gen_length=15, block_length=4, steps=9, temperature=1.0, cfg_scale=0.5, logits_eos_inf=True,
        confidence_eos_eot_inf=True, remasking="random", seed=3,
    ),
}  # fmt: skip
THRESHOLD = {
    "default": Settings(method="threshold", gen_length=15, block_length=5),
    "low": Settings(method="threshold", gen_length=15, block_length=6, threshold=0.3),
    "one": Settings(method="threshold", gen_length=10, block_length=5, threshold=1.0),
    "window beyond the end": Settings(method="threshold", gen_length=7, block_length=20, threshold=0.5),
    "temperature": Settings(method="threshold", gen_length=15, block_length=5, threshold=0.4, temperature=0.8, seed=9),
}
SMALL = {"gen_length": 15, "block_length": 5, "mask_window": 8, "track_budget": 6}
FAST = {
    f"{cache}, {name}": Settings(method=f"fast-dllm-{cache}", gen_length=14, block_length=4, **options)
    for cache in ("parallel", "prefix", "dual")
    for name, options in {
        "default": {},
        "low": {"threshold": 0.3},
        "factor": {"factor": 1.2},
        "temperature": {"threshold": 0.4, "temperature": 0.8, "seed": 4},
    }.items()
}
VERIFY = {
    "default": {},
    "low": {"threshold": 0.3, "gamma": 0.2},
    "strict": {"isolation": "strict", "threshold": 0.4, "gamma": 0.1},
    "cumulative": {"acceptance": "cumulative", "gamma": 0.05},
    "cumulative, strict, by position": {
        "acceptance": "cumulative",
        "gamma": 0.05,
        "isolation": "strict",
        "order": "position",
    },
    "nothing": {"acceptance": "nothing"},
    "by position": {"order": "position", "gamma": 0.1},
    "bonus": {"bonus": True, "threshold": 0.3, "gamma": 0.2},
    "bonus, strict": {"bonus": True, "threshold": 0.3, "gamma": 0.2, "isolation": "strict"},
    "bounded": {"bonus": True, "threshold": 0.5, "gamma": 0.1, "isolation": "strict", "max_deviation": 0.8},
    "first layer": {"track_layers": (0,), "gamma": 0.2},
    "temperature": {"temperature": 0.8, "seed": 11, "gamma": 0.2, "threshold": 0.4},
    "wide": {"mask_window": 64, "track_budget": 64, "gamma": 0.2},
    "window beyond the end": {"block_length": 20, "mask_window": 20, "track_budget": 20, "gamma": 0.2},
}
FLASH = {
    **{f"flash-dllm, {name}": Settings(method="flash-dllm", **(SMALL | o)) for name, o in VERIFY.items()},
    **{f"onepass, {name}": Settings(method="flash-dllm-onepass", **(SMALL | o)) for name, o in VERIFY.items()},
    "flash-dllm, few rows": Settings(method="flash-dllm", **SMALL, verify_rows=9, gamma=0.1),
    "flash-dllm, many rows": Settings(method="flash-dllm", **SMALL, verify_rows=24, gamma=0.1, isolation="strict"),
    "flash-dllm, skipping": Settings(method="flash-dllm", **SMALL, skip_verify=True, gamma=0.5),
    "onepass, plain": Settings(method="flash-dllm-onepass", **SMALL, plain_threshold=0.3, gamma=0.2),
    "onepass, no bonus": Settings(method="flash-dllm-onepass", **SMALL, bonus=False, gamma=0.2),
    "flash-cache, default": Settings(method="flash-cache", **SMALL),
    "flash-cache, low": Settings(method="flash-cache", **SMALL, threshold=0.3),
    "flash-cache, temperature": Settings(method="flash-cache", **SMALL, threshold=0.4, temperature=0.8, seed=9),
}  # fmt: skip
CASES = {f"llada, {k}": v for k, v in LLADA.items()} | {f"threshold, {k}": v for k, v in THRESHOLD.items()}
CASES |= {f"fast-dllm, {k}": v for k, v in FAST.items()} | FLASH


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return random_checkpoint(
        directory, seed=7, vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, mlp_hidden_size=48
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path, kernels: str) -> LLaDA:
    return load(checkpoint, kernels=kernels)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> ReferenceLLaDA:
    return ReferenceLLaDA.from_directory(checkpoint)


def prompts(seed: int) -> list[list[int]]:
    """Ragged prompts: one token, one that fills the capacity but for the response, and some with [MASK] and EOS."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in (1, CAPACITY - 17, 6, 11)]


def expected(reference: ReferenceLLaDA, prompt: list[int], settings: Settings, eos_ids: tuple[int, ...]) -> Sample:
    """The reference's decoding, with our noise."""
    seed = jnp.array([settings.seed], jnp.uint32)

    def draw(table: Callable[..., jax.Array], step: int, position: int) -> np.ndarray:
        return np.asarray(table(seed, jnp.array([step]), jnp.arange(CAPACITY)[None]))[0, position]

    def noise(step: int, position: int) -> torch.Tensor:
        return torch.tensor(draw(_gumbel, step, position))

    def numbers(step: int, position: int) -> float:
        return float(draw(_uniform, step, position))

    common = {
        "mask_id": VOCAB - 1,
        "eos_ids": eos_ids,
        "gen_length": settings.gen_length,
        "block_length": settings.block_length,
        "temperature": settings.temperature,
    }
    position_noise = partial(noise, 0) if settings.temperature else None
    if settings.method == "threshold":
        return generate_threshold(
            reference.sequence, prompt, threshold=settings.value("threshold"), noise=position_noise, **common
        )
    if settings.method.startswith("fast-dllm"):
        return generate_fast_dllm(
            CachedLLaDA(reference),
            prompt,
            cache=settings.method.removeprefix("fast-dllm-").replace("parallel", "none"),
            threshold=settings.value("threshold"),
            factor=settings.value("factor"),
            noise=position_noise,
            **common,
        )
    if settings.method.startswith("flash"):
        names = {field.name for field in fields(Options)} & set(METHODS[settings.method]) - {"noise"}
        options = {name: settings.value(name) for name in names}
        shared = {"method": settings.method, "block_length": settings.block_length, "noise": position_noise}
        return generate_flash(
            CachedLLaDA(reference),
            prompt,
            mask_id=VOCAB - 1,
            eos_ids=eos_ids,
            gen_length=settings.gen_length,
            options=Options(**shared, temperature=settings.temperature, **options),
        )
    return generate_llada(
        reference.sequence,
        prompt,
        steps=settings.value("steps"),
        noise=noise if settings.temperature else None,
        uniform=numbers if settings.value("remasking") == "random" else None,
        cfg_scale=settings.value("cfg_scale"),
        logits_eos_inf=settings.value("logits_eos_inf"),
        confidence_eos_eot_inf=settings.value("confidence_eos_eot_inf"),
        **common,
    )


def assert_equal(state: DecodeState, slot: int, sample: Sample) -> None:
    ours = response(state, slot)
    start = int(state.request.prompt_length[slot])
    assert ours["tokens"] == sample.ids[start:]
    assert ours["step"] == sample.commit_step
    assert ours["rule"] == sample.rule
    assert ours["masked"] == [step < 0 for step in sample.commit_step]
    committed = np.array(sample.commit_step) >= 0
    np.testing.assert_allclose(
        np.array(ours["confidence"])[committed], np.array(sample.confidence)[committed], rtol=1e-4
    )
    assert int(state.step[slot]) == sample.steps
    assert int(state.forwards[slot]) == sample.forwards


@pytest.mark.parametrize("case", CASES)
def test_ragged_batch_equals_reference(model: LLaDA, reference: ReferenceLLaDA, case: str) -> None:
    settings, eos_ids = CASES[case], (EOS, EOT, *range(4))  # six ids of forty end a text, so that many end early
    for seed in range(3):
        state = empty(model, SLOTS, CAPACITY, settings)
        for slot, prompt in enumerate(prompts(seed)):
            state = put(model, state, slot, prompt, settings)
        state = decode(model, state, settings, eos_ids)
        for slot, prompt in enumerate(prompts(seed)):
            assert_equal(state, slot, expected(reference, prompt, settings, eos_ids))


@pytest.mark.parametrize("case", ["llada, uneven steps", "llada, temperature", "threshold, default"])
def test_alone_equals_batch_in_any_slot(model: LLaDA, case: str) -> None:
    settings = CASES[case]
    batch = empty(model, SLOTS, CAPACITY, settings)
    for slot, prompt in enumerate(prompts(3)):
        batch = put(model, batch, slot, prompt, settings)
    batch = decode(model, batch, settings, (EOS,))
    for slot, prompt in enumerate(prompts(3)):
        other_slot = (slot + 1) % SLOTS
        alone = decode(
            model, put(model, empty(model, SLOTS, CAPACITY, settings), other_slot, prompt, settings), settings, (EOS,)
        )
        assert response(alone, other_slot) == response(batch, slot)  # bit-identical confidences included
        assert int(alone.step[other_slot]) == int(batch.step[slot])


def test_refilled_slot_equals_fresh_state(model: LLaDA) -> None:
    settings = CASES["threshold, default"]
    used = empty(model, SLOTS, CAPACITY, settings)
    for slot, prompt in enumerate(prompts(4)):
        used = put(model, used, slot, prompt, settings)
    used = decode(model, used, settings, (EOS,))
    others = [response(used, slot) for slot in (0, 1, 3)]
    prompt = prompts(5)[2]
    used = decode(model, put(model, used, 2, prompt, settings), settings, (EOS,))
    fresh = decode(model, put(model, empty(model, SLOTS, CAPACITY, settings), 2, prompt, settings), settings, (EOS,))
    assert response(used, 2) == response(fresh, 2)
    assert [response(used, slot) for slot in (0, 1, 3)] == others  # finished slots do not change
