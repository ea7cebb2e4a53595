"""What a generation is asked for: one name for each setting in the code, the command lines and the results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

Remasking = Literal["low_confidence", "random"]
Acceptance = Literal["agreement", "cumulative", "nothing"]
Order = Literal["confidence", "position"]
Isolation = Literal["paper", "strict"]

_FAST_DLLM = {"threshold": 0.9, "factor": None}
_FLASH_CACHE = {"threshold": 0.9, "mask_window": 64, "track_budget": 64, "track_layers": None}
# One-pass verify has a row or two more for each candidate, and loses nothing by narrower windows.
_NARROW = {"mask_window": 32, "track_budget": 32}
_VERIFY = {
    "gamma": 0.8,
    "acceptance": "agreement",
    "order": "confidence",
    "isolation": "paper",
    "bonus": False,
    "max_deviation": None,
}
# Per method, the options that it alone decides by, and what they are when not given.
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "flash-dllm": {**_FLASH_CACHE, **_VERIFY, "verify_rows": None, "skip_verify": False},
        "flash-dllm-onepass": {**_FLASH_CACHE, **_NARROW, **_VERIFY, "bonus": True, "plain_threshold": None},
        "flash-cache": _FLASH_CACHE,
        "fast-dllm-dual": _FAST_DLLM,
        "fast-dllm-prefix": _FAST_DLLM,
        "fast-dllm-parallel": _FAST_DLLM,
        "threshold": {"threshold": 0.9},
        "llada": {
            "steps": None,
            "remasking": "low_confidence",
            "cfg_scale": 0.0,
            "logits_eos_inf": False,
            "confidence_eos_eot_inf": False,
        },
    }
)
# Settings by name: the paper's by benchmark (its Table 3), and one-pass verify along its curve.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gsm8k": {"method": "flash-dllm", "gamma": 0.8},
        "math": {"method": "flash-dllm", "gamma": 0.85},
        "humaneval": {"method": "flash-dllm", "gamma": 0.85},
        "mbpp": {"method": "flash-dllm", "gamma": 0.8, "track_budget": 48},
        "quality": {
            "method": "flash-dllm-onepass",
            "gamma": 0.9,
            "isolation": "strict",
            "plain_threshold": 0.95,
        },
        "balanced": {"method": "flash-dllm-onepass", "gamma": 0.8},
        "fast": {"method": "flash-dllm-onepass", "gamma": 0.5},
    }
)
DTYPES = ("auto", "bfloat16", "float16", "float32")  # of weights and activations
SHARED = ("gen_length", "block_length", "temperature", "seed", "stop")
# Numbers that the requests of one call may differ in, beside those of SHARED that are no sizes.
PER_REQUEST = ("steps", "threshold", "factor", "gamma", "plain_threshold", "max_deviation", "cfg_scale")
LARGEST_SCALE = 1e4  # of temperature and guidance: far beyond use, far below overflow
LARGEST_FACTOR = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one request. None means the method's own default; an option that the method does not use is refused.

    method: "flash-dllm" (Flash-Cache and Flash-Verify), "flash-dllm-onepass" (one pass that verifies and drafts),
        "flash-cache" (the same cache, threshold decoding), "fast-dllm-dual", "fast-dllm-prefix" and
        "fast-dllm-parallel" (Fast-dLLM with its dual cache, its prefix cache and none), "threshold" (flash-cache
        without its cache) or "llada" (LLaDA's sampler: a quota of tokens a step, block by block).
    gen_length: response positions, in tokens.
    block_length: tokens of a block (llada, fast-dllm) or of the decode window (the others; the paper's β); what exceeds
        gen_length makes no difference.
    temperature: of the Gumbel noise; 0 takes the argmax.
    seed: of the request's noise, 0 <= seed < 2^32.
    stop: strings that end the text; they and what follows are cut. A list will do.
    steps: denoising steps over all blocks (llada); one a token when None.
    remasking: what ranks predictions (llada).
    cfg_scale: classifier-free guidance w, logits u + (w + 1)(z - u) (llada); 0 is off.
    logits_eos_inf: EOS is never predicted (llada).
    confidence_eos_eot_inf: predictions of EOS and end-of-turn are committed last (llada).
    threshold: confidence from which tokens are committed (all but llada; the paper's ε), in (0, 1].
    factor: in place of the threshold, the n most confident tokens with (n + 1)(1 - confidence) <= factor (fast-dllm).
    mask_window: masked positions that a pass computes (flash; the paper's β_m).
    track_budget: decoded positions that a pass computes anew (flash; the paper's β_t).
    track_layers: layers whose attention chooses them (flash), a list of indices; all when None.
    gamma: probability that a verified token needs (verify; the paper's gamma), in (0, 1].
    acceptance: "agreement" (the mask view predicts the draft, at gamma at least), "cumulative" (the product of the
        drafts' probabilities so far is at least gamma) or "nothing" (verify).
    order: in which candidates are verified: by draft "confidence" or by "position" (verify).
    isolation: "paper" (a draft is hidden from the views before it within a layer) or "strict" (at any depth) (verify).
    bonus: at the first rejection, commit what the mask view predicts if it reaches both threshold and gamma (verify).
    max_deviation: no token is verified that would let the product of the verified tokens' probabilities fall below
        1 - max_deviation (verify with strict isolation, agreement and temperature 0). It bounds what verification
        changes in the sequence's distribution; tokens that the draft commits by threshold are outside it.
    verify_rows: rows of a verify pass (flash-dllm): two (strict: three) for each candidate, the rest is context; two
        (three) for each position of the decode window when None.
    skip_verify: no verify pass where the running acceptance rate promises less than one token (flash-dllm).
    plain_threshold: confidence from which one-pass verify commits predictions that it has not verified; off when None.

    Numbers may be NumPy's. Raises ValueError that names every field at fault.
    """

    method: str = "flash-dllm"
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
    factor: float | None = None
    mask_window: int | None = None
    track_budget: int | None = None
    track_layers: tuple[int, ...] | None = None
    gamma: float | None = None
    acceptance: str | None = None
    order: str | None = None
    isolation: str | None = None
    bonus: bool | None = None
    max_deviation: float | None = None
    verify_rows: int | None = None
    skip_verify: bool | None = None
    plain_threshold: float | None = None

    @classmethod
    def preset(cls, name: str, **settings: Any) -> Self:
        """The settings of a preset, with `settings` over them. Raises ValueError for a name that is none."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"preset={name!r} is unknown: expected one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **settings})

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown: expected one of {', '.join(METHODS)}")
        options = dict.fromkeys(name for options in METHODS.values() for name in options)
        faults = [
            f"{name}={getattr(self, name)!r} is not an option of method {self.method!r}, only of "
            + ", ".join(method for method, its in METHODS.items() if name in its)
            for name in options
            if name not in METHODS[self.method] and getattr(self, name) is not None
        ]
        for name in self.__slots__:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        faults += _faults(self)
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def views(self) -> int:
        """Rows of a candidate in a verify pass: draft and mask view, under strict isolation a plain view as well."""
        return 3 if self.value("isolation") == "strict" else 2

    def value(self, option: str) -> Any:
        """The option as given, or the method's default, resolved where that depends on other settings."""
        given = getattr(self, option)
        if given is not None or option not in METHODS[self.method]:
            return given
        if option == "steps":
            return self.gen_length
        if option == "verify_rows":
            return self.views * self.block_length
        if option == "threshold" and self.factor is not None:
            return None  # the factor takes its place
        return METHODS[self.method][option]

    def used(self) -> dict[str, Any]:
        """Every setting that decides the outcome, by name, for reports."""
        return {name: self.value(name) for name in (*SHARED, *METHODS[self.method])}

    def program(self) -> dict[str, Any]:
        """What the requests of one call must agree on: the compiled program depends on it."""
        own = {name: value for name, value in self.used().items() if name not in (*SHARED, *PER_REQUEST)}
        switches = {name: bool(self.value(name)) for name in ("cfg_scale", "factor") if name in self.used()}
        return {"method": self.method, "block_length": self.block_length, **own, **switches}


