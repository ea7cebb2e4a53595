"""The engine: prompts in, texts out, through the slots of one decode state."""

import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import convert
from fdllm_jax import batching, exchange, memory
from fdllm_jax.batching import Load, Program
from fdllm_jax.decoding.methods import Method, method_of
from fdllm_jax.decoding.passes import narrower
from fdllm_jax.job import Interrupted, Job, Refusal, Result, Watcher
from fdllm_jax.model import LLaDA, from_parameters
from fdllm_jax.requests import Limits, Prompts
from fdllm_jax.settings import DTYPES, Settings
from fdllm_jax.tokenizer import Tokenizer
from pallas_kernels import choose
from pallas_kernels.self_check import ModelShape, checked
from pallas_kernels.turns import RUNNING

ASSETS = Path(__file__).parent / "assets"
SHIPPED = ASSETS / "fdllm-9m"
CAPACITY_STEP = 64  # automatic capacities are multiples of this, so that near lengths share a compiled program
MOST_SLOTS, MOST_AUTOMATIC_SLOTS = 32, 256
LOOK_AHEAD = 256  # prompts among which the longest are begun first, where that is asked for
MOST_ROWS = 2**31  # cache rows are counted in int32


def name_of(path: str | Path | None) -> str:
    """What a model is called in reports."""
    return SHIPPED.name if path is None else str(path)


def dtype_of(name: str) -> jnp.dtype:
    """The dtype that a name of `DTYPES` means on this device."""
    automatic = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(automatic if name == "auto" else name)


