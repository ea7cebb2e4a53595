"""What lm-evaluation-harness asks a model for, against the settings that it means."""

from dataclasses import fields
from typing import Any

import pytest

from fdllm_jax import Settings
from fdllm_jax.evaluation.lm_eval_arguments import Arguments

FROM_THE_HARNESS = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
GREEDY = {"until": ["Question:", "</s>"], "do_sample": False, "temperature": 0.0}


def test_every_setting_has_its_own_name():
    given = {
        "method": "flash-dllm-onepass", "gen_length": 64, "block_length": 8, "temperature": 0.0, "seed": 5, "stop": "a",
        "threshold": 0.8, "mask_window": 32, "track_budget": 48, "track_layers": [0, 2], "gamma": 0.7,
        "acceptance": "agreement", "order": "position", "isolation": "strict", "bonus": False, "max_deviation": 0.5,
        "plain_threshold": 0.95,
    }  # fmt: skip
    llada = {
        "method": "llada", "steps": 32, "remasking": "random", "cfg_scale": 0.5, "logits_eos_inf": True,
        "confidence_eos_eot_inf": True,
    }  # fmt: skip
    others = {"verify_rows": 64, "skip_verify": True, "factor": None}
    assert {*given, *llada, *others} == {field.name for field in fields(Settings)}
    settings = given | {"stop": ("a",), "track_layers": (0, 2)}
    assert Arguments.of({**FROM_THE_HARNESS, **given}).settings == Settings(**settings)
    assert Arguments.of(llada).settings == Settings(**llada)
    assert Arguments.of(others).settings == Settings(**others)
    assert Arguments.of({"preset": "fast", "track_layers": 1}).settings == Settings.preset("fast", track_layers=(1,))


def test_what_is_the_model_s():
    arguments = Arguments.of({"pretrained": 9, "slots": "auto", "capacity": 64, "dtype": "float32", "samples": 3})
    assert (arguments.model, arguments.slots, arguments.capacity, arguments.dtype) == ("9", "auto", 64, "float32")
    assert (arguments.samples, arguments.kernels, arguments.gen_length) == (3, "auto", None)
    assert Arguments.of({"model": "a/b"}).model == "a/b" and Arguments.of({}).model is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gama": 0.8}, "--model_args: 'gama': expected model, slots, capacity, .*, gamma, "),
        ({"model": "a", "pretrained": "b"}, "model and pretrained are one argument"),
        ({"batch_size": 8}, "batch_size=8: give slots=N"),
        ({"batch_size": "auto"}, "batch_size='auto': give slots=N .or slots=auto."),
        ({"device": "cuda:1"}, "device='cuda:1': JAX takes its first device"),
        ({"samples": 0}, "samples=0: expected an integer of at least 1"),
        ({"threshold": 2.0}, "threshold=2.0: expected a number in .0, 1."),
        ({"track_layers": -1}, "track_layers=.-1,.: expected a list of layer indices"),
        ({"stop": ""}, "stop=.'',.: expected a list of non-empty strings"),
        ({"preset": "fast", "method": "llada"}, "--preset fast is of flash-dllm-onepass"),
        ({"method": "llada", "gamma": 0.5, "device": "tpu"}, "device='tpu': .*; gamma=0.5 is not an option of method"),
    ],
)
def test_bad_arguments_are_named_together(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Arguments.of(given)


@pytest.mark.parametrize(
    ("given", "asked", "gen_length"),
    [
        ({}, {}, 256),
        ({}, {"max_gen_toks": 1024}, 1024),
        ({}, {"max_tokens": 9, "max_new_tokens": 8}, 8),
        ({"gen_length": 128}, {}, 128),
        ({"gen_length": 128}, {"max_gen_toks": 1024}, 128),
        ({"gen_length": 128}, {"max_gen_toks": 64}, 64),
    ],
)
def test_the_length_of_a_request(given: dict[str, Any], asked: dict[str, Any], gen_length: int):
    assert Arguments.of(given).of_request(0, GREEDY | asked).gen_length == gen_length


@pytest.mark.parametrize(
    ("given", "asked", "temperature"),
    [
        (0.0, {"do_sample": False, "temperature": 1}, 0.0),
        (0.0, {"do_sample": True, "temperature": 0.8, "top_p": 1.0}, 0.8),
        (0.0, {"temperature": 0.8}, 0.8),
        (0.0, {"do_sample": True}, 0.0),
        (0.5, {"do_sample": False, "temperature": 0.0, "num_beams": 1}, 0.5),
        (0.5, {"do_sample": True, "temperature": 0.8}, 0.8),
        (0.0, {"do_sample": False, "top_p": 0.95}, 0.0),
    ],
)
def test_the_temperature_of_a_request(given: float, asked: dict[str, Any], temperature: float):
    assert Arguments.of({"temperature": given}).of_request(0, asked).temperature == temperature


def test_stop_strings_and_seed_of_a_request():
    arguments = Arguments.of({"stop": ["\n", "a"], "seed": 2**32 - 1, "gamma": 0.5})
    assert arguments.of_request(0, {"until": ["b", "a", ""]}) == Settings(
        stop=("\n", "a", "b"), seed=2**32 - 1, gamma=0.5, gen_length=256
    )
    assert arguments.of_request(2, {"until": "b"}).seed == 1
    assert arguments.of_request(0, {"until": "b"}).stop == ("\n", "a", "b")
    assert arguments.of_request(0, {"until": None}).stop == ("\n", "a")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 10}, "does not follow the generation arguments num_beams=10: expected until"),
        ({"do_sample": True, "temperature": 1, "top_p": 0.9}, "top_p=0.9"),
        (
            {"until": 5, "max_gen_toks": "abc"},
            "max_gen_toks='abc': expected a whole number of at least 1; until=5: expected a text",
        ),
        ({"do_sample": False, "temperature": "abc"}, "temperature='abc': expected a number of at least 0"),
        ({"threshold": 0.5, "top_n": 1}, "threshold=0.5, top_n=1: .* its own settings are given in --model_args"),
    ],
)
def test_requests_that_are_not_followed_are_refused(asked: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Arguments.of({}).of_request(0, asked)
