"""The engine: prompts in, texts out, through the slots of one decode state."""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import convert
from fdllm_jax import exchange, memory
from fdllm_jax.decoding.methods import Method, method_of
from fdllm_jax.decoding.state import MOST_STEPS, DecodeState
from fdllm_jax.job import Job, Refusal, Result, Snapshot, Watcher, harvest, response
from fdllm_jax.model import from_parameters
from fdllm_jax.settings import DTYPES, Settings
from fdllm_jax.tokenizer import Tokenizer
from pallas_kernels import choose
from pallas_kernels.self_check import ModelShape, checked

ASSETS = Path(__file__).parent / "assets"
SHIPPED = ASSETS / "fdllm-9m"
CAPACITY_STEP = 64  # automatic capacities are multiples of this, so that near lengths share a compiled program
MOST_SLOTS, MOST_AUTOMATIC_SLOTS = 32, 256
STEPS_BETWEEN_LOOKS = 8  # denoising steps between two looks of the host: for stop strings, and for Ctrl-C
SECONDS_BETWEEN_LOOKS = 0.05  # a look after fewer, at no stop string, lets the next take twice as many steps
LOOK_AHEAD = 256  # prompts among which the longest are begun first, where that is asked for
MOST_ROWS = 2**31  # cache rows are counted in int32

