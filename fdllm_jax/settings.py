"""What a generation is asked for: one name for each setting in the code, the command lines and the results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

Remasking = Literal["low_confidence", "random"]

# Per method, the options that it alone decides by, and what they are when not given.
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llada": {
            "steps": None,
            "remasking": "low_confidence",
            "cfg_scale": 0.0,
            "logits_eos_inf": False,
            "confidence_eos_eot_inf": False,
        },
        "threshold": {"threshold": 0.9},
    }
)
SHARED = ("gen_length", "block_length", "temperature", "seed", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one request. None means the method's own default; an option that the method does not use is refused.

    method: "llada" (LLaDA's sampler: a quota of tokens a step, block by block) or "threshold" (every token of a
        sliding decode window whose confidence reaches `threshold`, at least one).
    gen_length: response positions, in tokens.
    block_length: tokens of a block (llada) or of the decode window (threshold; the paper's β).
    temperature: of the Gumbel noise; 0 takes the argmax.
    seed: of the request's noise, 0 <= seed < 2^32.
    stop: strings that end the text; they and what follows are cut.
    steps: denoising steps over all blocks (llada); one a token when None.
    remasking: what ranks predictions (llada).
    cfg_scale: classifier-free guidance w, logits u + (w + 1)(z - u) (llada); 0 is off.
    logits_eos_inf: EOS is never predicted (llada).
    confidence_eos_eot_inf: predictions of EOS and end-of-turn are committed last (llada).
    threshold: confidence from which tokens are committed (threshold; the paper's ε), in (0, 1].

    Raises ValueError that names every field at fault.
    """

    method: str = "llada"
    gen_length: int = 128
    block_length: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    steps: int | None = None
    remasking: str | None = None
    cfg_scale: float | None = None
    logits_eos_inf: bool | None = None
    confidence_eos_eot_inf: bool | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown: expected one of {', '.join(METHODS)}")
        faults = [
            f"{name}={getattr(self, name)!r} is not an option of method {self.method!r}"
            for options in METHODS.values()
            for name in options
            if name not in METHODS[self.method] and getattr(self, name) is not None
        ]
        faults += _faults(self)
        if faults:
            raise ValueError("; ".join(faults))

    def value(self, option: str) -> Any:
        """The option as given, or the method's default; `steps` resolves to gen_length."""
        given = getattr(self, option)
        if given is None:
            given = METHODS[self.method].get(option)
        return self.gen_length if option == "steps" and given is None else given

    def used(self) -> dict[str, Any]:
        """Every setting that decides the outcome, by name, for reports."""
        return {name: self.value(name) for name in (*SHARED, *METHODS[self.method])}


def _faults(settings: Settings) -> list[str]:
    faults = []

    def check(name: str, kind: type, fits: Any, expected: str) -> None:
        value = settings.value(name) if name not in SHARED else getattr(settings, name)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)) or not fits(value):
            faults.append(f"{name}={value!r}: expected {expected}")

    check("gen_length", int, lambda n: n >= 1, "at least 1")
    check("block_length", int, lambda n: n >= 1, "at least 1")
    check("temperature", float, lambda t: math.isfinite(t) and t >= 0, "a finite number of at least 0")
    check("seed", int, lambda n: 0 <= n < 2**32, "an integer in [0, 2^32)")
    if not isinstance(settings.stop, tuple) or not all(isinstance(s, str) and s for s in settings.stop):
        faults.append(f"stop={settings.stop!r}: expected a tuple of non-empty strings")
    if settings.method == "threshold":
        check("threshold", float, lambda t: 0 < t <= 1, "a number in (0, 1]")
    if settings.method == "llada":
        check("remasking", str, lambda r: r in get_args(Remasking), f"one of {', '.join(get_args(Remasking))}")
        check("cfg_scale", float, lambda w: math.isfinite(w) and w >= 0, "a finite number of at least 0")
        check("logits_eos_inf", bool, lambda _: True, "true or false")
        check("confidence_eos_eot_inf", bool, lambda _: True, "true or false")
        if settings.steps is not None:
            check("steps", int, lambda n: n >= 1, "at least 1")
        if not faults:
            blocks = -(-settings.gen_length // settings.block_length)
            if settings.value("steps") < blocks:
                faults.append(
                    f"steps={settings.steps} is less than the {blocks} blocks of gen_length={settings.gen_length}, "
                    f"block_length={settings.block_length}: every block needs a step"
                )
    return faults
