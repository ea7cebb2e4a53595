"""Stop strings are found as soon as they stand in the text, and nowhere else."""

import numpy as np
import pytest

from fdllm_jax.engine import SHIPPED
from fdllm_jax.exchange import Report
from fdllm_jax.job import Job, Result, harvest, text_of
from fdllm_jax.settings import Settings
from fdllm_jax.stops import Stops
from fdllm_jax.tokenizer import Tokenizer

TEXT = "12 * 8 = 96 rolls, für 3 €.\n\nQuestion: Karl has 🙂 96 - 70 = 26 rolls left.\n#### 26"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED)


def report(
    tokens: np.ndarray, masked: np.ndarray, live: np.ndarray, step: int = 0, step_of: np.ndarray | None = None
) -> Report:
    """A report of which only these matter."""
    each = np.full(len(tokens), step, np.int32)
    known = np.array([([*row, True]).index(True) for row in masked.tolist()], np.int32)
    step_of = np.zeros(tokens.shape, np.int32) if step_of is None else step_of
    confidence = np.zeros(tokens.shape, np.float32)
    return Report(live, each, each, known, tokens, masked, step_of, np.zeros_like(step_of), confidence)


@pytest.mark.parametrize(
    "stop", [("Question:",), ("€.", "####"), ("🙂",), ("= 2", "left"), ("\n\n",), (" ",), ("no such",)]
)
@pytest.mark.parametrize("seed", range(8))
def test_a_stop_string_is_found_at_the_look_at_which_it_is_whole(
    tokenizer: Tokenizer, stop: tuple[str, ...], seed: int
) -> None:
    """In whatever order the tokens come and however many lie between two looks, as a search of the whole text does."""
    prompt, ids = [5, 6, 7], tokenizer.encode_raw(TEXT)
    rng = np.random.default_rng(seed)
    order = np.argsort(np.arange(len(ids)) + rng.uniform(0, (0, 3, 12, 200)[seed % 4], len(ids)))
    step_of = np.full((1, len(prompt) + len(ids)), -1, np.int32)
    step_of[0, len(prompt) + order] = np.sort(rng.integers(0, 12, len(ids)))
    job = Job(0, prompt, Settings(gen_length=len(ids), stop=stop))
    looks = np.unique([0, *rng.integers(1, 12, 4), 12])
    tokens = np.array([prompt + ids], np.int32)
    search, known = Stops.of(tokenizer, [job]), np.array([len(prompt)])
    assert search is not None
    for now in looks:
        masked = step_of >= now
        seen = report(tokens, masked, np.array([True]), step=now, step_of=step_of)
        expected = any(one in text_of(tokenizer, seen, 0, job)[1] for one in stop)
        assert search.found(seen, {0: job}, known, seen.known) == [0] * expected
        known = seen.known
        if expected:
            return
    assert stop == ("no such",)


def test_the_search_tells_slots_and_ends_apart(tokenizer: Tokenizer) -> None:
    """One that ended its text before its stop string, two with others' strings, one that is done, one with its own."""
    eos, text = tokenizer.eos_ids[0], tokenizer.encode_raw(" a: b")
    responses = [[eos, *text], [*text, eos], [*text, eos], [*text, eos], [*text, eos]]
    stops = [(":",), ("c:",), (), (":",), (":", "c")]
    jobs = {i: Job(i, [5], Settings(gen_length=len(text) + 3, stop=stop)) for i, stop in enumerate(stops)}
    tokens = np.array([[5, *ids, 0, 0, 0] for ids in responses], np.int32)
    masked = np.zeros(tokens.shape, np.bool_)
    masked[:, len(text) + 2] = True
    live = np.array([True, True, True, False, True])
    seen = report(tokens, masked, live)
    search = Stops.of(tokenizer, jobs.values())
    assert search is not None
    assert search.found(seen, jobs, np.ones(5, np.int64), seen.known) == [4]
    assert search.found(seen, jobs, seen.known, seen.known) == []
    assert Stops.of(tokenizer, [jobs[2]]) is None


def test_what_may_hold_a_byte_is_known_of_byte_level_vocabularies(tokenizer: Tokenizer) -> None:
    holds = tokenizer.holding({ord(":"), "é".encode()[-1]})
    pieces = tokenizer.pieces(range(tokenizer.size))
    assert all(holds[i] for i, piece in enumerate(pieces) if ":" in piece or "é" in piece)
    assert 0 < holds.sum() < len(holds) / 10


def test_bytes_that_are_no_character_end_a_text_at_the_replacement_character(tokenizer: Tokenizer) -> None:
    half, behind = tokenizer.encode_raw("3 €")[:-1], tokenizer.encode_raw(" 4")
    ids = [*half, *behind]
    job = Job(0, [5], Settings(gen_length=len(ids) + 1, stop=("\ufffd",)))
    tokens = np.array([[5, *ids, 0]], np.int32)
    search = Stops.of(tokenizer, [job])
    assert search is not None and "\ufffd" in tokenizer.decode(half)
    for count, found in ((len(half), []), (len(ids), [0])):  # until the next token it may become one
        masked = np.arange(tokens.shape[1])[None] > count
        seen = report(tokens, masked, masked.any(1))
        assert search.found(seen, {0: job}, np.ones(1, np.int64), seen.known) == found


PIECES = ["日本", "é", "😀", "a", "####", "\n", "\ufffd", " apples", "12", " = ", "née", "ñ"]


def ended_at_a_look(tokenizer: Tokenizer, ids: list[int], job: Job, rng: np.random.Generator) -> Result:
    """The result of a response of which 0 to 4 more tokens are known at each look."""
    search, known = Stops.of(tokenizer, [job]), np.array([len(job.prompt)])
    assert search is not None
    tokens = np.array([job.prompt + ids], np.int32)
    while True:
        now = min(int(known[0]) + int(rng.integers(0, 5)), tokens.shape[1])
        masked = np.arange(tokens.shape[1])[None] >= now
        seen = report(tokens, masked, masked.any(1), step=1)
        if not seen.live[0] or search.found(seen, {0: job}, known, seen.known):
            return harvest(tokenizer, seen, 0, job, 1.0)
        known = seen.known


@pytest.mark.parametrize("seed", range(150))
def test_a_text_ends_at_the_same_stop_string_however_often_one_looks(tokenizer: Tokenizer, seed: int) -> None:
    """Strings that overlap or hold one another, and characters and bytes of which a look sees half."""
    rng = np.random.default_rng(seed)
    ids = tokenizer.encode_raw("".join(rng.choice(PIECES, rng.integers(1, 13))))
    if rng.random() < 0.3:
        ids = [*rng.integers(0, 256, 8).tolist(), *ids]
    text = tokenizer.decode(ids)
    at = rng.integers(0, len(text), 3)
    stops = [text[i : i + n] for i, n in zip(at, rng.integers(1, 7, 3), strict=True)]
    job = Job(0, [5, 6], Settings(gen_length=len(ids), stop=(*stops, str(rng.choice(PIECES)))))
    results = [ended_at_a_look(tokenizer, ids, job, np.random.default_rng(look)) for look in range(6)]
    assert {(r.text, tuple(r.token_ids), r.stop_reason) for r in results} == {
        (results[0].text, tuple(results[0].token_ids), "stop")
    }
