"""The engine on the shipped checkpoint: parity with the PyTorch reference, batches, refills, accounting, refusals."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from fdllm_jax import LLM, Refusal, Result, Settings
from fdllm_jax.decoding import passes
from fdllm_jax.engine import SHIPPED
from fdllm_jax.job import Snapshot
from tests.reference.model import ReferenceLLaDA
from tests.reference.sampler import generate_llada, generate_threshold

QUESTIONS = [
    "Tom has 12 apples. He buys 7 more. How many apples does Tom have?",
    "Lena has 4 boxes with 6 pens in each. She gives away 5 pens. How many pens are left?",
    "A ticket costs $8.",
]
SHORT = Settings(method="llada", gen_length=40, block_length=8, steps=20)
THRESHOLD = Settings(method="threshold", gen_length=40)


@pytest.fixture(scope="module")
def llm(kernels: str) -> LLM:
    """Three slots of one capacity: every test below shares the compiled programs."""
    return LLM(slots=3, capacity=128, dtype="float32", kernels=kernels)


@pytest.fixture(scope="module")
def reference() -> ReferenceLLaDA:
    return ReferenceLLaDA.from_directory(SHIPPED, torch.float32)


@pytest.mark.parametrize("settings", [SHORT, THRESHOLD], ids=["llada", "threshold"])
def test_ragged_batch_equals_reference(llm: LLM, reference: ReferenceLLaDA, settings: Settings) -> None:
    common = {"mask_id": llm.tokenizer.mask_id, "eos_ids": llm.tokenizer.eos_ids}
    for result in llm.generate(QUESTIONS, settings):
        lengths = {"gen_length": settings.gen_length, "block_length": settings.block_length}
        if settings.method == "llada":
            sample = generate_llada(
                reference.sequence, result.prompt_ids, steps=settings.value("steps"), **lengths, **common
            )
        else:
            sample = generate_threshold(reference.sequence, result.prompt_ids, threshold=0.9, **lengths, **common)
        assert result.token_ids == sample.tokens
        assert (result.steps, result.forwards) == (sample.steps, sample.forwards)
        count = len(sample.tokens)
        confidence = np.array(sample.confidence[:count])
        np.testing.assert_allclose(result.confidence_of, confidence, rtol=1e-3)
        # Where confidences are 1 but for rounding, which of them goes first is rounding too.
        differs = np.array(result.step_of) != np.array(sample.commit_step[:count])
        assert np.all(confidence[differs] > 1 - 1e-5)


@pytest.mark.parametrize("settings", [SHORT, THRESHOLD], ids=["llada", "threshold"])
def test_batch_refills_and_alone_give_the_same_text(llm: LLM, settings: Settings) -> None:
    """Seven requests through three slots, of different lengths, so that slots are refilled at different times."""
    settings = replace(settings, temperature=0.5)
    questions = [f"{QUESTIONS[i % 3]} {'Think. ' * (i % 4)}" for i in range(7)]
    each = [replace(settings, gen_length=40 - 3 * i, seed=i) for i in range(7)]
    together = llm.generate(questions, each)
    assert [r.index for r in together] == list(range(7))
    for question, own, result in zip(questions, each, together, strict=True):
        alone = llm.generate(question, own)[0]
        assert alone.token_ids == result.token_ids
        assert alone.confidence_of == result.confidence_of
        assert alone.steps == result.steps


def test_one_seed_for_all_gives_every_prompt_its_own(llm: LLM) -> None:
    settings = replace(SHORT, temperature=1.0, seed=2**32 - 2)
    results = llm.generate([QUESTIONS[0]] * 3, settings)
    assert [r.settings.seed for r in results] == [2**32 - 2, 2**32 - 1, 0]
    assert len({r.text for r in results}) > 1
    again = llm.generate([QUESTIONS[0]] * 3, settings)
    assert [r.text for r in again] == [r.text for r in results]


def test_what_is_compiled_ahead_is_not_compiled_again() -> None:
    llm, settings = LLM(slots=2), [Settings(method="threshold", gen_length=8), Settings(method="llada", gen_length=8)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: llm.compile(["one", "two"], one), settings))
    before = llm.compile_seconds
    assert before > 0
    for one in settings:
        assert len(llm.generate(["three"], one)) == 1
    assert llm.compile_seconds == before


def test_a_narrower_pass_for_shorter_prompts_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_PACKED_ROWS", 16)
    prompts, settings = [*QUESTIONS, " ".join(4 * QUESTIONS)], Settings(method="threshold", gen_length=16)
    llm, found = LLM(slots=2, dtype="float32", kernels="xla"), []
    for worth in (passes.WORTH, 1):
        monkeypatch.setattr(passes, "WORTH", worth)
        results = llm.generate(prompts, settings)
        found.append([(r.token_ids, r.step_of, r.forwards) for r in results])
    wide, narrow = (program.start().narrow for program in llm._programs.values())
    *short, long = (len(result.prompt_ids) + 16 for result in results)
    assert wide is None and max(short) <= narrow < long
    assert found[0] == found[1]


def test_some_with_temperature_and_some_without_share_a_batch(llm: LLM) -> None:
    """Those without draw nothing, and those with the same as alone."""
    common = {"method": "threshold", "gen_length": 24, "threshold": 0.2, "seed": 3}
    each = [Settings(**common, temperature=temperature) for temperature in (0.0, 3.0)]
    together = llm.generate(["How many?", "How many?"], each)
    alone = [llm.generate(["How many?"], one)[0] for one in each]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert together[0].token_ids != together[1].token_ids


@pytest.mark.parametrize("longest_first", [False, True])
def test_a_stream_yields_what_generate_returns(llm: LLM, longest_first: bool) -> None:
    """In the order of finishing, through fewer slots than prompts."""
    prompts = [[5] * n for n in (3, 20, 1, 60, 7, 88, 2, 30, 4)]
    expected = llm.generate(prompts, SHORT)
    found = list(llm.stream(prompts, SHORT, longest_first=longest_first))
    assert all(isinstance(one, Result) for one in found)
    assert sorted(one.index for one in found) == list(range(len(prompts)))
    assert {one.index: one.token_ids for one in found} == {one.index: one.token_ids for one in expected}
    assert [one.index for one in found] != list(range(len(prompts)))


def test_a_stream_refuses_alone_what_cannot_be_served(llm: LLM) -> None:
    mask = llm.tokenizer.mask_id
    prompts: list[list[int]] = [[5, 6], [5] * 89, [7], [mask], []]
    found = list(llm.stream(prompts, SHORT))
    refused, served = found[:3], found[3:]
    assert [one.index for one in refused] == [1, 3, 4] and all(isinstance(one, Refusal) for one in refused)
    reasons = [one.reason for one in refused if isinstance(one, Refusal)]
    assert reasons[0].startswith("89 tokens") and "mask" in reasons[1] and "empty prompt" in reasons[2]
    assert sorted(one.index for one in served) == [0, 2]
    tokens = {one.index: one.token_ids for one in served if isinstance(one, Result)}
    assert tokens[0] == llm.generate([prompts[0]], SHORT)[0].token_ids
    assert [one.index for one in llm.stream([[mask]], SHORT)] == [0]
    with pytest.raises(ValueError, match="no prompts"):
        llm.stream([], SHORT)  # before anything is asked of the iterator


def test_a_stream_that_is_left_leaves_the_engine_as_it_was(llm: LLM) -> None:
    prompts = [[5] * n for n in (3, 20, 1, 60)]
    first = next(iter(llm.stream(prompts, SHORT)))
    again = llm.generate(prompts, SHORT)[first.index]
    assert isinstance(first, Result) and first.token_ids == again.token_ids


def test_generated_tokens_end_with_the_first_eos(llm: LLM) -> None:
    result = llm.generate(QUESTIONS[0], Settings(method="llada", gen_length=64))[0]
    assert result.stop_reason == "eos"
    assert result.token_ids[-1] in llm.tokenizer.eos_ids
    assert not set(result.token_ids[:-1]) & set(llm.tokenizer.eos_ids)
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert result.steps < 64  # stopped early
    assert result.tokens_per_step == len(result.token_ids) / result.steps


@pytest.mark.parametrize(
    "settings",
    [Settings(gen_length=64), Settings(method="llada", gen_length=64), replace(THRESHOLD, gen_length=64)],
    ids=lambda settings: settings.method,
)
def test_stop_string_ends_the_text_and_the_work(llm: LLM, settings: Settings) -> None:
    full = llm.generate(QUESTIONS[1], settings)[0]
    stopped = llm.generate([QUESTIONS[1], QUESTIONS[0]], replace(settings, stop=("####", "never")))
    for result in stopped:
        assert result.stop_reason == "stop"
        assert "####" not in result.text
    assert full.text.startswith(stopped[0].text) and full.text[len(stopped[0].text) :].startswith("####")
    assert stopped[0].steps <= full.steps
    kept = stopped[0].token_ids
    assert llm.tokenizer.decode(kept).startswith(stopped[0].text)
    assert len(llm.tokenizer.decode(kept[:-1])) < len(stopped[0].text)


def test_watch_sees_every_step(llm: LLM) -> None:
    seen: list[Snapshot] = []
    result = llm.generate(QUESTIONS[0], SHORT, watch=seen.extend)[0]
    counts = [int(s.committed.sum()) for s in seen]
    assert len(seen) == result.steps and counts == sorted(counts) and counts[0] == 2
    last = seen[-1].tokens[: len(result.token_ids)].tolist()
    assert last == result.token_ids
    assert llm.generate(QUESTIONS[0], SHORT)[0].token_ids == result.token_ids


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    by_text = llm.generate(QUESTIONS[0], SHORT)[0]
    by_ids = llm.generate([by_text.prompt_ids], SHORT)[0]
    assert by_ids.token_ids == by_text.token_ids
    raw = llm.generate("def f(x):", SHORT, raw=True)[0]
    assert raw.prompt_ids == llm.tokenizer.encode_raw("def f(x):")


def test_reserved_text_in_a_prompt_is_text(llm: LLM) -> None:
    result = llm.generate("What does <|mdm_mask|> mean?", SHORT)[0]
    assert llm.tokenizer.mask_id not in result.prompt_ids


def test_longest_prompt_fits_and_one_more_does_not(llm: LLM) -> None:
    ids = [5] * (128 - 40)
    assert len(llm.generate([ids, [7]], SHORT)) == 2
    with pytest.raises(
        ValueError, match=r"prompt 1: 89 tokens, with gen_length=40 129 in all.*capacity of a slot, 128"
    ):
        llm.generate([[7], [*ids, 5]], SHORT)


def test_context_is_checked_on_the_true_total(llm: LLM) -> None:
    free = LLM(dtype="float32")
    limit = free.config.max_sequence_length
    with pytest.raises(ValueError, match=f"{limit + 1} in all: more than the model's context, {limit}"):
        free.generate([[5] * (limit - 39)], SHORT)


def test_bad_requests_are_refused(llm: LLM) -> None:
    mask = llm.tokenizer.mask_id
    with pytest.raises(ValueError, match=r"prompt 1: .*mask"):
        llm.generate([[5, 6], [5, mask]], SHORT)
    with pytest.raises(ValueError, match="empty prompt"):
        llm.generate("", SHORT)
    with pytest.raises(ValueError, match="no prompts"):
        llm.generate([], SHORT)
    with pytest.raises(ValueError, match="2 settings for 1 prompts"):
        llm.generate("a", [SHORT, SHORT])
    with pytest.raises(ValueError, match=r"prompts 0 and 1 differ in .*method"):
        llm.generate(["a", "b"], [SHORT, THRESHOLD])
    with pytest.raises(ValueError, match="prompts 0 and 1 differ in block_length, cfg_scale"):
        llm.generate(["a", "b"], [SHORT, replace(SHORT, block_length=10, cfg_scale=1.0)])
    with pytest.raises(ValueError, match=r"track_layers=\(1, 8\): the model has the layers 0 to 7"):
        llm.generate("a", Settings(gen_length=8, track_layers=(1, 8)))
    with pytest.raises(ValueError, match="track_budget=129 is more than a slot holds: use at most 128"):
        llm.generate("a", Settings(gen_length=8, track_budget=129))
    with pytest.raises(ValueError, match="mask_window=129 is more than a slot holds: use at most 128"):
        llm.generate("a", Settings(gen_length=8, mask_window=129))
    with pytest.raises(ValueError, match="verify_rows=1000000000 are more than can be filled: use at most 160"):
        llm.generate("a", Settings(gen_length=8, verify_rows=10**9))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="kernels='pallas' needs an NVIDIA GPU, and JAX runs on cpu"):
            LLM(kernels="pallas")
    for bad in ({"slots": 0}, {"capacity": -1}, {"capacity": 10**6}, {"dtype": "int8"}, {"kernels": "magic"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LLM(**bad)


WRONG_TYPES = """
import numpy as np
from fdllm_jax import LLM, Settings
from fdllm_jax.likelihood import likelihoods
llm, few = LLM(), Settings(gen_length=2)
assert llm.generate([np.array([5, 6])], few)[0].prompt_ids == llm.generate(((5, 6),), few)[0].prompt_ids == [5, 6]
prompts = [None, 123, {"a": 1}, {"a"}, b"hi", [5, 6, 7], np.array([5, 6, 7]), np.array(3), [b"hi"], ["a", 5],
           [[5.0, 6.5]], [[True]], [[[5]]], [{"role": "user", "content": "hi"}]]
