"""How it is decoded: the methods of the tables by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.paper.suites import Suite
from fdllm_jax.comparison import Variant
from fdllm_jax.settings import PRESETS, Settings

# flash-dllm and flash-cache also have the settings of the task's preset.
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llada": {"method": "llada"},
        "fast-dllm-prefix": {"method": "fast-dllm-prefix"},
        "fast-dllm-dual": {"method": "fast-dllm-dual"},
        "fast-dllm-factor": {"method": "fast-dllm-dual", "factor": 1.0},
        "flash-cache": {"method": "flash-cache"},
        "flash-dllm": {"method": "flash-dllm"},
        "quality": PRESETS["quality"],
        "balanced": PRESETS["balanced"],
        "fast": PRESETS["fast"],
    }
)
_OF_PRESET = {"flash-dllm": ("gamma", "track_budget"), "flash-cache": ("track_budget",)}


def variant(suite: Suite, name: str, gen_length: int, **options: Any) -> Variant:
    """A method as a task is decoded with it. options: over its own. Raises ValueError for one that it does not use."""
    settings = dict(METHODS[name])
    method = settings["method"]
    preset = PRESETS[suite.preset]
    settings |= {option: preset[option] for option in _OF_PRESET.get(method, ()) if option in preset}
    if method == "llada" or method.startswith("fast-dllm"):
        settings["block_length"] = suite.block_length
    settings |= {"gen_length": gen_length, "stop": suite.task.stop, **options}
    try:
        return Variant(name=name, settings=Settings(**settings))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
