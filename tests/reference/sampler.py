"""LLaDA's sampler and threshold decoding, one sequence at a time, in plain Python.

A sequence is the prompt and then gen_length places, [MASK] at first. Which places are still open is kept in a list of
booleans, never read off the ids: a [MASK] id in the prompt, or predicted and committed, is a token like any other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]  # ids [length] int64 -> logits [length, vocab]


class Rule(IntEnum):
    """What committed a token."""

    NONE = 0
    QUOTA = 1
    THRESHOLD = 2
    MOST_CONFIDENT = 3
    VERIFIED = 4
    BONUS = 5
    PLAIN = 6
    FACTOR = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a sampler returns.

    tokens: the response up to and including the leftmost committed EOS. steps: denoising steps. forwards: passes of
    the model (two a step with guidance). commit_step and confidence have one entry for each of the gen_length places:
    the step (from 0) that committed it, -1 for never, and the probability that the model gave the token (nan for
    never), whatever ordered the commits. ids: the whole sequence as it was left, prompt included. rule: what committed
    each place. record: what a sampler tells of each of its steps, if it does. Neither takes part in comparisons.
    """

    tokens: list[int]
    steps: int
    forwards: int
    commit_step: list[int]
    confidence: list[float]
    ids: list[int]
    rule: list[Rule] = field(compare=False)
    record: list[Any] = field(default_factory=list, compare=False, repr=False)