def _plain(value: Any) -> Any:
    """NumPy's numbers and lists of strings as Python's own."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _faults(settings: Settings) -> list[str]:
    faults = []

    def check(name: str, kind: type | tuple[type, ...], fits: Callable[[Any], bool], expected: str) -> None:
        value = settings.value(name)
        is_flag = isinstance(value, bool)
        if not isinstance(value, kind) or is_flag != (kind is bool) or not fits(value):
            faults.append(f"{name}={value!r}: expected {expected}")

    def check_scale(name: str) -> None:
        check(name, (int, float), lambda x: 0 <= x <= LARGEST_SCALE, f"a number in [0, {LARGEST_SCALE:.0f}]")

    positive = (int, lambda n: n >= 1, "an integer of at least 1")
    check("gen_length", *positive)
    check("block_length", *positive)
    check_scale("temperature")
    check("seed", int, lambda n: 0 <= n < 2**32, "an integer in [0, 2^32)")
    if not isinstance(settings.stop, tuple) or not all(isinstance(s, str) and s for s in settings.stop):
        faults.append(f"stop={settings.stop!r}: expected a list of non-empty strings")

    def check_share(name: str) -> None:
        if settings.value(name) is not None:
            check(name, (int, float), lambda x: 0 < x <= 1, "a number in (0, 1]")

    def check_choice(name: str, choices: Any) -> None:
        check(name, str, lambda x: x in get_args(choices), f"one of {', '.join(get_args(choices))}")

    options = METHODS[settings.method]
    for name in ("threshold", "gamma", "plain_threshold", "max_deviation"):
        if name in options:
            check_share(name)
    for name, choices in (("acceptance", Acceptance), ("order", Order), ("isolation", Isolation)):
        if name in options:
            check_choice(name, choices)
    for name in ("bonus", "skip_verify"):
        if name in options:
            check(name, bool, lambda _: True, "true or false")
    if settings.factor is not None and "factor" in options:
        check("factor", (int, float), lambda f: 0 < f <= LARGEST_FACTOR, f"a number in (0, {LARGEST_FACTOR:.0f}]")
        if settings.threshold is not None:
            faults.append(f"threshold={settings.threshold!r}, factor={settings.factor!r}: expected one of the two")
    if settings.track_layers is not None and "track_layers" in options:
        layers = settings.track_layers
        if not isinstance(layers, tuple) or not layers or not all(type(i) is int and i >= 0 for i in layers):
            faults.append(f"track_layers={layers!r}: expected a list of layer indices, counted from 0")
        elif len(set(layers)) < len(layers):
            faults.append(f"track_layers={layers!r}: expected every layer once")
    for name in ("mask_window", "track_budget", "verify_rows"):
        if name in options and getattr(settings, name) is not None:
            check(name, *positive)
    if not faults:
        faults += _contradictions(settings)
    if settings.method == "llada":
        check_choice("remasking", Remasking)
        check_scale("cfg_scale")
        check("logits_eos_inf", bool, lambda _: True, "true or false")
        check("confidence_eos_eot_inf", bool, lambda _: True, "true or false")
        if settings.steps is not None:
            check("steps", *positive)
        if not faults:
            blocks = -(-settings.gen_length // settings.block_length)
            if settings.value("steps") < blocks:
                faults.append(
                    f"steps={settings.steps} is less than the {blocks} blocks of gen_length={settings.gen_length}, "
                    f"block_length={settings.block_length}: every block needs a step"
                )
    return faults


def _contradictions(settings: Settings) -> list[str]:
    """Sizes of a cached method that do not go together."""
    faults, options, length = [], METHODS[settings.method], settings.block_length
    for name, what in (("mask_window", "computed"), ("track_budget", "tracked once they are committed")):
        if name in options and settings.value(name) < length:
            faults.append(
                f"{name}={settings.value(name)} is less than block_length={length}, whose positions must all be {what}"
                f": use {name}={length} or a smaller block_length"
            )
    if "verify_rows" in options:
        least = settings.views * (length - 1) + 1
        if settings.value("verify_rows") < least:
            faults.append(
                f"verify_rows={settings.value('verify_rows')} does not hold {settings.views} rows for each of "
                f"{length - 1} candidates and the token that was committed: use at least {least}"
            )
    exact = settings.value("isolation") == "strict" and settings.value("acceptance") == "agreement"
    if settings.max_deviation is not None and "max_deviation" in options and (not exact or settings.temperature > 0):
        faults.append(
            f"max_deviation={settings.max_deviation} bounds nothing here: it needs isolation='strict', "
            "acceptance='agreement' and temperature=0"
        )
    return faults
