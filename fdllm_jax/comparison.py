"""A comparison of methods, less the decoding: what to run, how to score it, and what follows from the figures."""

import argparse
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fdllm_jax.options import OPTIONS, parse_settings, settings_of
from fdllm_jax.report import proportion, row
from fdllm_jax.settings import METHODS, PRESETS, SHARED, Settings

SWEPT = ("threshold", "gamma", "track_budget", "mask_window")
SIGNIFICANCE = 0.05
FEWEST = math.ceil(-math.log2(SIGNIFICANCE))  # prompts that must differ, all one way, to be a significant difference
ENOUGH = 100  # prompts with which an accuracy is known to about ten points


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compared: settings under the name of their method or preset; swept is their value on a sweep."""

    name: str
    settings: Settings
    swept: tuple[str, int | float] | None = None

    @property
    def label(self) -> str:
        """The name, with the value on a sweep."""
        return self.name if self.swept is None else f"{self.name} {self.swept[0]}={self.swept[1]:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A prompt's response beside its uncached decoding: tokens that are equal, of those of the longer one."""

    equal: int
    of: int

    @property
    def share(self) -> float:
        """The share of equal tokens; 1 where both responses are empty."""
        return self.equal / self.of if self.of else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A variant at a batch, over all prompts.

    batch: sequences decoded side by side. right: of each prompt, whether its answer is the gold one; None without gold.
    agreements: of each prompt; None for a method that has no uncached counterpart.
    tokens, steps, forwards: sums over the prompts. speeds: tokens per second of each repeat, with prefill.
    peak_memory: bytes; None where it is not known.
    """

    variant: Variant
    batch: int
    right: Sequence[bool] | None
    agreements: Sequence[Agreement] | None
    tokens: int
    steps: int
    forwards: int
    speeds: Sequence[float]
    peak_memory: int | None = None

    @property
    def speed(self) -> float:
        """Tokens per second: the median of the repeats."""
        return statistics.median(self.speeds)

    @property
    def quality(self) -> str | None:
        """The metric that judges it: accuracy where there is gold, else agreement, else none."""
        if self.right is not None:
            return "accuracy"
        return None if self.agreements is None else "agreement"

    @property
    def scores(self) -> list[float]:
        """What `quality` is of each prompt."""
        if self.right is not None:
            return [float(right) for right in self.right]
        return [agreement.share for agreement in self.agreements or ()]

    def rows(self) -> dict[str, dict[str, Any]]:
        """The figures by metric, as rows of a results file."""
        settings = self.variant.settings
        case = {"name": self.variant.name, "method": settings.method, "batch": self.batch, **settings.used()}
        rows = []
        if self.right is not None:
            rows.append(proportion(case, "accuracy", sum(self.right), len(self.right)))
        if self.agreements is not None:
            equal, of = (sum(counts) for counts in zip(*((a.equal, a.of) for a in self.agreements), strict=True))
            # A prompt counts as one trial: after a token that differs the others are likely to.
            trials = len(self.agreements)
            baseline = {"name": f"{uncached_method(settings.method)}, uncached", "median": 1.0}
            rows.append(proportion(case, "agreement", trials * (equal / of if of else 1), trials, baseline=baseline))
        rows += [
            row(case, "tokens_per_step", "tokens", self.tokens / self.steps),
            row(case, "tokens_per_forward", "tokens", self.tokens / self.forwards),
            row(
                case,
                "tokens_per_second",
                "tokens/s",
                self.speed,
                low=min(self.speeds),
                high=max(self.speeds),
                repeats=len(self.speeds),
            ),
        ]
        if self.peak_memory is not None:
            rows.append(row(case, "peak_memory", "B", self.peak_memory))
        return {row["metric"]: row for row in rows}


def variants(
    methods: Iterable[str],
    presets: Iterable[str],
    options: argparse.Namespace,
    sweep: tuple[str, Sequence[int | float]] | None = None,
) -> tuple[list[Variant], list[str]]:
    """What to compare, and notes on what was left out of it.

    methods: names, each perhaps with options of its own, `NAME:option=value,option=value`. options: the settings of
    `add_settings`; each method takes those that it uses. sweep: an option and its values, for the methods that use it.
    Raises ValueError for an option that none uses, and for settings that cannot be.
    """
    named = [_named(name) for name in methods]
    named += [(name, PRESETS[name]["method"], name, {}) for name in presets]
    if not named:
        raise ValueError("no methods: name at least one method or preset")
    used = {method: (*SHARED, *METHODS[method]) for _, method, _, _ in named}
    given = [field.name for field in fields(Settings) if getattr(options, field.name, None) is not None]
    faults, notes = [], []
    for option in [*given, *([sweep[0]] if sweep else [])]:
        without = [method for method in used if option not in used[method]]
        if len(without) == len(used):
            users = [method for method, its in METHODS.items() if option in its]
            faults.append(f"{_flag(option)} is not an option of any chosen method, only of {', '.join(users)}")
        elif without and option in given:
            notes.append(f"{_flag(option)} is not an option of {', '.join(without)}: left out there")
    if sweep and sweep[0] in given:
        faults.append(f"{_flag(sweep[0])} and --sweep {sweep[0]}: expected one of the two")
    if sweep and (fixed := [name for name, _, _, its_own in named if sweep[0] in its_own]):
        words = f"{', '.join(fixed)}: {sweep[0]} has one value there, which --sweep does not replace"
        swept_too = any(sweep[0] in used[method] and name not in fixed for name, method, _, _ in named)
        (notes if swept_too else faults).append(words)
    if faults:
        raise ValueError("; ".join(faults))

    chosen: list[Variant] = []
    for name, method, preset, of_its_own in named:
        own = {option: getattr(options, option) for option in given if option in used[method]} | of_its_own
        values = sweep[1] if sweep and sweep[0] in used[method] and sweep[0] not in of_its_own else (None,)
        for value in values:
            swept = None if sweep is None or value is None else (sweep[0], value)
            try:
                settings = settings_of(
                    argparse.Namespace(**own, preset=preset), method=method, **dict([swept] if swept else [])
                )
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            variant = Variant(name=name, settings=settings, swept=swept)
            same = next((v for v in chosen if _decides(v.settings) == _decides(settings)), None)
            if same is None:
                chosen.append(variant)
            else:
                notes.append(f"{variant.label} has the settings of {same.label}: measured once")
    return chosen, notes


def _named(text: str) -> tuple[str, str, None, dict[str, Any]]:
    """Name, method, no preset, and the method's own options."""
    method, colon, own = text.partition(":")
    if method not in METHODS:
        raise ValueError(f"--methods {text}: {method!r} is unknown: expected one of {', '.join(METHODS)}")
    try:
        options = vars(parse_settings(own)) if colon else {}
    except ValueError as error:
        raise ValueError(f"--methods {text}: {error}") from error
    return text, method, None, {name: value for name, value in options.items() if value is not None}


