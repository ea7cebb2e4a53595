"""Settings check themselves, and say what is wrong."""

from typing import Any

import pytest

from fdllm_jax.settings import Settings

BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "magic"}, "method='magic' is unknown: expected one of llada, threshold"),
    ({"gen_length": 0}, "gen_length=0: expected at least 1"),
    ({"block_length": -1}, "block_length=-1: expected at least 1"),
    ({"steps": 0}, "steps=0: expected at least 1"),
    ({"gen_length": 33, "block_length": 8, "steps": 4}, "steps=4 is less than the 5 blocks"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"seed": 2**32}, "seed=4294967296"),
    ({"seed": -1}, "seed=-1"),
    ({"stop": ("",)}, "stop=('',)"),
    ({"remasking": "high"}, "remasking='high': expected one of low_confidence, random"),
    ({"cfg_scale": -1.0}, "cfg_scale=-1.0"),
    ({"threshold": 0.9}, "threshold=0.9 is not an option of method 'llada'"),
    ({"method": "threshold", "threshold": 0.0}, "threshold=0.0"),
    ({"method": "threshold", "threshold": 1.01}, "threshold=1.01"),
    ({"method": "threshold", "steps": 5}, "steps=5 is not an option of method 'threshold'"),
    ({"method": "threshold", "logits_eos_inf": True}, "logits_eos_inf=True is not an option of method 'threshold'"),
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
    assert Settings(gen_length=20).used() == {
        "gen_length": 20, "block_length": 16, "temperature": 0.0, "seed": 0, "stop": (), "steps": 20,
        "remasking": "low_confidence", "cfg_scale": 0.0, "logits_eos_inf": False, "confidence_eos_eot_inf": False,
    }  # fmt: skip
    assert Settings(method="threshold").used()["threshold"] == 0.9
    assert "steps" not in Settings(method="threshold").used()
