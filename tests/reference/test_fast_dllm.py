"""Fast-dLLM against decoders without a cache, and hand-worked cases."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.cached_model import CachedLLaDA, Output, Row
from tests.reference.fast_dllm import factor_prefix, generate_fast_dllm
from tests.reference.model import ReferenceLLaDA
from tests.reference.sampler import Rule, Sample, generate_llada, generate_threshold
from tests.reference.test_flash import (
    EOS,
    EOT,
    MASK,
    MODEL_EOS,
    MODEL_MASK,
    Stub,
    fixed,
    model_and_prompt,
    noise,
    same_commits,
)

R = Rule
CACHES = ("none", "prefix", "dual")


class Queried:
    """A model with a cache that notes which positions each pass computed."""

    def __init__(self, model: ReferenceLLaDA):
        self.forward, self.positions = CachedLLaDA(model), []

    def __call__(self, rows: Sequence[Row], kv_length: int, **rest: Any) -> Output:
        self.positions.append([row.position for row in rows])
        return self.forward(rows, kv_length, **rest)


def fast(model: ReferenceLLaDA, prompt: Sequence[int], **settings: Any) -> Sample:
    chosen = {"mask_id": MODEL_MASK, "eos_ids": (MODEL_EOS,), "gen_length": 22, "block_length": 6} | settings
    if "factor" not in chosen:
        chosen.setdefault("threshold", 0.7)
    return generate_fast_dllm(CachedLLaDA(model), prompt, **chosen)


def stubbed(model: Stub, gen_length: int, prompt: Sequence[int] = (1, 2), **settings: Any) -> Sample:
    eos_ids = (EOS, EOT)
    return generate_fast_dllm(model, prompt, mask_id=MASK, eos_ids=eos_ids, gen_length=gen_length, **settings)


def blockwise(
    model: ReferenceLLaDA, prompt: Sequence[int], gen_length: int, block_length: int, heat: dict[str, Any]
) -> tuple[list[int], list[int], int]:
    """Threshold decoding of one block after the other, what follows masked: ids, commit steps and how many steps."""

    def forward(ids: Tensor) -> Tensor:
        masks = torch.full((len(prompt) + gen_length - len(ids),), MODEL_MASK)
        return model.sequence(torch.cat([ids, masks]))

    ids, steps, done = list(prompt), [], 0
    while len(ids) < len(prompt) + gen_length:
        length = min(block_length, len(prompt) + gen_length - len(ids))
        common: dict[str, Any] = {"mask_id": MODEL_MASK, "eos_ids": (), "gen_length": length, "block_length": length}
        block = generate_threshold(forward, ids, threshold=0.7, **common, **heat)
        ids = block.ids
        steps += [done + step for step in block.commit_step]
        done += block.steps
    return ids, steps, done


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_without_a_cache_each_block_is_threshold_decoding(n_layers: int, temperature: float) -> None:
    """With one layer a K or V depends on its own token alone, so that the caches lose nothing either."""
    heat: dict[str, Any] = {"temperature": temperature, "noise": noise if temperature else None}
    for seed in range(3):
        model, prompt = model_and_prompt(seed, n_layers=n_layers)
        ids, steps, total = blockwise(model, prompt, 22, 6, heat)
        for cache in CACHES if n_layers == 1 else ("none",):
            sample = fast(model, prompt, cache=cache, eos_ids=(), **heat)
            assert (sample.ids, sample.commit_step) == (ids, steps)
            assert sample.steps == sample.forwards == total <= 22


def test_one_token_a_step_is_llada() -> None:
    for seed in range(3):
        model, prompt = model_and_prompt(seed)
        common: dict[str, Any] = {"gen_length": 24, "block_length": 6}
        llada = {"mask_id": MODEL_MASK, "steps": 24, **common}
        expected = generate_llada(model.sequence, prompt, eos_ids=(MODEL_EOS,), **llada)
        same_commits(fast(model, prompt, cache="none", threshold=2.0, **common), expected)
        same_commits(fast(model, prompt, cache="none", factor=1e-9, **common), expected)
        eos_ids = (expected.ids[9 + 8],)
        stopped = generate_llada(model.sequence, prompt, eos_ids=eos_ids, **llada)
        same_commits(fast(model, prompt, cache="none", threshold=2.0, eos_ids=eos_ids, **common), stopped)
        assert stopped.steps in (6, 12) and len(stopped.tokens) <= 9


@pytest.mark.parametrize("rule", [{"threshold": 0.7}, {"factor": 1.0}])
def test_one_block_of_everything(rule: dict[str, float]) -> None:
    """Prefix and dual are one then, and with no prompt to keep they are no cache."""
    differs = 0
    for seed in range(3):
        model, prompt = model_and_prompt(seed)
        prefix, dual, none = (
            fast(model, prompt, cache=cache, block_length=22, **rule) for cache in ("prefix", "dual", "none")
        )
        assert prefix == dual
        differs += prefix.confidence != pytest.approx(none.confidence, rel=1e-3, nan_ok=True)
        prefix, none = (fast(model, [], cache=cache, block_length=99, **rule) for cache in ("prefix", "none"))
        same_commits(prefix, none)
        assert prefix.rule == none.rule
    assert differs  # the cached prompt does not see the answer grow


@pytest.mark.parametrize("cache", CACHES)
def test_what_a_pass_computes(cache: str) -> None:
    model, prompt = model_and_prompt(1)
    forward = Queried(model)
    common: dict[str, Any] = {"mask_id": MODEL_MASK, "eos_ids": (), "gen_length": 14, "block_length": 6}
    sample = generate_fast_dllm(forward, prompt, cache=cache, threshold=0.9, **common)
    expected: list[list[int]] = []
    for start, end in ((9, 15), (15, 21), (21, 23)):
        passes = len({sample.commit_step[p - 9] for p in range(start, end)})
        later = {"none": range(23), "prefix": range(start, 23), "dual": range(start, end)}[cache]
        expected += [list(range(23))] + [list(later)] * (passes - 1)
    assert forward.positions == expected and len(expected) == sample.forwards == sample.steps > 6


def test_a_stale_suffix_is_what_the_caches_differ_by() -> None:
    """In the last block there is none: from the same tokens prefix and dual go on alike."""
    for seed in range(4):
        model, prompt = model_and_prompt(seed)
        prefix, dual = (fast(model, prompt, cache=cache, gen_length=6, threshold=0.8) for cache in ("prefix", "dual"))
        assert prefix == dual
    samples = [[fast(model_and_prompt(s)[0], model_and_prompt(s)[1], cache=c) for c in CACHES] for s in range(4)]
    confidences = [[sample.confidence for sample in of_seed] for of_seed in samples]
    assert any(prefix != pytest.approx(dual, rel=1e-3) for _, prefix, dual in confidences)
    assert any(none != pytest.approx(prefix, rel=1e-3) for none, prefix, _ in confidences)


@pytest.mark.parametrize(
    ("confidences", "factor", "count"),
    [
        ([0.99, 0.99, 0.1], 1.0, 2),  # the last one fails and is not taken along
        ([0.5, 0.1], 1.0, 1),
        ([0.5], 1.0, 1),
        ([0.3, 0.2], 1.0, 1),  # at least one
        ([0.9, 0.8, 0.75, 0.75], 1.0, 3),  # 0.2, 0.6, 1.0 and 1.25
        ([0.9, 0.6, 0.99], 1.0, 1),  # 1.2 fails, and nothing after it counts
        ([0.9, 0.9, 0.9, 0.9], 0.45, 3),
        ([1.0] * 5, 0.5, 5),
        ([0.75, 0.5], 1.5, 2),  # at most the factor, not below it
        ([0.75, 0.5], 1.4375, 1),
    ],
)
def test_factor_rule(confidences: list[float], factor: float, count: int) -> None:
    assert factor_prefix(confidences, factor) == count


def test_factor_decoding_by_hand() -> None:
    # 0.1 * 2, 0.2 * 3, 0.4 * 4: two pass a factor of 1. Then 0.4 * 2 passes and 0.5 * 3 does not, then 0.5 * 2 does.
    model = fixed([3, 4, 5, 6], [0.6, 0.9, 0.5, 0.8])
    sample = stubbed(model, 4, block_length=4, cache="none", factor=1.001)
    assert sample.commit_step == [1, 0, 2, 0]
    assert sample.rule == [R.FACTOR] * 4
    assert sample.confidence == pytest.approx([0.6, 0.9, 0.5, 0.8])
    # A factor that the best itself misses.
    strict = stubbed(fixed([3, 4], [0.6, 0.95]), 2, block_length=2, cache="dual", factor=0.2)
    assert strict.rule == [R.MOST_CONFIDENT, R.FACTOR] and strict.commit_step == [1, 0]
    ties = stubbed(fixed([3, 4, 5], [0.4] * 3), 3, block_length=3, cache="prefix", factor=0.5)
    assert ties.commit_step == [0, 1, 2]


@pytest.mark.parametrize("cache", CACHES)
def test_threshold_decoding_by_hand(cache: str) -> None:
    # Blocks of 3 and 2. A later block's places wait, however sure.
    model = fixed([3, 4, 5, 6, 0], [0.6, 0.95, 0.92, 0.99, 0.7])
    sample = stubbed(model, 5, block_length=3, cache=cache, threshold=0.9)
    assert sample.commit_step == [1, 0, 0, 2, 3]
    assert sample.rule == [R.MOST_CONFIDENT, R.THRESHOLD, R.THRESHOLD, R.THRESHOLD, R.MOST_CONFIDENT]
    rows = {"none": [7, 7, 7, 7], "prefix": [7, 5, 7, 2], "dual": [7, 3, 7, 2]}[cache]
    assert [len(rows) for rows in model.passes] == rows


@pytest.mark.parametrize("cache", CACHES)
def test_decoding_ends_after_the_block_with_an_eos(cache: str) -> None:
    for eos in (EOS, EOT):
        model = fixed([3, eos, 5, 6, 0, 1], [0.5, 0.95, 0.6, 0.9, 0.9, 0.9])
        sample = stubbed(model, 6, block_length=3, cache=cache, threshold=0.9)
        assert sample.tokens == [3, eos]
        assert sample.ids == [1, 2, 3, eos, 5, MASK, MASK, MASK]  # the block is finished, behind the EOS too
        assert sample.commit_step == [2, 0, 1, -1, -1, -1] and sample.rule[3:] == [R.NONE] * 3
        assert sample.steps == sample.forwards == len(model.passes) == 3
    prompt = (1, EOS, MASK)  # text
    sample = stubbed(fixed([MASK, 4], [0.9, 0.8], 3), 2, prompt, block_length=1, cache=cache, threshold=0.9)
    assert sample.tokens == [MASK, 4] and sample.steps == 2


def test_decoding_is_repeatable() -> None:
    model, prompt = model_and_prompt(3)
    for cache in CACHES:
        heat: dict[str, Any] = {"temperature": 2.0, "noise": noise}
        assert fast(model, prompt, cache=cache) == fast(model, prompt, cache=cache)
        hot = fast(model, prompt, cache=cache, **heat)
        assert hot == fast(model, prompt, cache=cache, **heat) and hot.ids != fast(model, prompt, cache=cache).ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "all", "threshold": 0.9}, "cache='all' is none of"),
        ({"cache": "dual"}, "either threshold or a factor above 0"),
        ({"cache": "dual", "threshold": 0.9, "factor": 1.0}, "either threshold or a factor above 0"),
        ({"cache": "dual", "factor": 0.0}, "factor=0.0"),
        ({"cache": "dual", "threshold": 0.9, "temperature": 1.0}, "noise goes with"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stubbed(fixed([3], [0.5]), 1, block_length=1, **settings)
