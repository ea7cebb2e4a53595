"""Likelihoods of given texts: LLaDA's Monte-Carlo estimate, and whether greedy decoding would give them.

Source: LLaDA (arXiv 2502.09992), section 2.4 and appendix B. With l target tokens of which a uniformly drawn number k
is masked, each choice of k positions as likely as another,

    log p(target | prompt) >= E[ l / k * sum over masked i of log p(token i | prompt, unmasked tokens) ].
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.cache import allocate
from fdllm_jax.engine import CAPACITY_STEP, LLM
from fdllm_jax.model import LLaDA
from fdllm_jax.query import packed_query
from pallas_kernels.turns import RUNNING

SAMPLES = 128  # of the paper
ROWS = 4096  # of a pass: sequences of one capacity, side by side
LOGITS_AT_ONCE = 2**25  # logits (fp32) in memory at a time

Pair = tuple[Sequence[int], Sequence[int]]


class Likelihood(NamedTuple):
    """Of a target after a prompt.

    log_probability: the estimate of log p(target | prompt), in nats. is_greedy: whether decoding the target's length at
    temperature 0, in each step the token that the model is surest of, gives the target.
    """

    log_probability: float
    is_greedy: bool


class Sequences(NamedTuple):
    """Sequences of one pass, one a slot; those of empty slots have length 0.

    token: prompt and target. target: the target's own tokens. start: where the target begins. length: of both.
    """

    token: Int[np.ndarray | Array, "slots capacity"]
    target: Int[np.ndarray | Array, "slots width"]
    start: Int[np.ndarray | Array, "slots"]
    length: Int[np.ndarray | Array, "slots"]

    @classmethod
    def of(cls, pairs: Sequence[Pair], slots: int, capacity: int, width: int) -> Self:
        """The sequences of at most `slots` pairs."""
        token, target = np.zeros((slots, capacity), np.int32), np.zeros((slots, width), np.int32)
        start, length = np.zeros((2, slots), np.int32)
        for slot, (prompt, its) in enumerate(pairs):
            start[slot], length[slot] = len(prompt), len(prompt) + len(its)
            token[slot, : length[slot]] = [*prompt, *its]
            target[slot, : len(its)] = its
        return cls(token, target, start, length)


def likelihoods(
    llm: LLM, pairs: Iterable[Pair], *, samples: int = SAMPLES, seed: int = 0
) -> Iterator[tuple[int, Likelihood]]:
    """Yield the likelihood of each (prompt, target) pair of token ids with the pair's index, longest pairs first.

    samples: masks that are drawn for a target; equal ones are computed once. seed: of the masks, which depend on it and
    the target's length alone: a pair's result does not depend on the other pairs, and targets of one length are
    compared under the same masks. A prompt may be empty. Texts are encoded by `llm.tokenizer`.
    Raises ValueError before anything is computed if a pair cannot be served.
    """
    check_samples(samples)
    if not isinstance(seed, Integral) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"{seed=!r}: expected an integer of at least 0")
    pairs = _checked(llm, pairs)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (prompt, target) in enumerate(pairs):
        capacity = -(-(len(prompt) + len(target)) // CAPACITY_STEP) * CAPACITY_STEP
        groups.setdefault((capacity, 1 << (len(target) - 1).bit_length()), []).append(i)
    return (
        (i, likelihood)
        for (capacity, width), indices in sorted(groups.items(), reverse=True)
        for part in _parts(indices, _slots(capacity))
        for i, likelihood in zip(
            part, _together(llm, [pairs[i] for i in part], capacity, width, samples, seed), strict=True
        )
    )


def draw_masks(
    length: int, samples: int, seed: int
) -> tuple[Bool[np.ndarray, "masks length"], Int[np.ndarray, "masks"]]:
    """Masks over a target's positions, and how often each was drawn; `samples` in all.

    The number of masked positions is uniform over 1 to `length`, and spread evenly over the samples: the first is
    drawn, and the others follow at equal distances, past `length` from 1 on.
    """
    random = np.random.default_rng(seed)
    distance = np.floor(np.arange(samples) * length / samples + 0.5).astype(int)
    count = (random.integers(length) + distance) % length + 1
    rank = random.random((samples, length)).argsort(axis=1).argsort(axis=1)
    return np.unique(rank < count[:, None], axis=0, return_counts=True)


def check_samples(samples: Any) -> None:
    """Raise ValueError unless `samples` is a number of them."""
    if not isinstance(samples, Integral) or isinstance(samples, bool) or samples < 1:
        raise ValueError(f"{samples=!r}: expected an integer of at least 1")


def _checked(llm: LLM, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs as lists. Raises ValueError for what is none, and for those that cannot be served."""
    limit, faults, checked = llm.config.max_sequence_length, [], list(pairs)
    for i, pair in enumerate(checked):
        try:
            if not _is_pair(pair):
                raise ValueError(f"{pair!r:.80}: expected a list of token ids and another, of prompt and target")
            prompt, target = pair
            llm.tokenizer.check_ids([*prompt, *target])
            if not len(target):
                raise ValueError("empty target: give at least one token id")
            if len(prompt) + len(target) > limit:
                raise ValueError(
                    f"{len(prompt)} tokens of prompt and {len(target)} of target: more than the model's context, "
                    f"{limit}. Shorten the prompt"
                )
        except ValueError as error:
            faults.append(f"pair {i}: {error}")
    if faults:
        raise ValueError("; ".join(faults[:3]) + f"; and {len(faults) - 3} more" * (len(faults) > 3))
    return checked


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(ids, list | tuple | np.ndarray) for ids in pair)
        and all(isinstance(i, Integral) and not isinstance(i, bool) for ids in pair for i in ids)
    )


