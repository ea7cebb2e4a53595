"""Continuous batching: jobs through the slots of a decode state, each refilled as soon as its sequence has ended."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from fdllm_jax import exchange, memory
from fdllm_jax.decoding.state import MOST_STEPS, DecodeState
from fdllm_jax.job import Job, Result, Snapshot, Watcher, harvest, has_stop, response, steps_behind_stop
from fdllm_jax.tokenizer import Tokenizer

STEPS_AT_FIRST, SECONDS_BETWEEN_LOOKS = 8, 0.05
MOST_STEPS_WITH_STOPS, SECONDS_WITH_STOPS = 8, 0.02  # steps behind a stop string are for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What decodes in `slots` slots of `capacity` tokens: a state to begin with, and `exchange.advance`, compiled."""

    slots: int
    capacity: int
    plan: memory.Plan
    start: Callable[[], DecodeState]
    advance: Callable[[DecodeState, np.ndarray, np.int32], tuple[DecodeState, jax.Array]]


@dataclass(slots=True, kw_only=True)
class Load:
    """What a run has done with its slots and its time so far.

    offered, busy: slots times denoising steps while prompts waited, and those of them that a sequence needed: not the
        ones behind a stop string.
    seconds, host_seconds: of the run, and those of them in which no call was under way; the time in which a stream's
        consumer was at work counts to these where a call was over before it asked for more.
    """

    offered: int = 0
    busy: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def occupancy(self) -> float | None:
        """Share of the slots' steps that sequences needed while prompts waited; None if none had to."""
        return self.busy / self.offered if self.offered else None

    @property
    def host_share(self) -> float:
        """Share of the time in which the device had nothing to do."""
        return self.host_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """The shares in words."""
        waited = "no prompt waited" if self.occupancy is None else f"{self.occupancy:.1%} in use while prompts waited"
        return f"{waited}; {self.host_share:.1%} of the time spent between calls"


@dataclass(frozen=True, slots=True)
class Looks:
    """How many denoising steps lie between two looks of the host, now and at most, and for how many seconds at least.

    A call returns when a sequence has ended. Looks in between are for watchers, stop strings and Ctrl-C.
    """

    steps: int
    most: int
    seconds: float

    @classmethod
    def of(cls, *, watched: bool, stops: bool) -> "Looks":
        """The first: what a step takes is not known yet."""
        if watched:
            return cls(1, 1, 0.0)
        if stops:
            return cls(1, MOST_STEPS_WITH_STOPS, SECONDS_WITH_STOPS)
        return cls(STEPS_AT_FIRST, MOST_STEPS, SECONDS_BETWEEN_LOOKS)

    def after(self, seconds: float) -> "Looks":
        """The next, after a call of some seconds: twice as many steps if it came too soon."""
        return replace(self, steps=min(2 * self.steps, self.most)) if seconds < self.seconds else self


def decode(
    program: Program, jobs: Sequence[Job], tokenizer: Tokenizer, load: Load, watch: Watcher | None = None
) -> Iterator[Result]:
    """Results as their sequences end; slots are refilled in the jobs' order.

    While the device works on a call, the host makes results of what the one before it has ended. load: is kept up to
    date. Raises OutOfMemory, with the program's plan.
    """
    with memory.told(program.plan):
        state = program.start()
    waiting, running = deque(jobs), dict[int, Job]()
    admitted, steps = [0.0] * program.slots, np.zeros(program.slots, np.int32)
    orders = exchange.Orders(program.slots, program.capacity)
    looks = Looks.of(watched=watch is not None, stops=any(job.settings.stop for job in jobs))
    ended: list[Callable[[], Result]] = []
    crowded = False
    looked = time.perf_counter()
    while waiting or running:
        for slot in range(program.slots):
            if slot not in running and waiting:
                running[slot] = job = waiting.popleft()
                admitted[slot], steps[slot] = looked, 0
                orders.admit(slot, job.prompt, job.settings)
        with memory.told(program.plan):
            state, packed = program.advance(state, orders.array, np.int32(looks.steps))
        called = time.perf_counter()
        for result in (make() for make in ended):
            load.busy -= steps_behind_stop(result) if crowded else 0
            yield result
        # Since when is not known: all of what the results' consumer took may have been time for nothing.
        if packed.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            called = time.perf_counter()
        with memory.told(program.plan):
            seen = exchange.Report.of(packed)
        load.host_seconds += called - looked
        load.seconds += time.perf_counter() - looked
        looked = time.perf_counter()

        crowded = bool(waiting)
        taken = (seen.step - steps)[list(running)]
        if crowded:
            load.offered += program.slots * int(taken.max())
            load.busy += int(taken.sum())
        steps = seen.step.copy()
        if watch is not None:
            watch([Snapshot(job.index, *response(seen, slot, job)) for slot, job in running.items()])
        orders, ended = exchange.Orders(program.slots, program.capacity), []
        for slot, job in list(running.items()):
            if not seen.live[slot] or has_stop(tokenizer, seen, slot, job):
                ended.append(partial(harvest, tokenizer, seen, slot, job, looked - admitted[slot]))
                del running[slot]
                if seen.live[slot]:
                    orders.end(slot)
        if not ended:
            looks = looks.after(looked - called)
    for make in ended:
        yield make()
