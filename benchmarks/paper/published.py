"""The paper's own figures: LLaDA-1.5 on one A100 80GB, tokens/s of the whole batch."""

from collections.abc import Mapping
from typing import Any

SOURCE = "arXiv 2609.26796, LLaDA-1.5, A100 80GB"
_LLADA = {"method": "llada", "batch": 32}
_CACHE = {"method": "flash-cache", "batch": 32, "threshold": 0.9, "track_budget": 64, "mask_window": 64}
_FLASH = _CACHE | {"method": "flash-dllm", "gamma": 0.8}
_STRICT = _FLASH | {"gamma": 0.85}
_MBPP = _FLASH | {"track_budget": 48}
_DUAL = {"method": "fast-dllm-dual", "batch": 32, "threshold": 0.9}


def _of(task: str, gen_length: int, shots: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"task": task, "gen_length": gen_length, "shots": shots, **settings}


def _trade_off(gamma: float, track_budget: int) -> dict[str, Any]:
    return _of("gsm8k", 512, 5, _FLASH | {"gamma": gamma, "track_budget": track_budget})


_SPEED, _ACCURACY, _STEP = "tokens_per_second", "accuracy", "tokens_per_step"
# Each: what of a case must be so, and the figures by metric.
PUBLISHED: tuple[tuple[Mapping[str, Any], Mapping[str, float]], ...] = (
    (_of("gsm8k", 512, 5, _LLADA), {_SPEED: 2.6, _STEP: 1.0}),
    (_of("math", 512, 4, _LLADA), {_SPEED: 5.0}),
    (_of("humaneval", 512, 0, _LLADA), {_SPEED: 3.2}),
    (_of("mbpp", 512, 3, _LLADA), {_SPEED: 1.0}),
    (_of("gsm8k", 512, 5, _DUAL), {_SPEED: 36.8}),
    (_of("gsm8k", 512, 5, _CACHE), {_STEP: 2.8}),
    (_of("gsm8k", 512, 5, _FLASH), {_SPEED: 210.6, _ACCURACY: 0.8302, _STEP: 5.7}),
    (_of("math", 512, 4, _STRICT), {_SPEED: 210.1, _ACCURACY: 0.3598}),
    (_of("humaneval", 512, 0, _STRICT), {_SPEED: 185.6, _ACCURACY: 0.4024}),
    (_of("mbpp", 512, 3, _MBPP), {_SPEED: 148.2, _ACCURACY: 0.39}),
    (_of("gsm8k", 256, 5, _FLASH), {_SPEED: 194.9, _ACCURACY: 0.8188}),
    (_of("math", 256, 4, _STRICT), {_SPEED: 189.7, _ACCURACY: 0.3656}),
    (_of("humaneval", 256, 0, _STRICT), {_SPEED: 209.2, _ACCURACY: 0.3963}),
    (_of("mbpp", 256, 3, _MBPP), {_SPEED: 148.0, _ACCURACY: 0.382}),
    (_trade_off(0.6, 48), {_SPEED: 277.8, _ACCURACY: 0.8023}),
    (_trade_off(1.0, 96), {_SPEED: 131.6, _ACCURACY: 0.8341}),
    (_trade_off(0.85, 96), {_SPEED: 185.7}),
    ({"task": "gsm8k", "shots": 1, **_FLASH}, {_SPEED: 199.8}),
    ({"task": "gsm8k", "shots": 1, **_FLASH, "batch": 16}, {"planned_memory": 26e9}),
    ({"task": "gsm8k", "shots": 1, **_DUAL, "batch": 16}, {"planned_memory": 50e9}),
)


def baseline(case: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    """The paper's figure for a case, as the baseline of a row; None where it has none."""
    for wanted, figures in PUBLISHED:
        if metric in figures and all(case.get(name) == value for name, value in wanted.items()):
            return {"name": SOURCE, "median": figures[metric]}
    return None
