"""Results as data: one JSON file a command, with what is needed to repeat it."""

import datetime
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def row(case: Mapping[str, Any], metric: str, unit: str, value: int | float, **more: Any) -> dict[str, Any]:
    """One figure. `more`: low, high (spread, or the 95 % interval of a proportion), repeats, floor, baseline."""
    figure = {"case": dict(case), "metric": metric, "unit": unit, "median": value}
    return figure | {"low": value, "high": value, "repeats": 1, "floor": None, "baseline": None} | more


def proportion(
    case: Mapping[str, Any],
    metric: str,
    successes: int | float,
    trials: int,
    *,
    baseline: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A share of `trials`, with its 95 % interval."""
    low, high = wilson(successes / trials, trials)
    return row(case, metric, "fraction", successes / trials, low=low, high=high, repeats=trials, baseline=baseline)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share of `trials`."""
    z = 1.959964
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # A share of 0 or 1 is an end of its interval, which rounding must not take from it.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def write(file: Path, *, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a results file whole or not at all; the command is that of this process."""
    import jax

    report = {
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "flax": version("flax")},
        "settings": dict(settings),
        "rows": list(rows),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)


def hardware() -> str:
    """The device's name; of a CPU, its model and the cores this process may use."""
    import jax

    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"CPU: {next(names, platform.machine())}, {len(os.sched_getaffinity(0))} cores"


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem
