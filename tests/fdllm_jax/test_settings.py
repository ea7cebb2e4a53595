"""Settings check themselves, and say what is wrong."""

import subprocess
import sys
from typing import Any

import pytest

from fdllm_jax.settings import PRESETS, Settings

BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "magic"}, "method='magic' is unknown: expected one of flash-dllm, flash-dllm-onepass, flash-cache"),
    ({"gen_length": 0}, "gen_length=0: expected an integer of at least 1"),
    ({"block_length": -1}, "block_length=-1: expected an integer of at least 1"),
    ({"method": "llada", "steps": 0}, "steps=0: expected an integer of at least 1"),
    ({"method": "llada", "gen_length": 33, "block_length": 8, "steps": 4}, "steps=4 is less than the 5 blocks"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": 1e300}, "temperature=1e+300: expected a number in [0, 10000]"),
    ({"seed": 2**32}, "seed=4294967296"),
    ({"seed": -1}, "seed=-1"),
    ({"stop": ("",)}, "stop=('',)"),
    ({"method": "llada", "remasking": "high"}, "remasking='high': expected one of low_confidence, random"),
    ({"method": "llada", "cfg_scale": -1.0}, "cfg_scale=-1.0"),
    ({"method": "llada", "cfg_scale": float("inf")}, "cfg_scale=inf"),
    ({"method": "llada", "threshold": 0.9}, "threshold=0.9 is not an option of method 'llada'"),
    ({"method": "threshold", "threshold": 0.0}, "threshold=0.0"),
    ({"method": "threshold", "threshold": 1.01}, "threshold=1.01"),
    ({"method": "threshold", "steps": 5}, "steps=5 is not an option of method 'threshold'"),
    ({"method": "threshold", "logits_eos_inf": True}, "logits_eos_inf=True is not an option of method 'threshold'"),
    ({"logits_eos_inf": True}, "logits_eos_inf=True is not an option of method 'flash-dllm', only of llada"),
    ({"cfg_scale": 1.0}, "cfg_scale=1.0 is not an option of method 'flash-dllm', only of llada"),
    ({"block_length": 65}, "mask_window=64 is less than block_length=65"),
    ({"block_length": 20, "track_budget": 19}, "track_budget=19 is less than block_length=20"),
    ({"block_length": 8, "verify_rows": 14}, "use at least 15"),
    ({"block_length": 8, "verify_rows": 21, "isolation": "strict"}, "use at least 22"),
    ({"gamma": 0.0}, "gamma=0.0: expected a number in (0, 1]"),
    ({"gamma": 1.5}, "gamma=1.5: expected a number in (0, 1]"),
    ({"acceptance": "all"}, "acceptance='all': expected one of agreement, cumulative, nothing"),
    ({"order": "random"}, "order='random': expected one of confidence, position"),
    ({"isolation": "none"}, "isolation='none': expected one of paper, strict"),
    ({"max_deviation": 0.1}, "max_deviation=0.1 bounds nothing here: it needs isolation='strict'"),
    ({"max_deviation": 0.1, "isolation": "strict", "temperature": 0.5}, "max_deviation=0.1 bounds nothing here"),
    ({"plain_threshold": 0.9}, "plain_threshold=0.9 is not an option of method 'flash-dllm'"),
    ({"method": "flash-dllm-onepass", "skip_verify": True}, "skip_verify=True is not an option"),
    ({"method": "flash-cache", "gamma": 0.9}, "gamma=0.9 is not an option of method 'flash-cache'"),
    ({"method": "fast-dllm-dual", "factor": 0.0}, "factor=0.0: expected a number in (0, 10000]"),
    (
        {"method": "fast-dllm-dual", "factor": 1.0, "threshold": 0.9},
        "factor=1.0: expected one of the two",
    ),
    ({"track_layers": (0, 0)}, "expected every layer once"),
    ({"track_layers": (-1,)}, "track_layers=(-1,): expected a list of layer indices"),
    ({"mask_window": 0}, "mask_window=0: expected an integer of at least 1"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[str(given) for given, _ in BAD])
def test_bad_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Settings(**given)
    assert message in str(error.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"gen_length=0.*temperature=-1.*seed=-5"):
        Settings(gen_length=0, temperature=-1.0, seed=-5)


def test_used_settings_are_those_of_the_method() -> None:
    assert Settings(method="llada", gen_length=20).used() == {
        "gen_length": 20, "block_length": 16, "temperature": 0.0, "seed": 0, "stop": (), "steps": 20,
        "remasking": "low_confidence", "cfg_scale": 0.0, "logits_eos_inf": False, "confidence_eos_eot_inf": False,
    }  # fmt: skip
    assert Settings(method="threshold").used()["threshold"] == 0.9
    assert "steps" not in Settings(method="threshold").used()
    assert Settings(block_length=10).used()["verify_rows"] == 20
    assert Settings(block_length=10, isolation="strict").used()["verify_rows"] == 30
    assert Settings(method="fast-dllm-dual", factor=1.0).used()["threshold"] is None


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    assert Settings.preset(name).block_length == 16
    assert Settings.preset(name, gamma=0.7).gamma == 0.7
    with pytest.raises(ValueError, match="preset='magic' is unknown: expected one of gsm8k"):
        Settings.preset("magic")


TYPES = """
import numpy as np
from fdllm_jax.settings import Settings
given = Settings(method="llada", gen_length=np.int64(5), temperature=np.float32(0.5), seed=np.uint32(7), stop=["a"],
                 steps=np.int32(3))
assert repr(given) == repr(
    Settings(method="llada", gen_length=5, temperature=0.5, seed=7, stop=("a",), steps=3)
), given
assert Settings(track_layers=[np.int64(1), 3]).track_layers == (1, 3)
for bad in ({"gen_length": "5"}, {"gen_length": True}, {"gen_length": 5.0}, {"gen_length": None}, {"seed": "0"},
            {"temperature": "1"}, {"temperature": True}, {"stop": "text"}, {"stop": [1]}, {"bonus": 1},
            {"gamma": "high"}, {"track_layers": 3}, {"track_layers": [True]}, {"isolation": 1}):
    try:
        Settings(**bad)
    except ValueError as error:
        assert next(iter(bad)) in str(error) and "expected" in str(error), error
    else:
        raise AssertionError(bad)
"""


def test_numpy_numbers_will_do_and_wrong_types_are_refused() -> None:
    """In a process of its own: here the shape annotations' checker would refuse them first."""
    subprocess.run([sys.executable, "-c", TYPES], check=True)
