"""Fast-dLLM of one sequence, in plain Python (arXiv 2505.22618): blocks decoded in parallel, with and without a cache.

K is cached rotated; positions are absolute, so that this is the same.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from .cached_model import CachedForward, Row
from .sampler import Rule, Sample, State, passing, predict


def factor_prefix(confidences: Sequence[float], factor: float) -> int:
    """How many of the confidences, sorted in descending order, to commit: at least 1.

    The longest prefix whose every n-th confidence c has (n + 1)(1 - c) <= factor.
    """
    count = 0
    for n, confidence in enumerate(confidences, start=1):
        if (n + 1) * (1 - confidence) > factor:
            break
        count = n
    return max(1, count)


def generate_fast_dllm(
    forward: CachedForward,
    prompt: Sequence[int],
    *,
    mask_id: int,
    eos_ids: Sequence[int],
    gen_length: int,
    block_length: int,
    cache: str,
    threshold: float | None = None,
    factor: float | None = None,
    temperature: float = 0.0,
    noise: Callable[[int], Tensor] | None = None,
) -> Sample:
    """Blocks of block_length places (the last may be shorter), each decoded in full before the next.

    cache: what a pass computes anew. "none": everything. "prefix": everything at a block's first step, then the block
    and what follows it. "dual": everything at a block's first step, then the block alone. Each step commits places of
    the block: those of confidence >= threshold or the most confident one, or by `factor_prefix` of factor. Ends after
    the block in which an EOS was committed. noise(position) -> [vocab] is the Gumbel noise of temperature > 0.
    """
    if cache not in ("none", "prefix", "dual"):
        raise ValueError(f"{cache=} is none of none, prefix, dual")
    if (threshold is None) == (factor is None) or (factor is not None and factor <= 0):
        raise ValueError(f"either threshold or a factor above 0 is needed, got {threshold=}, {factor=}")
    if (temperature > 0) != (noise is not None):
        raise ValueError(f"noise goes with a temperature above 0, got {temperature=}, {noise=}")
    state = State(prompt, gen_length, mask_id)
    total, step = len(state.ids), 0
    for start in range(len(prompt), total, block_length):
        end = min(start + block_length, total)
        everything, first = range(total), True
        later = {"none": everything, "prefix": range(start, total), "dual": range(start, end)}[cache]
        while window := state.open_before(end):
            queried = everything if first else later
            rows = [Row(state.ids[p], p) for p in queried]
            logits = forward(rows, total, wanted=[queried.index(p) for p in window]).logits.float()
            predictions = {}
            for index, position in enumerate(window):
                gumbel = noise(position) if noise else None
                predictions[position] = predict(logits[index], temperature, gumbel)
            committed = _by_factor(predictions, factor) if factor else passing(predictions, threshold)
            for position, rule in committed.items():
                state.commit(position, predictions[position], step, rule)
            step, first = step + 1, False
        if state.leftmost(eos_ids) is not None:
            break
    return state.sample(eos_ids, steps=step, forwards=step)


def _by_factor(predictions: dict[int, tuple[int, float]], factor: float) -> dict[int, Rule]:
    ranked = sorted(predictions, key=lambda p: (-predictions[p][1], p))
    confidences = [predictions[p][1] for p in ranked]
    if 2 * (1 - confidences[0]) > factor:
        return {ranked[0]: Rule.MOST_CONFIDENT}
    return dict.fromkeys(ranked[: factor_prefix(confidences, factor)], Rule.FACTOR)