def quotas(masked: int, steps: int) -> list[int]:
    """How many places each of a block's steps commits: spread evenly, the earlier steps take the remainder."""
    return [masked // steps + (i < masked % steps) for i in range(steps)]


def block_steps(gen_length: int, block_length: int, steps: int) -> list[int]:
    """Steps of each block: spread evenly, the earlier blocks take the remainder; fewer than blocks is a ValueError."""
    blocks = math.ceil(gen_length / block_length)
    if steps < blocks:
        raise ValueError(f"{steps=} is fewer than the {blocks} blocks of {gen_length=}, {block_length=}")
    return quotas(steps, blocks)


def argmax(values: Tensor) -> int:
    """Index of the largest value; ties go to the lower index."""
    return int((values == values.max()).nonzero()[0])


def generate_llada(
    forward: Forward,
    prompt: Sequence[int],
    *,
    mask_id: int,
    eos_ids: Sequence[int],
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float = 0.0,
    noise: Callable[[int, int], Tensor] | None = None,
    uniform: Callable[[int, int], float] | None = None,
    cfg_scale: float = 0.0,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
) -> Sample:
    """LLaDA's block-wise sampler: each block commits a fixed quota a step, the most confident places first.

    eos_ids: the config's eos_token_id first, then any other id that ends a response. noise(step, position) -> [vocab]
    is the Gumbel noise of temperature > 0, uniform(step, position) the order of random remasking (None: by confidence).
    Steps count from 0 over the whole generation, those of quota 0 left out; positions count from the prompt's start.
    """
    if (temperature > 0) != (noise is not None):
        raise ValueError(f"noise goes with a temperature above 0, got {temperature=}, {noise=}")
    start, total = len(prompt), len(prompt) + gen_length
    state = State(prompt, gen_length, mask_id)
    step = 0
    for block, steps_of_block in enumerate(block_steps(gen_length, block_length, steps)):
        end = min(start + (block + 1) * block_length, total)
        for quota in quotas(len(state.open_before(end)), steps_of_block):
            if quota == 0:
                continue
            logits = forward(torch.tensor(state.ids)).float()
            if cfg_scale > 0:
                without_prompt = [mask_id] * start + state.ids[start:]
                unconditional = forward(torch.tensor(without_prompt)).float()
                logits = unconditional + (cfg_scale + 1) * (logits - unconditional)
            if logits_eos_inf:
                logits = logits.index_fill(1, torch.tensor(eos_ids[0]), -math.inf)
            predictions, rank = {}, {}
            for position in state.open_before(end):
                gumbel = noise(step, position) if noise else None
                token, probability = predict(logits[position], temperature, gumbel)
                predictions[position] = token, probability
                rank[position] = uniform(step, position) if uniform is not None else probability
                if confidence_eos_eot_inf and token in eos_ids:
                    rank[position] = -math.inf
            for position in sorted(rank, key=lambda p: (-rank[p], p))[:quota]:
                state.commit(position, predictions[position], step, Rule.QUOTA)
            step += 1
        if state.leftmost(eos_ids) is not None:
            break
    return state.sample(eos_ids, steps=step, forwards=step * (2 if cfg_scale > 0 else 1))


def generate_threshold(
    forward: Forward,
    prompt: Sequence[int],
    *,
    mask_id: int,
    eos_ids: Sequence[int],
    gen_length: int,
    block_length: int,
    threshold: float,
    temperature: float = 0.0,
    noise: Callable[[int], Tensor] | None = None,
) -> Sample:
    """Threshold decoding over a sliding window, without a cache.

    Each step looks at the first block_length open places before the end and commits those whose confidence is at least
    threshold, or the most confident one. The end is prompt + gen_length, or the place after the leftmost committed EOS.
    noise(position) -> [vocab] is the Gumbel noise of temperature > 0, the same at every step.
    """
    if (temperature > 0) != (noise is not None):
        raise ValueError(f"noise goes with a temperature above 0, got {temperature=}, {noise=}")
    end = len(prompt) + gen_length
    state = State(prompt, gen_length, mask_id)
    step = 0
    while window := state.open_before(end)[:block_length]:
        logits = forward(torch.tensor(state.ids)).float()
        predictions = {}
        for position in window:
            gumbel = noise(position) if noise else None
            predictions[position] = predict(logits[position], temperature, gumbel)
        for position, rule in passing(predictions, threshold).items():
            state.commit(position, predictions[position], step, rule)
        step += 1
        eos = state.leftmost(eos_ids)
        if eos is not None:
            end = eos + 1
    return state.sample(eos_ids, steps=step, forwards=step)


def predict(logits: Tensor, temperature: float, gumbel: Tensor | None) -> tuple[int, float]:
    """Token and its probability from one position's logits [vocab] fp32. Temperature moves the choice alone."""
    token = argmax(logits if gumbel is None else logits / temperature + gumbel)
    return token, float(logits.softmax(-1)[token])


def passing(predictions: dict[int, tuple[int, float]], threshold: float) -> dict[int, Rule]:
    """The positions of at least that confidence, or the most confident one; ties go to the lower position."""
    above = sorted(p for p in predictions if predictions[p][1] >= threshold)
    if above:
        return dict.fromkeys(above, Rule.THRESHOLD)
    return {min(predictions, key=lambda p: (-predictions[p][1], p)): Rule.MOST_CONFIDENT}


class State:
    """A sequence being decoded: its ids, which places are still open, and what is known of those that are not."""

    def __init__(self, prompt: Sequence[int], gen_length: int, mask_id: int):
        self.start = len(prompt)
        self.ids = [*prompt, *[mask_id] * gen_length]
        self.is_open = [False] * self.start + [True] * gen_length
        self.commit_step = [-1] * gen_length
        self.confidence = [math.nan] * gen_length
        self.rule = [Rule.NONE] * gen_length

    def open_before(self, end: int) -> list[int]:
        """Positions below `end` that nothing was committed to, left to right."""
        return [position for position in range(end) if self.is_open[position]]

    def commit(self, position: int, prediction: tuple[int, float], step: int, rule: Rule) -> None:
        self.ids[position], self.confidence[position - self.start] = prediction
        self.is_open[position] = False
        self.commit_step[position - self.start] = step
        self.rule[position - self.start] = rule

    def leftmost(self, eos_ids: Sequence[int]) -> int | None:
        """Position of the leftmost committed EOS."""
        places = range(self.start, len(self.ids))
        return next((p for p in places if not self.is_open[p] and self.ids[p] in eos_ids), None)

    def sample(self, eos_ids: Sequence[int], *, steps: int, forwards: int) -> Sample:
        eos = self.leftmost(eos_ids)
        tokens = self.ids[self.start : None if eos is None else eos + 1]
        return Sample(
            tokens=tokens,
            steps=steps,
            forwards=forwards,
            commit_step=self.commit_step,
            confidence=self.confidence,
            ids=self.ids,
            rule=self.rule,
        )