def _check_sizes(slots: Any, capacity: Any) -> None:
    """Raises ValueError unless these are sizes, None, or for `slots` "auto"."""
    for name, value in (("slots", None if isinstance(slots, str) and slots == "auto" else slots),
                        ("capacity", capacity)):  # fmt: skip
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r}: expected an integer of at least 1, or None")


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
        _check_sizes(slots, capacity)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype=} is unknown: expected one of {', '.join(DTYPES)}")
        implementation = choose(kernels)
        directory = SHIPPED if path is None else convert.resolve(str(path))
        tokenizer = Tokenizer(directory)
        with RUNNING:
            config, parameters = convert.load(directory, dtype=dtype_of(dtype))
        implementation = checked(implementation, ModelShape.of(config), dtype_of(dtype))
        model = from_parameters(config, parameters, kernels=implementation)
        self._hold(model, tokenizer, name_of(path), slots, capacity)

    @classmethod
    def of(
        cls,
        model: LLaDA,
        tokenizer: Tokenizer,
        *,
        name: str,
        slots: int | Literal["auto"] | None = None,
        capacity: int | None = None,
    ) -> Self:
        """An engine of a model in memory, whose arrays it shares. name: what it is called in reports."""
        _check_sizes(slots, capacity)
        llm = cls.__new__(cls)
        llm._hold(model, tokenizer, name, slots, capacity)
        return llm

    def _hold(
        self, model: LLaDA, tokenizer: Tokenizer, name: str, slots: int | Literal["auto"] | None, capacity: int | None
    ) -> None:
        if tokenizer.size > model.config.vocab_size:
            raise ValueError(
                f"{name}: the tokenizer has {tokenizer.size} ids and the model only {model.config.vocab_size}; "
                "they are not of the same checkpoint"
            )
        if capacity is not None and capacity > model.config.max_sequence_length:
            raise ValueError(f"{capacity=} is more than the model's context, {model.config.max_sequence_length}")
        self.name, self.tokenizer, self.config = name, tokenizer, model.config
        self.dtype = model.embedding[...].dtype
        self.slots: int | Literal["auto"] | None = int(slots) if isinstance(slots, Integral) else slots
        self.capacity = None if capacity is None else int(capacity)
        self._graphdef, self._parameters = nnx.split(model)
        self._programs: dict[tuple[int, int, Method, int | None], Program] = {}
        self._locks: dict[tuple[int, int, Method, int | None], Lock] = {}
        self._weights = memory.bytes_of(self._parameters)
        self.compile_seconds = 0.0
        self.plan: memory.Plan | None = None  # of the program asked for last
        self.load = Load()  # of the run begun last

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
        Raises ValueError before anything is decoded if a prompt cannot be served; and at Ctrl-C Interrupted, a
        KeyboardInterrupt that holds what has finished.
        """
        results: list[Result] = []
        try:
            results.extend(self._decode(self._all_jobs(prompts, settings, raw), watch))
        except KeyboardInterrupt:
            raise Interrupted(results) from None
        return sorted(results, key=lambda result: result.index)

    def stream(
        self,
        prompts: Prompts,
        settings: Settings | Sequence[Settings] | None = None,
        *,
        raw: bool = False,
        watch: Watcher | None = None,
        longest_first: bool = False,
    ) -> Generator[Result | Refusal, None, None]:
        """Yield results as they finish, each with its prompt's index; first, refusals of prompts that cannot be served.

        prompts, settings, raw, watch: see `generate`. longest_first: of each `LOOK_AHEAD` prompts the longest are begun
        first, so that none is left alone at the end; else they are begun in their order.
        """
        jobs, refusals = self._limits().jobs(prompts, settings, raw=raw)
        if longest_first:
            ahead = [jobs[i : i + LOOK_AHEAD] for i in range(0, len(jobs), LOOK_AHEAD)]
            jobs = [one for part in ahead for one in sorted(part, key=lambda one: -one.length)]
        found = self._decode(jobs, watch) if jobs else ()
        return (one for one in chain(refusals, found))

    @property
    def model(self) -> LLaDA:
        """The model with its weights."""
        return nnx.merge(self._graphdef, self._parameters)

    @property
    def programs(self) -> int:
        """How many programs are compiled: one for each method, number of slots, capacity and narrower pass."""
        return len(self._programs)

    def compile(
        self, prompts: Prompts, settings: Settings | Sequence[Settings] | None = None, *, raw: bool = False
    ) -> Program:
        """Compile what `generate` with these arguments will run, and return it. Several threads may."""
        return self._program(*self._plan(self._all_jobs(prompts, settings, raw)))

    def _decode(self, jobs: Sequence[Job], watch: Watcher | None = None) -> Iterator[Result]:
        """Results as they finish."""
        self.load = Load()
        return batching.decode(self._program(*self._plan(jobs)), jobs, self.tokenizer, self.load, watch)

    def _limits(self) -> Limits:
        return Limits(config=self.config, tokenizer=self.tokenizer, capacity=self.capacity)

    def _all_jobs(self, prompts: Prompts, settings: Any, raw: bool) -> list[Job]:
        """The jobs. Raises ValueError if any cannot be served."""
        jobs, refusals = self._limits().jobs(prompts, settings, raw=raw)
        if refusals:
            of_prompt = "prompt {0.index}: {0.reason}" if len(jobs) + len(refusals) > 1 else "{0.reason}"
            raise ValueError("; ".join(of_prompt.format(refusal) for refusal in refusals))
        return jobs

    def _plan(self, jobs: Sequence[Job]) -> tuple[int, int, Method, int | None]:
        """Slots, capacity, method and narrower pass (`passes.narrower`) of the program that decodes the jobs."""
        capacity = self.capacity
        if capacity is None:
            needed = max(job.length for job in jobs)
            capacity = min(-(-needed // CAPACITY_STEP) * CAPACITY_STEP, self.config.max_sequence_length)
        method = self._method(jobs)
        narrow = narrower(self.config, [job.length for job in jobs], capacity)
        slots = self._fitting(len(jobs), capacity, method, narrow) if self.slots == "auto" else self.slots
        return slots or min(len(jobs), MOST_SLOTS), capacity, method, narrow

    def _fitting(self, jobs: int, capacity: int, method: Method, narrow: int | None) -> int:
        """Slots for `jobs` jobs that the device has memory for, by the compiled program's own account."""
        free = memory.free_bytes()
        if free is None:
            return min(jobs, MOST_SLOTS)
        room = memory.MOST_OF_FREE * free
        cache = memory.cache_bytes(self.config, capacity=capacity, itemsize=self.dtype.itemsize)
        slots = max(1, min(jobs, MOST_AUTOMATIC_SLOTS, int(room // cache)))
        while slots > 1:
            plan = self._program(slots, capacity, method, narrow).plan
            if (needed := slots * plan.cache + plan.work_space) <= room:
                break
            slots = max(1, min(slots - 1, int(slots * room / needed)))
        return slots

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

    def _program(self, slots: int, capacity: int, method: Method, narrow: int | None) -> Program:
        if slots * capacity >= MOST_ROWS:
            raise ValueError(f"{slots=} of {capacity=} are more than {MOST_ROWS - 1} cache rows: use fewer slots")
        key = (slots, capacity, method, narrow)
        with self._locks.setdefault(key, Lock()):  # threads that ask for the same wait for one to compile it
            if key not in self._programs:
                began = time.perf_counter()
                self._programs[key] = self._compiled(*key)
                self.compile_seconds += time.perf_counter() - began
        self.plan = self._programs[key].plan
        return self._programs[key]

    def _compiled(self, slots: int, capacity: int, method: Method, narrow: int | None) -> Program:
        sizes = {"slots": slots, "capacity": capacity, "narrow": narrow}
        start = partial(exchange.empty, config=self.config, dtype=self.dtype, method=method, **sizes)
        lowered = exchange.advance.lower(
            self._parameters,
            jax.eval_shape(start),
            exchange.Orders(slots, capacity).array,
            np.zeros(2, np.int32),
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
        advance = partial(compiled, self._parameters)
        return Program(slots=slots, capacity=capacity, plan=plan, start=start, advance=advance)
