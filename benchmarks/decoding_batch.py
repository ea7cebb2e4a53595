"""A batch that is begun together, timed step by step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import jax
import numpy as np

from fdllm_jax import LLM, Result, Settings
from fdllm_jax.batching import Program
from fdllm_jax.decoding.state import MOST_STEPS, DecodeState
from fdllm_jax.exchange import Orders, Report, admission
from fdllm_jax.job import Job, harvest

EMPTY_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A batch begun together. Seconds of the call of its first step; and of that of the steps in which all slots were
    live, with the tokens that these committed.

    call: seconds of a call without a step. verified: those of the steps that ran a second pass: as many as are to be
    expected from each slot's own, or, of slots in lockstep, as any slot's.
    """

    first: float
    live: float
    call: float
    steps: int
    tokens: int
    verified: float
    results: Sequence[Result]


def jobs_of(prompts: Sequence[list[int]], settings: Settings) -> list[Job]:
    """A job a prompt, each with a seed of its own."""
    return [Job(i, prompt, replace(settings, seed=settings.seed + i)) for i, prompt in enumerate(prompts)]


def admitting(program: Program, jobs: Sequence[Job]) -> Orders:
    """The orders that put a job into each slot."""
    orders = Orders(program.slots, program.capacity)
    for slot, job in enumerate(jobs):
        orders.admit(slot, admission(job.prompt, job.settings))
    return orders


def advanced(program: Program, state: DecodeState, orders: Orders, steps: int) -> tuple[DecodeState, Report]:
    """The state after `steps` steps, or when a slot has ended."""
    state, packed = program.advance(state, orders.array, np.array([1, steps], np.int32))
    return state, Report.of(packed)


def timed(
    program: Program, llm: LLM, prompts: Sequence[list[int]], settings: Settings, *, lockstep: bool = False
) -> Timed:
    """Decode a prompt in every slot. lockstep: they have something to verify in the same steps, as replays do."""
    jobs, none = jobs_of(prompts, settings), Orders(program.slots, program.capacity)
    orders, state = admitting(program, jobs), jax.block_until_ready(program.start())
    moments = [time.perf_counter()]
    seen: list[Report] = []
    while not seen or seen[-1].live.any():
        state, report = advanced(program, state, none if seen else orders, MOST_STEPS if seen else 1)
        seen.append(report)
        moments.append(time.perf_counter())
    empty = []
    for _ in range(EMPTY_CALLS):
        start = time.perf_counter()
        state, _ = advanced(program, state, none, 0)
        empty.append(time.perf_counter() - start)
    results = [harvest(llm.tokenizer, seen[-1], slot, job, moments[-1] - moments[0]) for slot, job in enumerate(jobs)]
    all_live = len(seen) > 1 and bool(seen[0].live.all())
    steps = int((seen[1].step - seen[0].step).max()) if all_live else 0
    second = (seen[1].forwards - seen[0].forwards) / steps - 1 if steps else np.zeros(program.slots)  # share of steps
    return Timed(
        first=moments[1] - moments[0],
        live=moments[2] - moments[1] if all_live else 0.0,
        call=median(empty),
        steps=steps,
        tokens=sum(1 <= step <= steps for result in results for step in result.step_of),
        # it runs unless no slot has a candidate
        verified=steps * float(second.max() if lockstep else 1 - np.prod(1 - second)),
        results=results,
    )
