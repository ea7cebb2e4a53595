"""What a generation is asked for: one name for each setting in the code, the command lines and the results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
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
DTYPES = ("auto", "bfloat16", "float16", "float32")  # of weights and activations
SHARED = ("gen_length", "block_length", "temperature", "seed", "stop")
LARGEST_SCALE = 1e4  # of temperature and guidance: far beyond use, far below overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one request. None means the method's own default; an option that the method does not use is refused.

    method: "llada" (LLaDA's sampler: a quota of tokens a step, block by block) or "threshold" (every token of a
        sliding decode window whose confidence reaches `threshold`, at least one).
    gen_length: response positions, in tokens.
    block_length: tokens of a block (llada) or of the decode window (threshold; the paper's β); what exceeds gen_length
        makes no difference.
    temperature: of the Gumbel noise; 0 takes the argmax.
    seed: of the request's noise, 0 <= seed < 2^32.
    stop: strings that end the text; they and what follows are cut. A list will do.
    steps: denoising steps over all blocks (llada); one a token when None.
    remasking: what ranks predictions (llada).
    cfg_scale: classifier-free guidance w, logits u + (w + 1)(z - u) (llada); 0 is off.
    logits_eos_inf: EOS is never predicted (llada).
    confidence_eos_eot_inf: predictions of EOS and end-of-turn are committed last (llada).
    threshold: confidence from which tokens are committed (threshold; the paper's ε), in (0, 1].

    Numbers may be NumPy's. Raises ValueError that names every field at fault.
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
        for name in self.__slots__:
            object.__setattr__(self, name, _plain(getattr(self, name)))
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


def _plain(value: Any) -> Any:
    """NumPy's numbers and lists of strings as Python's own."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


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
    if settings.method == "threshold":
        check("threshold", (int, float), lambda t: 0 < t <= 1, "a number in (0, 1]")
    if settings.method == "llada":
        check("remasking", str, lambda r: r in get_args(Remasking), f"one of {', '.join(get_args(Remasking))}")
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
