"""Likelihoods on the shipped checkpoint, against sums over all masks and a greedy loop with the PyTorch reference."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from fdllm_jax import LLM, Settings, likelihood
from fdllm_jax.engine import SHIPPED
from fdllm_jax.likelihood import Likelihood, Pair, draw_masks, likelihoods
from tests.reference.model import ReferenceLLaDA

QUESTION = "Tom has 12 apples. He buys 7 more. How many apples does Tom have?"


@pytest.fixture(autouse=True)
def small_passes() -> Iterator[None]:
    """Passes of four sequences of 64 tokens, so that targets need several, with empty slots in the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "ROWS", 4 * 64)
        yield


@pytest.fixture(scope="module")
def llm(kernels: str) -> LLM:
    return LLM(dtype="float32", kernels=kernels)


@pytest.fixture(scope="module")
def reference() -> ReferenceLLaDA:
    return ReferenceLLaDA.from_directory(SHIPPED, torch.float32)


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    return llm.tokenizer.encode_chat(QUESTION)


def all_of(llm: LLM, pairs: list[Pair], **options: int) -> list[Likelihood]:
    found = dict(likelihoods(llm, pairs, **options))
    assert found.keys() == set(range(len(pairs)))
    return [found[i] for i in range(len(pairs))]


def log_probabilities(reference: ReferenceLLaDA, mask_id: int, pair: Pair, mask: np.ndarray) -> np.ndarray:
    """Of the target's tokens where they are masked, all at once; 0 elsewhere."""
    prompt, target = pair
    ids = torch.tensor([*prompt, *(mask_id if masked else t for t, masked in zip(target, mask, strict=True))])
    logits = reference.sequence(ids)[len(prompt) :].double()
    return torch.log_softmax(logits, dim=-1)[range(len(target)), list(target)].numpy() * mask


def estimates(reference: ReferenceLLaDA, mask_id: int, pair: Pair) -> dict[tuple[bool, ...], float]:
    """Of each possible mask: the sum over its positions, divided by their share."""
    masks = [mask for mask in product((False, True), repeat=len(pair[1])) if any(mask)]
    return {
        mask: log_probabilities(reference, mask_id, pair, np.array(mask)).sum() * len(mask) / sum(mask)
        for mask in masks
    }


def test_the_estimate_is_of_the_masks_that_are_drawn_and_near_the_sum_over_all(llm, reference, prompt) -> None:
    """Each number of masked tokens is as likely as another, and so is each choice of them."""
    pair = (prompt, llm.tokenizer.encode_raw("12 + 7 "))
    length = len(pair[1])
    of_mask = estimates(reference, llm.tokenizer.mask_id, pair)
    by_count = [[of_mask[mask] for mask in of_mask if sum(mask) == count] for count in range(1, length + 1)]
    exact = float(np.mean([np.mean(values) for values in by_count]))
    few, many = (all_of(llm, [pair], samples=samples)[0].log_probability for samples in (5, 100_000))
    masks, times = draw_masks(length, 5, seed=0)
    drawn = np.average([of_mask[tuple(mask)] for mask in masks.tolist()], weights=times)
    assert length == 6 and abs(few - drawn) <= 1e-5 * abs(drawn)
    spread = np.sqrt(np.mean([np.var(values) for values in by_count]) / 100_000)  # the counts are spread evenly
    assert abs(many - exact) <= 4 * spread + 1e-5 * abs(exact) and 4 * spread < 0.01 * abs(exact)


def test_one_token_has_its_log_probability(llm, reference, prompt) -> None:
    pairs = [(prompt, [token]) for token in llm.tokenizer.encode_raw("12 #")]
    for pair, one, all_ in zip(pairs, all_of(llm, pairs, samples=1), all_of(llm, pairs), strict=True):
        expected = log_probabilities(reference, llm.tokenizer.mask_id, pair, np.array([True]))[0]
        assert one == all_ and abs(one.log_probability - expected) <= 1e-5 * abs(expected)


