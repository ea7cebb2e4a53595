"""Continuous batching: jobs through the slots of a decode state, each refilled as soon as its sequence has ended."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from threading import Event

import jax
import numpy as np

from fdllm_jax import exchange, memory
from fdllm_jax.decoding.state import MOST_STEPS, DecodeState
from fdllm_jax.job import Job, Result, Snapshot, Watcher, harvest, response, steps_behind_stop
from fdllm_jax.stops import Stops
from fdllm_jax.tokenizer import Tokenizer
from pallas_kernels.turns import RUNNING

STEPS_AT_FIRST, SECONDS_BETWEEN_LOOKS = 8, 0.2
MOST_STEPS_WITH_STOPS, SECONDS_WITH_STOPS = 8, 0.02  # steps behind a stop string are for nothing
SHORT_CALL = 0.01  # s; of shorter ones the host's part would count more than the free slot that waits for another
ENDED_OF_SLOTS = 16  # where calls are short, one of so many slots has ended before the host looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What decodes in `slots` slots of `capacity` tokens: a state to begin with, and `exchange.advance`, compiled."""

    slots: int
    capacity: int
    plan: memory.Plan
    start: Callable[[], DecodeState]
    advance: Callable[[DecodeState, np.ndarray, np.ndarray], tuple[DecodeState, jax.Array]]


@dataclass(slots=True, kw_only=True)
class Load:
    """What a run has done with its slots and its time so far.

    offered, busy: slots times denoising steps while prompts waited, and those of them that a sequence needed: not the
        ones behind a stop string.
    seconds, host_seconds: of the run, and those of them in which no call was under way, be it for the host or for a
        stream's consumer.
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

    A call returns when a sequence has ended; where calls are short and prompts wait, when some slots are free for them.
    Looks in between are for watchers, stop strings and Ctrl-C.
    """

    steps: int
    most: int
    seconds: float
    short: bool = False

    @classmethod
    def of(cls, *, watched: bool, stops: bool) -> "Looks":
        """The first: what a step takes is not known yet."""
        if watched:
            return cls(1, 1, 0.0)
        if stops:
            return cls(1, MOST_STEPS_WITH_STOPS, SECONDS_WITH_STOPS)
        return cls(STEPS_AT_FIRST, MOST_STEPS, SECONDS_BETWEEN_LOOKS)

    def until(self, slots: int, *, crowded: bool) -> np.ndarray:
        """How many slots have ended, or steps are done, when the next call returns."""
        return np.array([max(1, slots // ENDED_OF_SLOTS) if self.short and crowded else 1, self.steps], np.int32)

    def after(self, seconds: float, *, ended: bool) -> "Looks":
        """The next, after a call of some seconds that a sequence has ended or not: more steps if it came too soon."""
        if ended:
            return replace(self, short=self.short or seconds < SHORT_CALL)
        return replace(self, steps=min(2 * self.steps, self.most)) if seconds < self.seconds else self


def decode(
    program: Program, jobs: Sequence[Job], tokenizer: Tokenizer, load: Load, watch: Watcher | None = None
) -> Iterator[Result]:
    """Results as their sequences end; slots are refilled in the jobs' order.

    While the device works on a call, which a thread waits for, the host makes results of what the one before it has
    ended. load: is kept up to date. Raises OutOfMemory, with the program's plan.
    """
    memory.check(program.plan)
    with memory.told(program.plan), RUNNING:
        state = jax.block_until_ready(program.start())
    waiting, running = iter(jobs), dict[int, Job]()
    ready = deque(_with_orders(islice(waiting, program.slots)))  # those that come next
    admitted, steps, known = [0.0] * program.slots, *np.zeros((2, program.slots), np.int32)
    orders = exchange.Orders(program.slots, program.capacity)
    stops = Stops.of(tokenizer, jobs)
    looks = Looks.of(watched=watch is not None, stops=stops is not None)
    ended: list[Callable[[], Result]] = []
    crowded = False
    over = time.perf_counter()
    with ThreadPoolExecutor(1) as device:
        while True:
            for slot in range(program.slots):
                if slot not in running and ready:
                    running[slot], order = ready.popleft()
                    admitted[slot], steps[slot] = time.perf_counter(), 0
                    known[slot] = len(running[slot].prompt)
                    orders.admit(slot, order)
            if not running:
                break
            began = time.perf_counter()
            until = looks.until(program.slots, crowded=bool(ready))
            call = device.submit(_called, program, state, orders, until, started := Event())
            started.wait()
            for result in (make() for make in ended):
                load.busy -= steps_behind_stop(result) if crowded else 0
                yield result
            ready.extend(_with_orders(islice(waiting, program.slots - len(ready))))
            orders, crowded = exchange.Orders(program.slots, program.capacity), bool(ready)
            with memory.told(program.plan):
                state, seen, end = call.result()
            load.host_seconds += began - over
            load.seconds += end - over
            over = end

            taken = (seen.step - steps)[list(running)]
            if crowded:
                load.offered += program.slots * int(taken.max())
                load.busy += int(taken.sum())
            if watch is not None:
                watch([Snapshot(job.index, *response(seen, slot, job)) for slot, job in running.items()])
            before, known = known, seen.known.copy()
            done = [slot for slot in running if not seen.live[slot]]
            if stops:
                stopped = stops.found(seen, running, before, known)
                orders.end(stopped)
                done += stopped
            ended = [partial(harvest, tokenizer, seen, i, running.pop(i), over - admitted[i]) for i in done]
            steps = seen.step.copy()
            looks = looks.after(over - began, ended=bool(ended))
    for make in ended:
        yield make()


def _with_orders(jobs: Iterable[Job]) -> list[tuple[Job, np.ndarray]]:
    """Jobs, each with the order that admits it."""
    return [(job, exchange.admission(job.prompt, job.settings)) for job in jobs]


def _called(
    program: Program, state: DecodeState, orders: exchange.Orders, until: np.ndarray, started: Event
) -> tuple[DecodeState, exchange.Report, float]:
    """A call, waited for: the new state, the report, and when it was over.

    Python's lock is this thread's until the device is at work: who waits for `started` does not hold it up.
    """
    with RUNNING:
        started.set()
        state, packed = program.advance(state, orders.array, until)
        return state, exchange.Report.of(packed), time.perf_counter()