Program = Callable[..., tuple[DecodeState, jax.Array]]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A model with its tokenizer, ready to generate.

    path: a safetensors directory, an Orbax directory (`python -m convert`) or a hub id; None is the shipped checkpoint.
    slots: sequences decoded side by side; at most `MOST_SLOTS`, and no more than there are prompts, when None; as many
        as the device has memory for, at most `MOST_AUTOMATIC_SLOTS`, when "auto".
    capacity: tokens of prompt and response that a slot holds; as many as the call at hand needs when None.
    dtype: of weights and activations: "auto" is bfloat16 on an accelerator and float32 on a CPU.
    kernels: see `pallas_kernels`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        slots: int | Literal["auto"] | None = None,
        capacity: int | None = None,
        dtype: str = "auto",
        kernels: str = "auto",
    ):
        for name, value in (("slots", None if slots == "auto" else slots), ("capacity", capacity)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r}: expected an integer of at least 1, or None")
        if dtype not in DTYPES:
            raise ValueError(f"{dtype=} is unknown: expected one of {', '.join(DTYPES)}")
        implementation = choose(kernels)
        directory = SHIPPED if path is None else convert.resolve(str(path))
        self.name = directory.name if path is None else str(path)
        self.tokenizer = Tokenizer(directory)
        if dtype == "auto":
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        self.dtype = jnp.dtype(dtype)
        self.config, parameters = convert.load(directory, dtype=self.dtype)
        if self.tokenizer.size > self.config.vocab_size:
            raise ValueError(
                f"{directory}: the tokenizer has {self.tokenizer.size} ids and the model only "
                f"{self.config.vocab_size}; they are not of the same checkpoint"
            )
        if capacity is not None and capacity > self.config.max_sequence_length:
            raise ValueError(f"{capacity=} is more than the model's context, {self.config.max_sequence_length}")
        self.slots: int | Literal["auto"] | None = slots
        self.capacity = capacity
        implementation = checked(implementation, ModelShape.of(self.config), self.dtype)
        self._graphdef, self._parameters = nnx.split(from_parameters(self.config, parameters, kernels=implementation))
        self._programs: dict[tuple[int, int, Method], tuple[Program, memory.Plan]] = {}
        self._weights = memory.bytes_of(self._parameters)
        self.compile_seconds = 0.0
        self.plan: memory.Plan | None = None  # of the program asked for last

    def generate(
        self,
        prompts: Prompts,
        settings: Settings | Sequence[Settings] | None = None,
        *,
        raw: bool = False,
        watch: Watcher | None = None,
    ) -> list[Result]:
        """Generate a response to every prompt; results are in the prompts' order.

        prompts: texts, or token ids. A text goes through the checkpoint's chat template, or, if `raw`, stands alone.
        settings: for all prompts (prompt i then draws its noise from seed + i), or one for each; those of one call
            share method and block_length and the method's switches.
        watch: called after every denoising step with the running requests, to show text as it is decoded.
        Raises ValueError before anything is decoded if a prompt cannot be served.
        """
        jobs = self._all_jobs(prompts, settings, raw)
        return sorted(self._decode(jobs, watch), key=lambda result: result.index)

    def stream(
        self,
        prompts: Prompts,
        settings: Settings | Sequence[Settings] | None = None,
        *,
        raw: bool = False,
        longest_first: bool = False,
    ) -> Iterator[Result | Refusal]:
        """Yield results as they finish, each with its prompt's index; first, refusals of prompts that cannot be served.

        prompts, settings, raw: see `generate`. longest_first: of each `LOOK_AHEAD` prompts the longest are begun first,
        so that none is left alone at the end; else they are begun in their order.
        """
        jobs, refusals = self._jobs(prompts, settings, raw)
        if longest_first:
            ahead = [jobs[i : i + LOOK_AHEAD] for i in range(0, len(jobs), LOOK_AHEAD)]
            jobs = [one for part in ahead for one in sorted(part, key=lambda one: -one.length)]
        return chain(refusals, self._decode(jobs) if jobs else ())

    def compile(
        self, prompts: Prompts, settings: Settings | Sequence[Settings] | None = None, *, raw: bool = False
    ) -> None:
        """Compile what `generate` with these arguments will run. Several threads may, each for other arguments."""
        self._program(*self._plan(self._all_jobs(prompts, settings, raw)))

    def _decode(self, jobs: Sequence[Job], watch: Watcher | None = None) -> Iterator[Result]:
        """Results as they finish. Slots are refilled in the jobs' order."""
        key = slots, capacity, _ = self._plan(jobs)
        program, plan = self._program(*key)
        with memory.told(plan):
            state = exchange.empty(**self._shape(*key))
        waiting = deque(jobs)
        running: dict[int, Job] = {}
        started: dict[int, float] = {}
        orders = exchange.Orders(slots, capacity)
        max_steps = 1 if watch is not None else STEPS_BETWEEN_LOOKS
        may_be_late = watch is None and not any(job.settings.stop for job in jobs)
        while waiting or running:
            looked = time.perf_counter()
            for slot in range(slots):
                if slot not in running and waiting:
                    running[slot] = job = waiting.popleft()
                    started[slot] = looked
                    orders.admit(slot, job.prompt, job.settings)
            with memory.told(plan):
                state, packed = program(self._parameters, state, orders.array, np.int32(max_steps))
                seen = exchange.Report.of(packed)
            orders = exchange.Orders(slots, capacity)
            soon = time.perf_counter() - looked < SECONDS_BETWEEN_LOOKS
            if may_be_late and soon and all(seen.live[slot] for slot in running):
                max_steps = min(2 * max_steps, MOST_STEPS)
            if watch is not None:
                watch([Snapshot(r.index, *response(seen, slot, r)) for slot, r in running.items()])
            for slot, job in list(running.items()):
                done = not seen.live[slot]
                if not done and not job.settings.stop:
                    continue
                result = harvest(self.tokenizer, seen, slot, job, started[slot], done=done)
                if result is not None:
                    del running[slot]
                    if not done:  # a stop string
                        orders.end(slot)
                    yield result

    def _all_jobs(self, prompts: Prompts, settings: Any, raw: bool) -> list[Job]:
        """The jobs. Raises ValueError if any cannot be served."""
        jobs, refusals = self._jobs(prompts, settings, raw)
        if refusals:
            of_prompt = "prompt {0.index}: {0.reason}" if len(jobs) + len(refusals) > 1 else "{0.reason}"
            raise ValueError("; ".join(of_prompt.format(refusal) for refusal in refusals))
        return jobs

    def _jobs(self, prompts: Prompts, settings: Any, raw: bool) -> tuple[list[Job], list[Refusal]]:
        """The jobs that can be served, and why the others cannot."""
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping | Set):
            raise ValueError(f"prompts={prompts!r:.80}: expected a text, or a list of texts or of lists of token ids")
        given: list[Any] = list(prompts)
        if not given:
            raise ValueError("no prompts: expected at least one")
        each = self._settings(len(given), settings)
        self._check_budgets(each)
        jobs, refusals = [], []
        for i, (prompt, its) in enumerate(zip(given, each, strict=True)):
            try:
                job = Job(i, self._encode(prompt, raw), its)
            except ValueError as error:
                refusals.append(Refusal(i, str(error)))
                continue
            fault = self._fault(job)
            if fault is None:
                jobs.append(job)
            else:
                refusals.append(Refusal(i, fault))
        return jobs, refusals

    def _plan(self, jobs: Sequence[Job]) -> tuple[int, int, Method]:
        """Slots, capacity and method of the program that decodes the jobs."""
        capacity = self.capacity
        if capacity is None:
            needed = max(job.length for job in jobs)
            capacity = min(-(-needed // CAPACITY_STEP) * CAPACITY_STEP, self.config.max_sequence_length)
        method = self._method(jobs)
        slots = self._fitting(len(jobs), capacity, method) if self.slots == "auto" else self.slots
        return slots or min(len(jobs), MOST_SLOTS), capacity, method

    def _fitting(self, jobs: int, capacity: int, method: Method) -> int:
        """Slots for `jobs` jobs that the device has memory for, by the compiled program's own account."""
        free = memory.free_bytes()
        if free is None:
            return min(jobs, MOST_SLOTS)
        room = memory.MOST_OF_FREE * free
        cache = memory.cache_bytes(self.config, capacity=capacity, itemsize=self.dtype.itemsize)
        slots = max(1, min(jobs, MOST_AUTOMATIC_SLOTS, int(room // cache)))
        while slots > 1:
            _, plan = self._program(slots, capacity, method)
            if (needed := slots * plan.cache + plan.work_space) <= room:
                break
            slots = max(1, min(slots - 1, int(slots * room / needed)))
        return slots

    def _fault(self, job: Job) -> str | None:
        """Why a job does not fit the model's context or a given capacity; None where it does."""
        limit, what = self.config.max_sequence_length, "the model's context"
        if self.capacity is not None and self.capacity < limit:
            limit, what = self.capacity, "the capacity of a slot"
        if job.length <= limit:
            return None
        return (
            f"{len(job.prompt)} tokens, with gen_length={job.settings.gen_length} {job.length} in all: more than "
            f"{what}, {limit}. Shorten the prompt or gen_length"
        )

    def _encode(self, prompt: Any, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode_raw(prompt) if raw else self.tokenizer.encode_chat(prompt)
        token_ids = (
            list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, bytes | Mapping | Set) else None
        )
        if token_ids is None or any(isinstance(token, bool) or not hasattr(token, "__index__") for token in token_ids):
            raise ValueError(
                f"{prompt!r:.80}: expected a text or a list of token ids (one prompt of ids is [[1, 2, 3]])"
            )
        token_ids = [operator.index(token) for token in token_ids]
        self.tokenizer.check_ids(token_ids)
        return token_ids

    def _settings(self, count: int, settings: Settings | Sequence[Settings] | None) -> list[Settings]:
        if settings is None or isinstance(settings, Settings):
            settings = settings or Settings()
            return [replace(settings, seed=(settings.seed + i) % 2**32) for i in range(count)]
        if not isinstance(settings, list | tuple) or not all(isinstance(s, Settings) for s in settings):
            raise ValueError(f"settings={settings!r:.80}: expected Settings, or a list with Settings for each prompt")
        if len(settings) != count:
            raise ValueError(f"{len(settings)} settings for {count} prompts: expected one for each, or one for all")
        return list(settings)

    def _method(self, jobs: Sequence[Job]) -> Method:
        each = [job.settings for job in jobs]
        shared = {"longest": max(s.gen_length for s in each), "noisy": any(s.temperature > 0 for s in each)}
        methods = [method_of(s, eos_ids=self.tokenizer.eos_ids, **shared) for s in each]
        other = next((i for i, method in enumerate(methods) if method != methods[0]), None)
        if other is not None:
            used, others = each[0].program(), each[other].program()
            differ = sorted(n for n in used.keys() | others.keys() if used.get(n) != others.get(n))
            raise ValueError(
                f"the settings of prompts {jobs[0].index} and {jobs[other].index} differ in "
                f"{', '.join(differ)}: one call has one of each"
            )
        return methods[0]

    def _check_budgets(self, each: Sequence[Settings]) -> None:
        """Refuse layers that the model does not have, and a budget above what a slot can hold."""
        layers, capacity = self.config.n_layers, self.capacity or self.config.max_sequence_length
        for settings in each:
            tracked, budget = settings.track_layers or (), settings.track_budget or 0
            if max(tracked, default=0) >= layers:
                raise ValueError(f"track_layers={tracked}: the model has the layers 0 to {layers - 1}")
            if budget > capacity:
                raise ValueError(f"track_budget={budget} is more than a slot holds: use at most {capacity}")

    def _program(self, slots: int, capacity: int, method: Method) -> tuple[Program, memory.Plan]:
        if slots * capacity >= MOST_ROWS:
            raise ValueError(f"{slots=} of {capacity=} are more than {MOST_ROWS - 1} cache rows: use fewer slots")
        key = (slots, capacity, method)
        if key not in self._programs:
            start = time.perf_counter()
            state = jax.eval_shape(lambda: exchange.empty(**self._shape(*key)))
            lowered = exchange.advance.lower(
                self._parameters,
                state,
                exchange.Orders(slots, capacity).array,
                np.int32(0),
                graphdef=self._graphdef,
                method=method,
                mask_token_id=self.config.mask_token_id,
            )
            compiled = lowered.compile()
            analysis = compiled.memory_analysis()
            plan = memory.Plan(
                weights=self._weights,
                cache=memory.cache_bytes(self.config, capacity=capacity, itemsize=self.dtype.itemsize),
                slots=slots,
                work_space=0 if analysis is None else analysis.temp_size_in_bytes,
            )
            self._programs[key] = compiled, plan
            self.compile_seconds += time.perf_counter() - start
        program, self.plan = self._programs[key]
        return program, self.plan

    def _shape(self, slots: int, capacity: int, method: Method) -> dict[str, Any]:
        """What makes an empty state."""
        return {"config": self.config, "slots": slots, "capacity": capacity, "dtype": self.dtype, "method": method}
