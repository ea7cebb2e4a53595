"""The methods by name: small frozen objects, static in the compiled program.

A method keeps a `memory(slots)` in the state, a pytree with a leading axis of slots, and takes a `step(model, state)`:
plan the query, forward, commit, choose what to compute next. The moves are functions of `passes`, `commit`, `track`
and `verify`; a method is what it does with them.
"""

from typing import Any

from fdllm_jax.decoding.fast_dllm import Cache, FastDLLM
from fdllm_jax.decoding.flash import FlashDLLM
from fdllm_jax.decoding.llada import LLaDASampler
from fdllm_jax.decoding.onepass import OnePass
from fdllm_jax.decoding.threshold import ThresholdSampler
from fdllm_jax.decoding.track import Budgets
from fdllm_jax.decoding.verify import Verification
from fdllm_jax.settings import Settings

Method = LLaDASampler | ThresholdSampler | FastDLLM | FlashDLLM | OnePass


def method_of(
    settings: Settings, *, eos_ids: tuple[int, ...], longest: int | None = None, noisy: bool | None = None
) -> Method:
    """The method that `settings` name.

    eos_ids: the EOS id first, then other ids that end a text. Of the requests that share the method (those of
    `settings` when None), longest: the largest gen_length, no window is wider; noisy: whether any has a temperature.
    """
    longest = longest or settings.gen_length
    noisy = settings.temperature > 0 if noisy is None else noisy
    name, value = settings.method, settings.value
    common: dict[str, Any] = {
        "block_length": min(settings.block_length, longest),
        "eos_ids": eos_ids,
        "noisy": noisy,
    }
    if name == "llada":
        return LLaDASampler(
            **common,
            remasking=value("remasking"),
            guided=value("cfg_scale") > 0,
            banned=eos_ids[:1] if value("logits_eos_inf") else (),
            committed_last=eos_ids if value("confidence_eos_eot_inf") else (),
        )
    if name == "threshold":
        return ThresholdSampler(**common)
    if name.startswith("fast-dllm"):
        caches: dict[str, Cache] = {
            "fast-dllm-parallel": "none",
            "fast-dllm-prefix": "prefix",
            "fast-dllm-dual": "dual",
        }
        cache = caches[name]
        rows = longest if cache == "prefix" else common["block_length"]
        return FastDLLM(**common, cache=cache, by_factor=value("factor") is not None, rows=rows)
    common["budgets"] = Budgets(
        track_budget=value("track_budget"),
        mask_window=min(value("mask_window"), longest),
        track_layers=value("track_layers"),
    )
    verification = None
    if name != "flash-cache":
        names = ("acceptance", "order", "isolation", "bonus")
        verification = Verification(**{option: value(option) for option in names})
    if name == "flash-dllm-onepass":
        assert verification is not None
        return OnePass(**common, verification=verification)
    return FlashDLLM(
        **common,
        verification=verification,
        verify_rows=value("verify_rows") or 0,
        skip_verify=bool(value("skip_verify")),
    )
