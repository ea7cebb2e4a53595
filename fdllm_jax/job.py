"""What is asked of the engine, and what comes of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fdllm_jax.decoding.state import Rule
from fdllm_jax.exchange import Report
from fdllm_jax.settings import Settings
from fdllm_jax.tokenizer import Tokenizer


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


class Refusal(NamedTuple):
    """A prompt that cannot be served: its index, and why."""

    index: int
    reason: str


class Job(NamedTuple):
    """A prompt to decode: its index, token ids and settings."""

    index: int
    prompt: list[int]
    settings: Settings

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + self.settings.gen_length


def response(seen: Report, slot: int, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the response so far, and where they are committed."""
    span = slice(start := len(job.prompt), start + job.settings.gen_length)
    return seen.tokens[slot, span], ~seen.masked[slot, span]


def harvest(tokenizer: Tokenizer, seen: Report, slot: int, job: Job, started: float, *, done: bool) -> Result | None:
    """The slot's result if it is done, or if its text so far holds a stop string; else None."""
    start = len(job.prompt)
    tokens, known = response(seen, slot, job)
    committed = tokens[: len(tokens) if known.all() else int(np.argmin(known))].tolist()
    ends = [i for i, token in enumerate(committed) if token in tokenizer.eos_ids]
    if ends:
        committed = committed[: ends[0] + 1]
    stop_reason = "eos" if ends else "length"
    text = tokenizer.decode(committed)
    stops = [at for stop in job.settings.stop if (at := text.find(stop)) >= 0]
    if stops:
        text, stop_reason = text[: min(stops)], "stop"
        committed = committed[: _tokens_covering(tokenizer, committed, len(text))]
    elif not done:
        return None
    span = slice(start, start + len(committed))
    return Result(
        index=job.index,
        text=text,
        token_ids=committed,
        prompt_ids=job.prompt,
        steps=int(seen.step[slot]),
        forwards=int(seen.forwards[slot]),
        seconds=time.perf_counter() - started,
        stop_reason=stop_reason,
        settings=job.settings,
        step_of=seen.step_of[slot, span].tolist(),
        rule_of=[Rule(rule).name.lower().replace("_", " ") for rule in seen.rule_of[slot, span]],
        confidence_of=seen.confidence_of[slot, span].tolist(),
    )


def _tokens_covering(tokenizer: Tokenizer, tokens: list[int], characters: int) -> int:
    """The fewest leading tokens whose text has `characters` characters."""
    return next(n for n in range(len(tokens) + 1) if len(tokenizer.decode(tokens[:n])) >= characters)
