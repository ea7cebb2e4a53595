"""The options of `Settings` on a command line, with the same names and defaults everywhere."""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from fdllm_jax.settings import METHODS, PRESETS, Acceptance, Isolation, Order, Remasking, Settings

DEFAULTS = Settings()
# What argparse is told of each option beyond its name; `%(default)s` is never shown, as most depend on the method.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "gen_length": {"type": int, "metavar": "N", "help": f"response positions (default: {DEFAULTS.gen_length})"},
    "block_length": {
        "type": int, "metavar": "N",
        "help": f"tokens of a block, or of the decode window (default: {DEFAULTS.block_length})",
    },
    "temperature": {"type": float, "metavar": "T", "help": "of the Gumbel noise (default: 0, argmax)"},
    "seed": {"type": int, "metavar": "N", "help": "prompt i draws from seed N + i (default: 0)"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end the response before TEXT (repeatable)"},
    "threshold": {
        "type": float, "metavar": "E", "help": "all but llada: commit from this confidence (default: 0.9)"
    },
    "factor": {"type": float, "metavar": "F", "help": "fast-dllm: commit by this factor in place of the threshold"},
    "mask_window": {
        "type": int, "metavar": "N", "help": "flash: masked positions that a pass computes (default: 64; one-pass: 32)"
    },
    "track_budget": {
        "type": int, "metavar": "N",
        "help": "flash: decoded positions that a pass computes anew (default: 64; one-pass: 32)",
    },
    "track_layers": {
        "type": int, "nargs": "+", "metavar": "I", "help": "flash: layers whose attention chooses them (default: all)"
    },
    "gamma": {"type": float, "metavar": "G", "help": "verify: probability that a verified token needs (default: 0.8)"},
    "acceptance": {"choices": get_args(Acceptance), "help": "verify: rule of acceptance (default: agreement)"},
    "order": {"choices": get_args(Order), "help": "verify: order of the candidates (default: confidence)"},
    "isolation": {
        "choices": get_args(Isolation),
        "help": "verify: hide drafts from earlier views within a layer (paper, the default) or at any depth (strict)",
    },
    "bonus": {
        "action": argparse.BooleanOptionalAction,
        "help": "verify: commit what is predicted at the first rejection (default: only flash-dllm-onepass)",
    },
    "max_deviation": {
        "type": float, "metavar": "D",
        "help": "verify, strict: bound on what verification changes in a text's distribution; tokens that the draft "
        "commits by threshold are outside it (default: none)",
    },
    "verify_rows": {
        "type": int, "metavar": "N", "help": "flash-dllm: rows of a verify pass (default: 2 block lengths, strict 3)"
    },
    "skip_verify": {
        "action": argparse.BooleanOptionalAction,
        "help": "flash-dllm: no verify pass where few tokens would be accepted (default: always verify)",
    },
    "plain_threshold": {
        "type": float, "metavar": "P",
        "help": "flash-dllm-onepass: commit unverified predictions from this confidence (default: never)",
    },
    "steps": {"type": int, "metavar": "N", "help": "llada: denoising steps (default: one a token)"},
    "remasking": {"choices": get_args(Remasking), "help": "llada: what ranks predictions (default: low_confidence)"},
    "cfg_scale": {"type": float, "metavar": "W", "help": "llada: classifier-free guidance (default: 0, off)"},
    "logits_eos_inf": {"action": "store_true", "help": "llada: never predict EOS"},
    "confidence_eos_eot_inf": {"action": "store_true", "help": "llada: commit EOS and end-of-turn last"},
}  # fmt: skip


def add_settings(parser: argparse.ArgumentParser, *, method: bool = True) -> None:
    """Add a group with an option for every setting; what is not given stays None. method: whether to ask for one."""
    group = parser.add_argument_group("settings")
    if method:
        names = " | ".join(METHODS)
        group.add_argument("--method", metavar="NAME", help=f"{names} (default: {DEFAULTS.method})")
        group.add_argument("--preset", metavar="NAME", help=f"a method with its settings: {' | '.join(PRESETS)}")
    for name, option in OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", default=None, **option)


def parse_settings(text: str) -> argparse.Namespace:
    """The settings of `option=value,option=value`, as on a command line; switches have no value, or `no-` before them.

    Raises ValueError for what a command line would refuse.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_settings(parser, method=False)
    pairs = [part.partition("=") for part in text.split(",")]
    for name, _, value in pairs:
        if value and "action" in OPTIONS.get(name.replace("-", "_"), ()):
            raise ValueError(f"{name}={value}: a switch has no value, write {name} or no-{name}")
    words = [w for name, sign, value in pairs for w in (f"--{name.replace('_', '-')}", *([value] if sign else []))]
    try:
        options, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if unknown:
        raise ValueError(f"unknown option {unknown[0].lstrip('-')!r}")
    return options


def settings_of(options: argparse.Namespace, **others: Any) -> Settings:
    """The settings given on the command line, over those of its preset. others: for what has no option there.

    Raises ValueError as `Settings` does.
    """
    names = [field.name for field in fields(Settings)]
    given = {name: getattr(options, name, None) for name in names} | others
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("stop", "track_layers"):
        if name in given:
            given[name] = tuple(given[name])
    preset: str | None = getattr(options, "preset", None)
    its = PRESETS[preset]["method"] if preset is not None and preset in PRESETS else None
    if its is not None and given.get("method", its) != its:
        raise ValueError(f"--preset {preset} is of {its}, not of --method {given['method']}: leave one of them out")
    return Settings(**given) if preset is None else Settings.preset(preset, **given)
