"""Where the device's time goes in an iteration: by kernel, from JAX's profiler."""

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.decoding_batch import admitting, advanced, jobs_of
from fdllm_jax import Settings
from fdllm_jax.batching import Program
from fdllm_jax.exchange import Orders

STEPS = 4
SMALL = 0.005  # of all kernels' time: what takes less is among the others
OTHERS = "others"
_NUMBER = re.compile(r"[._]?\d+$")  # that XLA puts behind a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Of a step: seconds from its first kernel's start to its last one's end, and of each kernel its seconds and
    launches. Kernels that differ in a number at the end of their name are one."""

    span: float
    kernels: dict[str, tuple[float, float]]

    def largest(self) -> dict[str, tuple[float, float]]:
        """The same, the longest first, and small ones together as `OTHERS`."""
        least = SMALL * sum(seconds for seconds, _ in self.kernels.values())
        found = {name: its for name, its in self.kernels.items() if its[0] >= least}
        small = [its for its in self.kernels.values() if its[0] < least]
        ordered = dict(sorted(found.items(), key=lambda its: -its[1][0]))
        if small:
            ordered[OTHERS] = sum(seconds for seconds, _ in small), sum(launches for _, launches in small)
        return ordered


def profiled(program: Program, prompts: Sequence[list[int]], settings: Settings) -> Profile | None:
    """Of some steps of a batch begun together, with all slots live; None where no GPU was seen."""
    state, first = advanced(program, program.start(), admitting(program, jobs_of(prompts, settings)), 1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _, seen = advanced(program, state, Orders(program.slots, program.capacity), STEPS)
        file = next(iter(Path(folder).rglob("*.xplane.pb")), None)
        planes = [] if file is None else list(jax.profiler.ProfileData.from_file(str(file)).planes)
        return profile_of(planes, steps=int((seen.step - first.step).max()))


def profile_of(planes: Iterable[Any], *, steps: int) -> Profile | None:
    """Of a profile's planes: what the streams of the first GPU did."""
    plane = next((plane for plane in planes if "GPU" in plane.name), None)
    lines = [] if plane is None else [line for line in plane.lines if "Stream" in line.name]
    events = [event for line in lines for event in line.events]
    if not events or not steps:
        return None
    kernels: dict[str, tuple[float, float]] = {}
    for event in events:
        name = _NUMBER.sub("", event.name).rstrip("_")
        seconds, launches = kernels.get(name, (0.0, 0.0))
        kernels[name] = seconds + 1e-9 * event.duration_ns / steps, launches + 1 / steps
    end = max(event.start_ns + event.duration_ns for event in events)
    return Profile(span=1e-9 * (end - min(event.start_ns for event in events)) / steps, kernels=kernels)