def sweep_of(words: Sequence[str] | None) -> tuple[str, list[int | float]] | None:
    """The option and the values of `--sweep NAME VALUE ...`. Raises ValueError for another option, or a value amiss."""
    if words is None:
        return None
    name, *values = words
    name = name.lstrip("-").replace("-", "_")
    if name not in SWEPT:
        raise ValueError(f"--sweep {words[0]}: expected one of {', '.join(SWEPT)}")
    if not values:
        raise ValueError(f"--sweep {name}: expected values after it")
    kind = OPTIONS[name]["type"]
    try:
        return name, [kind(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--sweep {name}: {error}") from error


def uncached_method(method: str) -> str | None:
    """The method that decodes by the same rule without a reused cache; None for llada, whose rule is its own."""
    if method == "llada":
        return None
    return "fast-dllm-parallel" if method.startswith("fast-dllm") else "threshold"


def uncached(settings: Settings) -> Settings | None:
    """The settings of the uncached decoding that `settings` are to agree with, of the same threshold or factor."""
    method = uncached_method(settings.method)
    if method is None:
        return None
    return Settings(method=method, **{name: getattr(settings, name) for name in (*SHARED, *METHODS[method])})


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> Agreement:
    """Tokens of a response that its reference has at the same place."""
    equal = sum(a == b for a, b in zip(tokens, reference, strict=False))
    return Agreement(equal=equal, of=max(len(tokens), len(reference)))


def significantly_below(scores: Sequence[float], best: Sequence[float]) -> bool:
    """Whether scores lie below others of the same prompts: a one-sided exact sign test at `SIGNIFICANCE`."""
    lower = sum(a < b for a, b in zip(scores, best, strict=True))
    differ = lower + sum(a > b for a, b in zip(scores, best, strict=True))
    tail = sum(math.comb(differ, k) for k in range(lower, differ + 1))
    return tail < SIGNIFICANCE * 2**differ


def fastest(measurements: Sequence[Measurement]) -> Measurement | None:
    """Of one batch, the fastest whose quality is not significantly below the best; None where none can be judged.

    Where agreement judges, uncached methods are as good as any by definition, and so do not set the bar.
    """
    judged = [m for m in measurements if m.quality is not None]
    bars = [m for m in judged if m.quality == "accuracy" or not _is_uncached(m.variant.settings.method)] or judged
    if not judged:
        return None
    best = max(bars, key=lambda m: (statistics.fmean(m.scores), m.speed))
    equals = [
        m
        for m in judged
        if not significantly_below(m.scores, best.scores)
        or (m.quality == "agreement" and _is_uncached(m.variant.settings.method))
    ]
    return max(equals, key=lambda m: m.speed)


def advice(measurements: Sequence[Measurement]) -> str:
    """One line: what to use at which batch, and what that is based on."""
    choices = {m.batch: fastest([o for o in measurements if o.batch == m.batch]) for m in measurements}
    found = {batch: choice for batch, choice in choices.items() if choice is not None}
    if not found:
        return "No advice: there are neither gold answers nor uncached decodings to judge the methods by."
    one = next(iter(found.values()))
    quality, prompts = one.quality, len(one.scores)
    if prompts < FEWEST:
        return (
            f"No advice: {prompts} prompt{'s' * (prompts > 1)} cannot tell the methods apart; {FEWEST} are the least, "
            f"{ENOUGH} or more are better (--tasks)."
        )
    parts = []
    for batch, choice in found.items():
        share = choice.rows()[choice.quality or ""]["median"]
        parts.append(
            f"{choice.variant.label} at batch {batch} ({choice.speed:.1f} tokens/s, {share:.1%} {choice.quality})"
        )
    what = "accuracy" if quality == "accuracy" else "agreement with the uncached decoding"
    return (
        f"Use {_listed(parts)}: the fastest whose {what} is not significantly below the best, by a paired sign test at "
        f"{SIGNIFICANCE:.0%} over {prompts} prompts, which sees no difference of fewer than "
        f"{FEWEST} prompts.{' More prompts (--tasks) would tell more.' * (prompts < ENOUGH)}"
    )


def _is_uncached(method: str) -> bool:
    return uncached_method(method) == method


def _decides(settings: Settings) -> Mapping[str, Any]:
    return {"method": settings.method, **settings.used()}


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
