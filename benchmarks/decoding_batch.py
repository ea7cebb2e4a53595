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


def begun(
    program: Program, prompts: Sequence[list[int]], settings: Settings, state: DecodeState | None = None
) -> tuple[DecodeState, Report]:
    """A state in which every slot has done the first step of its prompt. state: one without a live slot, if at hand."""
    orders = Orders(program.slots, program.capacity)
    for slot, job in enumerate(jobs_of(prompts, settings)):
        orders.admit(slot, admission(job.prompt, job.settings))
    state, packed = program.advance(state or program.start(), orders.array, np.array([1, 1], np.int32))
    return state, Report.of(packed)


def timed(
    program: Program, llm: LLM, prompts: Sequence[list[int]], settings: Settings, *, lockstep: bool = False
) -> Timed:
    """Decode a prompt in every slot. lockstep: they have something to verify in the same steps, as replays do."""
    jobs = jobs_of(prompts, settings)
    none, no_state = Orders(program.slots, program.capacity).array, jax.block_until_ready(program.start())
    start = time.perf_counter()
    state, first = begun(program, prompts, settings, no_state)
    moments, seen = [start, time.perf_counter()], [first]
    while seen[-1].live.any():
        state, packed = program.advance(state, none, np.array([1, MOST_STEPS], np.int32))
        seen.append(Report.of(packed))
        moments.append(time.perf_counter())
    empty = []
    for _ in range(EMPTY_CALLS):
        start = time.perf_counter()
        state, packed = program.advance(state, none, np.array([1, 0], np.int32))
        Report.of(packed)
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
