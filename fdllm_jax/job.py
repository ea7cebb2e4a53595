"""What is asked of the engine, and what comes of it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
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
    steps: denoising steps, up to the host's look that found a stop string (see `batching.Looks`). forwards: passes in
    which the sequence had rows.
    seconds: from admission to the end, compilation not included; batch mates included, and a stream's consumer where
        the engine waited for it.
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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of `LLM.generate`. results: those that had finished, in the order of finishing."""

    def __init__(self, results: Sequence[Result]):
        super().__init__(f"{len(results)} results had finished")
        self.results = results


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


def text_of(tokenizer: Tokenizer, seen: Report, slot: int, job: Job) -> tuple[list[int], str]:
    """Tokens and text of the response as far as it is known without a gap, up to and including the first EOS.

    The text goes up to the last character that no further token can change.
    """
    tokens, known = response(seen, slot, job)
    committed = tokens[: len(tokens) if known.all() else int(np.argmin(known))].tolist()
    ends = [i for i, token in enumerate(committed) if token in tokenizer.eos_ids]
    committed = committed[: ends[0] + 1] if ends else committed
    text = tokenizer.decode(committed)
    return committed, text if ends or known.all() else text.rstrip("\ufffd")


def harvest(tokenizer: Tokenizer, seen: Report, slot: int, job: Job, seconds: float) -> Result:
    """The result of a slot that is done, or whose text holds a stop string, after some seconds."""
    committed, text = text_of(tokenizer, seen, slot, job)
    stop_reason = "eos" if committed and committed[-1] in tokenizer.eos_ids else "length"
    if stops := [(at + len(stop), at) for stop in job.settings.stop if (at := text.find(stop)) >= 0]:
        text, stop_reason = text[: min(stops)[1]], "stop"  # the first to be whole, however much is known by now
        committed = committed[: _tokens_covering(tokenizer, committed, len(text))]
    start = len(job.prompt)
    span = slice(start, start + len(committed))
    return Result(
        index=job.index,
        text=text,
        token_ids=committed,
        prompt_ids=job.prompt,
        steps=int(seen.step[slot]),
        forwards=int(seen.forwards[slot]),
        seconds=seconds,
        stop_reason=stop_reason,
        settings=job.settings,
        step_of=seen.step_of[slot, span].tolist(),
        rule_of=[Rule(rule).name.lower().replace("_", " ") for rule in seen.rule_of[slot, span]],
        confidence_of=seen.confidence_of[slot, span].tolist(),
    )


def steps_behind_stop(result: Result) -> int:
    """Steps of a result behind the one that committed its last token, where a stop string ended it."""
    return result.steps - 1 - max(result.step_of, default=result.steps - 1) if result.stop_reason == "stop" else 0


def _tokens_covering(tokenizer: Tokenizer, tokens: list[int], characters: int) -> int:
    """The fewest leading tokens whose text has `characters` characters."""
    return bisect_left(range(len(tokens)), characters, key=lambda n: len(tokenizer.decode(tokens[:n])))
