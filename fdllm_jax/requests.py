"""What a call asks of the engine, checked: prompts and settings in, jobs and refusals out."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from fdllm_jax.config import ModelConfig
from fdllm_jax.job import Job, Refusal
from fdllm_jax.settings import Settings
from fdllm_jax.tokenizer import Tokenizer

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What jobs must fit: a model, and the capacity of a slot where one was given."""

    config: ModelConfig
    tokenizer: Tokenizer
    capacity: int | None

    def jobs(
        self, prompts: Prompts, settings: Settings | Sequence[Settings] | None, *, raw: bool
    ) -> tuple[list[Job], list[Refusal]]:
        """The jobs that can be served, and why the others cannot. See `LLM.generate`.

        Raises ValueError for what is no list of prompts, and for settings that serve none.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if not _is_list(prompts):
            raise ValueError(f"prompts={prompts!r:.80}: expected a text, or a list of texts or of lists of token ids")
        given: list[Any] = list(prompts)
        if not given:
            raise ValueError("no prompts: expected at least one")
        each = _each(len(given), settings)
        self._check_budgets(each)
        jobs, refusals = [], []
        for i, (prompt, its) in enumerate(zip(given, each, strict=True)):
            try:
                jobs.append(self._fitting(Job(i, self._encoded(prompt, raw), its)))
            except ValueError as error:
                refusals.append(Refusal(i, str(error)))
        return jobs, refusals

    def _check_budgets(self, each: Sequence[Settings]) -> None:
        """Refuse layers that the model does not have, and a budget above what a slot can hold."""
        layers, capacity = self.config.n_layers, self.capacity or self.config.max_sequence_length
        for settings in each:
            tracked = settings.track_layers or ()
            most = capacity + settings.views * settings.block_length
            if max(tracked, default=0) >= layers:
                raise ValueError(f"track_layers={tracked}: the model has the layers 0 to {layers - 1}")
            for name in ("track_budget", "mask_window"):
                if (budget := getattr(settings, name) or 0) > capacity:
                    raise ValueError(f"{name}={budget} is more than a slot holds: use at most {capacity}")
            if (settings.verify_rows or 0) > most:
                raise ValueError(f"verify_rows={settings.verify_rows} are more than can be filled: use at most {most}")

    def _encoded(self, prompt: Any, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode_raw(prompt) if raw else self.tokenizer.encode_chat(prompt)
        token_ids = list(prompt) if _is_list(prompt) else None
        if token_ids is None or any(isinstance(token, bool) or not hasattr(token, "__index__") for token in token_ids):
            raise ValueError(
                f"{prompt!r:.80}: expected a text or a list of token ids (one prompt of ids is [[1, 2, 3]])"
            )
        token_ids = [operator.index(token) for token in token_ids]
        self.tokenizer.check_ids(token_ids)
        return token_ids

    def _fitting(self, job: Job) -> Job:
        """The job. Raises ValueError if it does not fit the model's context or the capacity."""
        limit, what = self.config.max_sequence_length, "the model's context"
        if self.capacity is not None and self.capacity < limit:
            limit, what = self.capacity, "the capacity of a slot"
        if job.length > limit:
            raise ValueError(
                f"{len(job.prompt)} tokens, with gen_length={job.settings.gen_length} {job.length} in all: more than "
                f"{what}, {limit}. Shorten the prompt or gen_length"
            )
        return job


def _is_list(value: Any) -> bool:
    has_no_items = getattr(value, "ndim", 1) == 0  # NumPy's of no dimension say that they can be iterated
    return isinstance(value, Iterable) and not isinstance(value, bytes | Mapping | Set) and not has_no_items


def _each(count: int, settings: Settings | Sequence[Settings] | None) -> list[Settings]:
    """The settings of each prompt; those of one for all draw from seeds of their own."""
    if settings is None or isinstance(settings, Settings):
        settings = settings or Settings()
        return [replace(settings, seed=(settings.seed + i) % 2**32) for i in range(count)]
    if not isinstance(settings, list | tuple) or not all(isinstance(s, Settings) for s in settings):
        raise ValueError(f"settings={settings!r:.80}: expected Settings, or a list with Settings for each prompt")
    if len(settings) != count:
        raise ValueError(f"{len(settings)} settings for {count} prompts: expected one for each, or one for all")
    return list(settings)