def _slots(capacity: int) -> int:
    return max(1, ROWS // capacity)


def _parts(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _together(llm: LLM, pairs: Sequence[Pair], capacity: int, width: int, samples: int, seed: int) -> list[Likelihood]:
    """The likelihoods of at most as many pairs as a pass has slots. width: of the longest target, or more."""
    shape, model = (_slots(capacity), capacity, width), (llm._graphdef, llm._parameters)
    with RUNNING:
        greedy = np.asarray(_is_greedy(*model, Sequences.of(pairs, *shape)))
    masks = [draw_masks(len(target), samples, seed) for _, target in pairs]
    found: list[list[float]] = [[] for _ in pairs]
    for part in _parts([(i, mask) for i, (each, _) in enumerate(masks) for mask in each], shape[0]):
        masked = np.zeros((shape[0], width), np.bool_)
        for slot, (_, mask) in enumerate(part):
            masked[slot, : len(mask)] = mask
        with RUNNING:
            of_tokens = np.asarray(
                _log_probability(*model, Sequences.of([pairs[i] for i, _ in part], *shape), masked), np.float64
            )
        for (i, mask), its in zip(part, of_tokens, strict=False):
            found[i].append(its[: len(mask)][mask].sum() * len(mask) / mask.sum())
    return [
        Likelihood(float(np.average(its, weights=times)), bool(is_greedy))
        for its, (_, times), is_greedy in zip(found, masks, greedy, strict=False)
    ]


@partial(jax.jit, static_argnums=0)
def _log_probability(
    graphdef: nnx.GraphDef, parameters: nnx.State, sequences: Sequences, masked: Bool[np.ndarray | Array, "slots width"]
) -> Float[Array, "slots width"]:
    """Of the targets' tokens where `masked`, in fp32, with all of those masked; elsewhere it means nothing."""
    model = nnx.merge(graphdef, parameters)
    hidden = _hidden(model, sequences, masked)

    def of_row(row: tuple[Array, Array]) -> Array:
        hidden, token = row
        logits = model.logits(hidden)
        return logits[token] - jax.nn.logsumexp(logits)

    rows = (hidden.reshape(-1, hidden.shape[-1]), jnp.asarray(sequences.target).reshape(-1))
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    return jax.lax.map(of_row, rows, batch_size=at_once).reshape(masked.shape)


@partial(jax.jit, static_argnums=0)
def _is_greedy(graphdef: nnx.GraphDef, parameters: nnx.State, sequences: Sequences) -> Bool[Array, "slots"]:
    """Whether greedy decoding gives the targets; ties go to the lower position and the lower id.

    A sequence is left at its first other token, so that all tokens decoded before are the target's.
    """
    model = nnx.merge(graphdef, parameters)
    target = jnp.asarray(sequences.target)
    slots, width = target.shape
    slot = jnp.arange(slots)

    def undecided(carry: tuple[Array, Array]) -> Array:
        masked, right = carry
        return jnp.any(masked & right[:, None])

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        masked, right = carry
        hidden = _hidden(model, sequences, masked)
        found = model.statistics(hidden.reshape(slots * width, -1))
        token, confidence = (x.reshape(slots, width) for x in (found.token, found.confidence))
        surest = jnp.argmax(jnp.where(masked, confidence, -1.0), axis=1)
        is_right = token[slot, surest] == target[slot, surest]
        return masked.at[slot, surest].set(False), right & (is_right | ~jnp.any(masked, axis=1))

    masked = jnp.arange(width)[None] < (sequences.length - sequences.start)[:, None]
    return jax.lax.while_loop(undecided, step, (masked, jnp.ones(slots, jnp.bool_)))[1]


def _hidden(
    model: LLaDA, sequences: Sequences, masked: Bool[np.ndarray | Array, "slots width"]
) -> Float[Array, "slots width d_model"]:
    """Activations of the targets' positions, from one pass over the sequences with the mask where `masked`."""
    token, _, start, length = map(jnp.asarray, sequences)
    slots, capacity = token.shape
    position = start[:, None] + jnp.arange(masked.shape[1])[None]
    masks = jnp.where(masked, position, capacity)
    token = token.at[jnp.arange(slots)[:, None], masks].set(model.config.mask_token_id, mode="drop")
    query, first = packed_query(token, length, rows=slots * capacity)
    cache = allocate(model.config, slots=slots, capacity=capacity, dtype=model.embedding[...].dtype)
    return model(query, cache).hidden[jnp.minimum(first[:, None] + position, slots * capacity - 1)]