def test_a_probability_below_the_smallest_number_has_a_logarithm(prompt) -> None:
    llm = LLM(dtype="float32", kernels="xla")
    llm._parameters["head"].set_value(llm._parameters["head"].get_value() * 30)
    found = all_of(llm, [(prompt, [token]) for token in range(8)])
    assert all(-np.inf < likelihood.log_probability < -104 for likelihood in found)


@pytest.mark.parametrize(("length", "samples"), [(1, 7), (3, 1), (5, 128), (64, 128), (200, 128)])
def test_masks_are_spread_evenly(length: int, samples: int) -> None:
    drawn = [np.repeat(*draw_masks(length, samples, seed), axis=0) for seed in range(40)]
    counts = np.array([mask.sum(axis=1) for mask in drawn])
    assert counts.shape == (40, samples) and counts.min() >= 1 and counts.max() <= length
    for row in counts:
        each = np.bincount(row, minlength=length + 1)[1:]
        assert each.max() - each.min() <= 1
    share = np.mean([mask.mean(axis=0) for mask in drawn], axis=0)  # of samples in which a position is masked
    expected = (length + 1) / (2 * length)
    assert np.abs(share - expected).max() <= 5 * np.sqrt(expected * (1 - expected) / (40 * samples)) + 0.05


def test_a_pair_has_its_result_in_any_company_and_by_its_seed(llm, prompt) -> None:
    texts = ["12 + 7 ", "12 - 7 =", "$ 19 -", "9"]  # the last one of a shape of its own
    pairs = [(prompt[: len(prompt) - 5 * i], llm.tokenizer.encode_raw(text)) for i, text in enumerate(texts)]
    pairs.append(([], pairs[0][1]))
    together = all_of(llm, pairs, samples=9)
    assert all_of(llm, pairs[::-1], samples=9)[::-1] == together
    assert [all_of(llm, [pair], samples=9)[0] for pair in pairs] == together
    assert all_of(llm, pairs[:1], samples=9, seed=1) != together[:1]


def greedy(reference: ReferenceLLaDA, mask_id: int, prompt: list[int], length: int) -> tuple[list[int], int]:
    """Tokens decoded one at a time, the surest first, and the position of the last."""
    tokens, last = [mask_id] * length, 0
    while mask_id in tokens:
        logits = reference.sequence(torch.tensor([*prompt, *tokens]))[len(prompt) :]
        confidence, predicted = logits.softmax(-1).max(-1)
        last = int(torch.where(torch.tensor(tokens) == mask_id, confidence, -1.0).argmax())
        tokens[last] = int(predicted[last])
    return tokens, last


def test_greedy_is_what_decoding_one_token_a_step_gives(llm, reference, prompt) -> None:
    pairs, expected, lengths = [], [], (1, 5, 8)
    settings = [Settings(method="llada", gen_length=length, block_length=8) for length in lengths]
    for length, decoded in zip(lengths, llm.generate([prompt] * 3, settings), strict=True):
        tokens, last = greedy(reference, llm.tokenizer.mask_id, prompt, length)
        assert decoded.token_ids == tokens[: len(decoded.token_ids)]
        for at in (None, 0, last):
            changed = [token + (i == at) for i, token in enumerate(tokens)]
            pairs.append((prompt, changed))
            expected.append(at is None)
    assert [likelihood.is_greedy for likelihood in all_of(llm, pairs, samples=1)] == expected


def test_pairs_that_cannot_be_served_are_refused_together(llm) -> None:
    bad = [([1], []), ([1], [2]), ([llm.tokenizer.mask_id], [1]), ([1] * 4000, [1] * 97)]
    with pytest.raises(ValueError) as raised:
        likelihoods(llm, bad)
    message = str(raised.value)
    assert "pair 0: empty target" in message and "pair 1" not in message and "pair 2: these ids" in message
    assert "pair 3: 4000 tokens of prompt and 97 of target: more than the model's context, 4096" in message
    with pytest.raises(ValueError, match="seed=-1: expected an integer of at least 0"):
        likelihoods(llm, [([1], [2])], seed=-1)
    with pytest.raises(ValueError, match="samples=0: expected an integer of at least 1"):
        likelihoods(llm, [], samples=0)