calls = [lambda p=p: llm.generate(p, few) for p in prompts]
calls += [lambda s=s: llm.generate("a", s) for s in ({"gen_length": 5}, 5, [None], "llada")]
calls += [lambda k=k: LLM(**k) for k in ({"slots": "2"}, {"slots": 2.0}, {"slots": True}, {"capacity": "x"},
                                             {"slots": np.array([1, 2])})]
calls += [lambda: Settings(method=["llada"]), lambda: Settings.preset(["fast"])]
calls += [lambda p=p: likelihoods(llm, [p]) for p in (("a", "b"), ([1], [2], [3]), ([1.0], [2]), 5)]
calls += [lambda s=s: likelihoods(llm, [([1], [2])], seed=s) for s in ("a", None, 0.5)]
assert len(list(likelihoods(llm, (([5], [i]) for i in (6, 7)), samples=1))) == 2
assert LLM(slots=np.int64(2)).slots == 2
for call in calls:
    try:
        call()
    except ValueError as error:
        assert "expected" in str(error), error
    else:
        raise AssertionError("accepted")
try:
    LLM(slots=10**9).generate("a", few)
except ValueError as error:
    assert "use fewer slots" in str(error), error
"""


def test_wrong_types_are_refused_by_name() -> None:
    """In a process of its own: here the shape annotations' checker would refuse them first."""
    subprocess.run([sys.executable, "-c", WRONG_TYPES], check=True)
