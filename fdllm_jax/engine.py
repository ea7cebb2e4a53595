"""The engine: prompts in, texts out, through the slots of one decode state."""

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import convert
from fdllm_jax import exchange
from fdllm_jax.decoding.methods import Method, method_of
from fdllm_jax.decoding.state import MOST_STEPS, DecodeState, Rule
from fdllm_jax.model import from_parameters
from fdllm_jax.settings import DTYPES, Settings
from fdllm_jax.tokenizer import Tokenizer
from pallas_kernels import choose
from pallas_kernels.self_check import ModelShape, checked

ASSETS = Path(__file__).parent / "assets"
SHIPPED = ASSETS / "fdllm-9m"
CAPACITY_STEP = 64  # automatic capacities are multiples of this, so that near lengths share a compiled program
MOST_SLOTS = 32
STEPS_BETWEEN_LOOKS = 8  # denoising steps between two looks of the host: for stop strings, and for Ctrl-C
SECONDS_BETWEEN_LOOKS = 0.05  # a look after fewer, at no stop string, lets the next take twice as many steps
MOST_ROWS = 2**31  # cache rows are counted in int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished request.

    text: decoded response, without what follows an EOS or a stop string. token_ids: its tokens, up to and including the
    first EOS, after cutting at a stop string; their number is what counts as generated.
    steps: denoising steps. forwards: passes in which the sequence had rows.
    seconds: from admission to the end, compilation not included, batch mates included.
    stop_reason: "eos", "length" or "stop".
    step_of, rule_of, confidence_of: per token of `token_ids`, the step that committed it, the rule, its probability.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    steps: int
    forwards: int
    seconds: float
    stop_reason: str
    settings: Settings
    step_of: list[int]
    rule_of: list[str]
    confidence_of: list[float]

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per denoising step."""
        return len(self.token_ids) / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of this request's wall time."""
        return len(self.token_ids) / self.seconds


class Snapshot(NamedTuple):
    """A running request as it stands: response tokens and which of them are committed, [gen_length] each."""

    index: int
    tokens: np.ndarray
    committed: np.ndarray


Watcher = Callable[[list[Snapshot]], None]


@dataclass(slots=True)
class _Running:
    index: int
    prompt: list[int]
    settings: Settings
    started: float


