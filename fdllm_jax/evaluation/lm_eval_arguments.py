"""What lm-evaluation-harness asks a model for: `--model_args`, and a request's generation arguments, as settings."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from fdllm_jax.likelihood import SAMPLES, check_samples
from fdllm_jax.options import settings_of
from fdllm_jax.settings import Settings

GEN_LENGTH = 256  # the harness's own default, of requests that say nothing
MODEL = ("model", "slots", "capacity", "dtype", "kernels", "samples", "preset")
SETTINGS = tuple(field.name for field in fields(Settings))
# The harness's own words for what has another name here: what it passes when nobody asks, and what to use.
OTHERS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "batch_size": ((None, 1, "1"), "give slots=N (or slots=auto) in --model_args"),
    "max_batch_size": ((None,), "give slots=auto in --model_args"),
    "device": ((None, "cuda:0"), "JAX takes its first device, which JAX_PLATFORMS and CUDA_VISIBLE_DEVICES choose"),
}
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
SAMPLING: Mapping[str, float] = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}  # and what is without effect
_WHOLE = "a whole number of at least 1"
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # of a request's arguments: whether a value is one
    **dict.fromkeys(LENGTHS, (lambda value: _is_number(value) and value >= 1 and float(value).is_integer(), _WHOLE)),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "until": (lambda value: isinstance(value, str) or _are_texts(value), "a text or a list of texts"),
}
REQUEST = ("until", "do_sample", "temperature", "num_beams", *LENGTHS, *SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """`--model_args`.

    model, slots, capacity, dtype, kernels: see `LLM`. samples: see `likelihoods`. settings: of all requests, before
    what they ask for themselves. gen_length: the most response positions of a request; None leaves it to them.
    """

    model: str | None
    slots: int | Literal["auto"] | None
    capacity: int | None
    dtype: str
    kernels: str
    samples: int
    settings: Settings
    gen_length: int | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Of the harness's names and values. `pretrained` is another name for `model`.

        Raises ValueError that names every argument at fault.
        """
        faults = [
            f"{name}={given[name]!r}: {instead}"
            for name, (unasked, instead) in OTHERS.items()
            if given.get(name) not in unasked
        ]
        known = {*MODEL, *SETTINGS, "pretrained"}
        if unknown := [name for name in given if name not in known and name not in OTHERS]:
            faults.append(f"{', '.join(map(repr, unknown))}: expected {', '.join((*MODEL, *SETTINGS))}")
        if "model" in given and "pretrained" in given:
            faults.append("model and pretrained are one argument: give one of them")
        settings = {name: given[name] for name in ("preset", *SETTINGS) if given.get(name) is not None}
        for name in {"stop", "track_layers"} & settings.keys():  # of one, no list can be told on a command line
            if not isinstance(settings[name], list | tuple):
                settings[name] = [settings[name]]
        checked, samples = Settings(), given.get("samples", SAMPLES)
        try:
            check_samples(samples)
            checked = settings_of(argparse.Namespace(**settings))
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError(f"--model_args: {'; '.join(faults)}")
        model = given.get("model", given.get("pretrained"))
        return cls(
            model=None if model is None else str(model),
            slots=given.get("slots"),
            capacity=given.get("capacity"),
            dtype=given.get("dtype", "auto"),
            kernels=given.get("kernels", "auto"),
            samples=samples,
            settings=checked,
            gen_length=settings.get("gen_length"),
        )

    def of_request(self, index: int, asked: Mapping[str, Any]) -> Settings:
        """The settings of a run's request, whose generation arguments are `asked`.

        gen_length is what is given here or what the request asks for, whichever is less. The stop strings are of both.
        The temperature is the request's if it samples at one, else what is given here. Request i draws from seed + i.
        Raises ValueError for what the engine does not do.
        """
        wrong = [
            f"{name}={asked[name]!r}: expected {expected}"
            for name, (is_right, expected) in KINDS.items()
            if asked.get(name) is not None and not is_right(asked[name])
        ]
        if wrong:
            raise ValueError(f"generation arguments: {'; '.join(wrong)}")
        sampled = float(asked.get("temperature") or 0.0) if asked.get("do_sample", True) else 0.0
        temperature = sampled or self.settings.temperature
        without_effect = {"num_beams": 1, **(SAMPLING if temperature > 0 else {})}
        faults = [f"{name}={asked[name]!r}" for name in asked if name not in REQUEST]
        faults += [
            f"{name}={asked[name]!r}" for name, value in without_effect.items() if asked.get(name, value) != value
        ]
        if faults:
            raise ValueError(
                f"this model does not follow the generation arguments {', '.join(faults)}: expected until, do_sample, "
                f"temperature or {LENGTHS[0]}; its own settings are given in --model_args"
            )
        lengths = [self.gen_length, next((int(asked[n]) for n in LENGTHS if asked.get(n) is not None), None)]
        return replace(
            self.settings,
            gen_length=min((length for length in lengths if length is not None), default=GEN_LENGTH),
            temperature=temperature,
            stop=tuple(dict.fromkeys((*self.settings.stop, *_texts(asked.get("until"))))),
            seed=(self.settings.seed + index) % 2**32,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _texts(until: Any) -> tuple[str, ...]:
    """A text, a list of them or nothing, without empty ones."""
    return tuple(text for text in ([until] if isinstance(until, str) else until or ()) if text != "")