class LLM:
    """A model with its tokenizer, ready to generate.

    path: a safetensors directory, an Orbax directory (`python -m convert`) or a hub id; None is the shipped checkpoint.
    slots: sequences decoded side by side; at most `MOST_SLOTS`, and no more than there are prompts, when None.
    capacity: tokens of prompt and response that a slot holds; as many as the call at hand needs when None.
    dtype: of weights and activations: "auto" is bfloat16 on an accelerator and float32 on a CPU.
    kernels: see `pallas_kernels`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        slots: int | None = None,
        capacity: int | None = None,
        dtype: str = "auto",
        kernels: str = "auto",
    ):
        for name, value in (("slots", slots), ("capacity", capacity)):
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
        self.slots, self.capacity = slots, capacity
        implementation = checked(implementation, ModelShape.of(self.config), self.dtype)
        self._graphdef, self._parameters = nnx.split(from_parameters(self.config, parameters, kernels=implementation))
        self._programs: dict[tuple[int, int, Method], Callable[..., tuple[DecodeState, jax.Array]]] = {}
        self.compile_seconds = 0.0

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
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
        """
        ids, each, plan = self._plan(prompts, settings, raw)
        slots, capacity, _ = plan
        program = self._program(*plan)
        state = exchange.empty(**self._shape(*plan))

        waiting = [_Running(i, prompt, s, 0.0) for i, (prompt, s) in enumerate(zip(ids, each, strict=True))][::-1]
        running: dict[int, _Running] = {}
        results: dict[int, Result] = {}
        orders = exchange.Orders(slots, capacity)
        max_steps = 1 if watch is not None else STEPS_BETWEEN_LOOKS
        may_be_late = watch is None and not any(s.stop for s in each)
        while waiting or running:
            looked = time.perf_counter()
            for slot in range(slots):
                if slot not in running and waiting:
                    running[slot] = waiting.pop()
                    running[slot].started = looked
                    orders.admit(slot, running[slot].prompt, running[slot].settings)
            state, packed = program(self._parameters, state, orders.array, np.int32(max_steps))
            seen = exchange.Report.of(packed)
            orders = exchange.Orders(slots, capacity)
            soon = time.perf_counter() - looked < SECONDS_BETWEEN_LOOKS
            if may_be_late and soon and all(seen.live[slot] for slot in running):
                max_steps = min(2 * max_steps, MOST_STEPS)
            if watch is not None:
                watch([Snapshot(r.index, *_response(seen, slot, r)) for slot, r in running.items()])
            for slot, request in list(running.items()):
                done = not seen.live[slot]
                finished = self._harvest(seen, slot, request, done=done) if done or request.settings.stop else None
                if finished is not None:
                    results[request.index] = finished
                    del running[slot]
                    if not done:  # a stop string
                        orders.end(slot)
        return [results[i] for i in range(len(ids))]

    def compile(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        raw: bool = False,
    ) -> None:
        """Compile what `generate` with these arguments will run. Several threads may, each for other arguments."""
        self._program(*self._plan(prompts, settings, raw)[2])

    def _plan(
        self, prompts: Any, settings: Settings | Sequence[Settings] | None, raw: bool
    ) -> tuple[list[list[int]], list[Settings], tuple[int, int, Method]]:
        """Token ids and settings of each prompt; slots, capacity and method of the program."""
        ids = self._encode(prompts, raw)
        each = self._settings(len(ids), settings)
        method = self._method(each)
        capacity = self._check_lengths(ids, each)
        return ids, each, (self.slots or min(len(ids), MOST_SLOTS), capacity, method)

    def _encode(self, prompts: Any, raw: bool) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping | Set):
            raise ValueError(f"prompts={prompts!r:.80}: expected a text, or a list of texts or of lists of token ids")
        prompts = list(prompts)
        if not prompts:
            raise ValueError("no prompts: expected at least one")
        ids = []
        for i, prompt in enumerate(prompts):
            try:
                ids.append(self._encode_one(prompt, raw))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from error
        return ids

    def _encode_one(self, prompt: Any, raw: bool) -> list[int]:
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

    def _method(self, each: Sequence[Settings]) -> Method:
        self._check_budgets(each)
        shared = {"longest": max(s.gen_length for s in each), "noisy": any(s.temperature > 0 for s in each)}
        methods = [method_of(s, eos_ids=self.tokenizer.eos_ids, **shared) for s in each]
        other = next((i for i, method in enumerate(methods) if method != methods[0]), None)
        if other is not None:
            used, others = each[0].program(), each[other].program()
            differ = sorted(n for n in used.keys() | others.keys() if used.get(n) != others.get(n))
            raise ValueError(
                f"the settings of prompts 0 and {other} differ in {', '.join(differ)}: one call has one of each"
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

    def _check_lengths(self, ids: Sequence[Sequence[int]], each: Sequence[Settings]) -> int:
        """The capacity to decode with; refuses what does not fit the model's context or a given capacity."""
        limit, what = self.config.max_sequence_length, "the model's context"
        if self.capacity is not None and self.capacity < limit:
            limit, what = self.capacity, "the capacity of a slot"
        totals = [len(prompt) + s.gen_length for prompt, s in zip(ids, each, strict=True)]
        faults = [
            f"prompt {i} has {len(prompt)} tokens, with gen_length={s.gen_length} {total} in all"
            for i, (prompt, s, total) in enumerate(zip(ids, each, totals, strict=True))
            if total > limit
        ]
        if faults:
            raise ValueError(f"{'; '.join(faults)}: more than {what}, {limit}. Shorten the prompt or gen_length")
        if self.capacity is not None:
            return self.capacity
        return min(-(-max(totals) // CAPACITY_STEP) * CAPACITY_STEP, self.config.max_sequence_length)

    def _program(self, slots: int, capacity: int, method: Method) -> Callable:
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
            self._programs[key] = lowered.compile()
            self.compile_seconds += time.perf_counter() - start
        return self._programs[key]

    def _shape(self, slots: int, capacity: int, method: Method) -> dict[str, Any]:
        """What makes an empty state."""
        return {"config": self.config, "slots": slots, "capacity": capacity, "dtype": self.dtype, "method": method}

    def _harvest(self, seen: exchange.Report, slot: int, request: _Running, *, done: bool) -> Result | None:
        """The slot's result if it is done, or if its text so far holds a stop string; else None."""
        start = len(request.prompt)
        tokens, known = _response(seen, slot, request)
        committed = tokens[: len(tokens) if known.all() else int(np.argmin(known))].tolist()
        ends = [i for i, token in enumerate(committed) if token in self.tokenizer.eos_ids]
        if ends:
            committed = committed[: ends[0] + 1]
        stop_reason = "eos" if ends else "length"
        text = self.tokenizer.decode(committed)
        stops = [at for stop in request.settings.stop if (at := text.find(stop)) >= 0]
        if stops:
            text, stop_reason = text[: min(stops)], "stop"
            committed = committed[: self._tokens_covering(committed, len(text))]
        elif not done:
            return None
        span = slice(start, start + len(committed))
        return Result(
            index=request.index,
            text=text,
            token_ids=committed,
            prompt_ids=request.prompt,
            steps=int(seen.step[slot]),
            forwards=int(seen.forwards[slot]),
            seconds=time.perf_counter() - request.started,
            stop_reason=stop_reason,
            settings=request.settings,
            step_of=seen.step_of[slot, span].tolist(),
            rule_of=[Rule(rule).name.lower().replace("_", " ") for rule in seen.rule_of[slot, span]],
            confidence_of=seen.confidence_of[slot, span].tolist(),
        )

    def _tokens_covering(self, tokens: list[int], characters: int) -> int:
        """The fewest leading tokens whose text has `characters` characters."""
        return next(n for n in range(len(tokens) + 1) if len(self.tokenizer.decode(tokens[:n])) >= characters)


def _response(seen: exchange.Report, slot: int, request: _Running) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the response so far, and where they are committed."""
    span = slice(start := len(request.prompt), start + request.settings.gen_length)
    return seen.tokens[slot, span], ~seen.masked[slot, span]
