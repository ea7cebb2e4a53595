"""What holds of every method whatever its settings, step by step: requests of random settings share three slots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fdllm_jax.decoding.loop import run
from fdllm_jax.decoding.methods import Method, method_of
from fdllm_jax.decoding.state import DecodeState, Request, Rule, admit, empty_state
from fdllm_jax.model import LLaDA
from fdllm_jax.settings import METHODS, Settings
from tests.decode import for_slot, load
from tests.reference.checkpoint import random_checkpoint

VOCAB, CAPACITY, SLOTS, LONGEST = 24, 18, 3, 9
MASK = VOCAB - 1
EOS_IDS = tuple(range(1, VOCAB - 1, 3))  # many, and among them what the model likes to predict
ROUNDING = 1e-5

BLOCK: dict[str, Any] = {"block_length": 4}
FLASH: dict[str, Any] = {**BLOCK, "mask_window": 6, "track_budget": 5}
# One compiled program each; what they do not fix of PER_REQUEST is drawn.
PROGRAMS = {
    "llada": Settings(method="llada", **BLOCK),
    "llada, guided": Settings(method="llada", **BLOCK, cfg_scale=1.0, remasking="random", confidence_eos_eot_inf=True),
    "threshold": Settings(method="threshold", **BLOCK),
    "fast-dllm-parallel": Settings(method="fast-dllm-parallel", **BLOCK),
    "fast-dllm-prefix, factor": Settings(method="fast-dllm-prefix", **BLOCK, factor=1.0),
    "fast-dllm-dual": Settings(method="fast-dllm-dual", **BLOCK),
    "flash-cache": Settings(method="flash-cache", **FLASH),
    "flash-dllm": Settings(method="flash-dllm", **FLASH, bonus=True),
    "flash-dllm, strict": Settings(method="flash-dllm", **FLASH, isolation="strict", order="position", bonus=True),
    "flash-dllm, cumulative": Settings(
        method="flash-dllm", **FLASH, acceptance="cumulative", skip_verify=True, verify_rows=9
    ),
    "onepass": Settings(method="flash-dllm-onepass", **FLASH),
    "onepass, strict": Settings(method="flash-dllm-onepass", **FLASH, isolation="strict", order="position"),
}
STOPS_AT_EOS = ("threshold", "flash-cache", "flash-dllm", "flash-dllm-onepass")  # others after an EOS's block


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    prompt: list[int]
    settings: Settings


@st.composite
def requests(draw: st.DrawFn, program: Settings) -> tuple[list[int], dict[str, Any]]:
    """A prompt, [MASK] and EOS ids among it, and numbers that make settings of the program of `program`."""
    gen_length = draw(st.just(LONGEST) | st.integers(1, LONGEST))
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CAPACITY - gen_length))
    share, low, high = st.floats(0.01, 1.0), st.floats(0.01, 0.2), st.floats(0.8, 1.0)
    drawn: dict[str, Any] = {"gen_length": gen_length, "seed": draw(st.integers(0, 9))}
    drawn["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.7]))
    options = METHODS[program.method]
    if program.factor is not None:
        drawn["factor"] = draw(st.floats(0.01, 4.0))
    elif "threshold" in options:
        drawn["threshold"] = draw(high | share)  # that leaves much to verify
    if "gamma" in options:
        drawn["gamma"] = draw(low | share)
    if "plain_threshold" in options:
        drawn["plain_threshold"] = draw(st.none() | low | share)
    if program.value("cfg_scale"):
        drawn["cfg_scale"] = draw(st.floats(0.1, 3.0))
    if "steps" in options:
        drawn["steps"] = draw(st.integers(-(-gen_length // program.block_length), gen_length + 2))
    if program.isolation == "strict" and drawn["temperature"] == 0:
        drawn["max_deviation"] = draw(st.none() | share)
    return prompt, drawn


class Decoder:
    """A program: one step of a method for three slots."""

    def __init__(self, model: LLaDA, program: Settings, passes: list[np.ndarray]):
        self.model, self.program, self.passes = model, program, passes
        self.method: Method = method_of(program, eos_ids=EOS_IDS, longest=LONGEST, noisy=True)
        self.graphdef, self.parameters = nnx.split(model)
        config, memory, dtype = model.config, self.method.memory, jnp.dtype(jnp.float32)
        sizes: dict[str, Any] = {"slots": SLOTS, "capacity": CAPACITY, "dtype": dtype}
        self.empty = jax.jit(lambda: empty_state(config, **sizes, memory=memory(SLOTS)))
        self.admit = jax.jit(lambda state, *what: admit(state, *what, memory(SLOTS), MASK))

    def put(self, state: DecodeState, slot: int, asked: Asked) -> DecodeState:
        row = np.zeros(CAPACITY, np.int32)
        row[: len(asked.prompt)] = asked.prompt
        return self.admit(state, *for_slot(state, slot, row, Request.of(len(asked.prompt), asked.settings)))

    def run(self, state: DecodeState, steps: int, ended: int = 1) -> DecodeState:
        model: dict[str, Any] = {"graphdef": self.graphdef, "method": self.method}
        return run(self.parameters, state, jnp.int32(steps), jnp.int32(ended), **model)

    def step(self, state: DecodeState) -> tuple[DecodeState, np.ndarray]:
        """The next state, and in how many passes each slot had rows."""
        self.passes.clear()
        state = jax.block_until_ready(self.run(state, 1))
        jax.effects_barrier()
        counts = np.zeros(SLOTS, int)
        for table in self.passes:
            np.add.at(counts, table[:, 0], table[:, 3] > 0)
        return state, counts


@pytest.fixture(scope="module")
def decoder_of(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Iterator[Callable[[Settings], Decoder]]:
    """Programs whose passes leave their block tables."""
    directory = tmp_path_factory.mktemp("checkpoint")
    shape: dict[str, Any] = {"d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "mlp_hidden_size": 32}
    model = load(random_checkpoint(directory, seed=3, vocab_size=VOCAB, **shape), kernels=kernels)
    passes: list[np.ndarray] = []
    call = LLaDA.__call__

    def recording(self: LLaDA, query: Any, cache: Any) -> Any:
        jax.debug.callback(lambda table: passes.append(np.asarray(table)), query.block_table)
        return call(self, query, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLaDA, "__call__", recording)
        yield lambda program: Decoder(model, program, passes)


def slots_of(state: DecodeState) -> list[DecodeState]:
    """Every slot's own state, of NumPy's arrays, its rows of the cache included."""
    by_slot = jax.tree.map(lambda x: x.reshape(SLOTS, CAPACITY, *x.shape[1:]), state.cache)
    host = jax.device_get(replace(state, cache=by_slot))
    return [jax.tree.map(lambda x, slot=slot: x[slot], host) for slot in range(SLOTS)]


def rules(slot: DecodeState, *which: Rule) -> np.ndarray:
    return np.isin(slot.trace.rule, which)


def new_end(end: Any, slot: DecodeState, committed: np.ndarray) -> int:
    """The end after these positions have been committed."""
    eos = np.flatnonzero(committed & np.isin(slot.tokens, EOS_IDS))
    return min([int(end), *(eos + 1).tolist()])


def assert_unchanged(before: DecodeState, after: DecodeState) -> None:
    jax.tree.map(np.testing.assert_array_equal, before, after)


def check_step(before: DecodeState, after: DecodeState, passes: int, settings: Settings) -> None:
    """A step of a live slot."""
    # The prompt, and what is behind the response, are old.
    new, old = np.asarray(before.masked & ~after.masked), ~before.masked
    assert new.any()
    assert not (after.masked & old).any()
    assert np.all(after.tokens[after.masked] == MASK)
    for name in ("step", "rule", "confidence"):
        np.testing.assert_array_equal(getattr(after.trace, name)[old], getattr(before.trace, name)[old])
    np.testing.assert_array_equal(after.tokens[old], before.tokens[old])
    jax.tree.map(np.testing.assert_array_equal, after.request, before.request)
    assert np.all(after.trace.step[new] == before.step) and np.all(after.trace.rule[new] != Rule.NONE)
    assert (after.step, after.forwards) == (before.step + 1, before.forwards + passes) and passes >= 1
    assert after.step <= settings.gen_length
    check_end(before, after, new, settings)
    check_levels(after, new, settings)


def check_end(before: DecodeState, after: DecodeState, new: np.ndarray, settings: Settings) -> None:
    """Nothing is committed at or behind an end that has moved."""
    position = np.arange(CAPACITY)
    if settings.method not in STOPS_AT_EOS:
        assert after.end == before.end
        block = (position - before.request.prompt_length) // settings.block_length
        assert len(set(block[new])) == 1
        response = (position >= before.request.prompt_length) & (position < before.end)
        ended = response & ~before.masked & np.isin(before.tokens, EOS_IDS)
        assert np.all(block[ended] >= block[new][0])
        return
    assert after.end == new_end(before.end, after, new)
    assert np.all(position[new] < before.end)
    verified, plain = new & rules(after, Rule.VERIFIED, Rule.BONUS), new & rules(after, Rule.PLAIN)
    assert np.all(position[verified] < new_end(before.end, after, new & ~verified & ~plain))
    assert np.all(position[plain] < new_end(before.end, after, new & ~plain))
    if settings.value("order") == "position":
        assert np.all(position[verified] < new_end(before.end, after, verified))
    still_open = after.masked & (position < after.end)
    assert after.live == still_open.any()


def check_levels(slot: DecodeState, new: np.ndarray, settings: Settings) -> None:
    """Each rule commits what reaches its level; the most confident token is committed where nothing does."""
    request, confidence = slot.request, slot.trace.confidence
    assert np.all((confidence[new] >= 0) & (confidence[new] <= 1 + ROUNDING))
    levels = {
        Rule.THRESHOLD: request.threshold,
        Rule.PLAIN: request.plain_threshold,
        Rule.BONUS: max(request.threshold, request.gamma),
    }
    verified = confidence[new & rules(slot, Rule.VERIFIED)]
    if settings.value("acceptance") == "agreement":
        levels[Rule.VERIFIED] = request.gamma
    elif len(verified):
        assert np.prod(verified) >= request.gamma - ROUNDING
    for rule, level in levels.items():
        assert np.all(confidence[new & rules(slot, rule)] >= level)
    assert np.sum(new & rules(slot, Rule.BONUS)) <= 1
    if np.any(new & rules(slot, Rule.MOST_CONFIDENT)):
        others = (Rule.MOST_CONFIDENT, Rule.THRESHOLD, Rule.FACTOR, Rule.PLAIN)
        assert np.sum(new & rules(slot, *others)) == 1


def check_finished(slot: DecodeState, settings: Settings) -> None:
    """Everything left of the end is committed, and what verify has changed is within its bound."""
    position, start = np.arange(CAPACITY), slot.request.prompt_length
    response = (position >= start) & (position < slot.end)
    if settings.method in STOPS_AT_EOS:
        assert not slot.masked[response].any()
    else:
        eos = np.flatnonzero(response & ~slot.masked & np.isin(slot.tokens, EOS_IDS))
        last = eos[0] if len(eos) else slot.end - 1
        block = (position - start) // settings.block_length
        assert np.array_equal(response & ~slot.masked, response & (block <= block[last]))
    if settings.method in ("flash-dllm", "flash-dllm-onepass"):
        product = np.prod(slot.trace.confidence[rules(slot, Rule.VERIFIED, Rule.BONUS)], dtype=np.float64)
        np.testing.assert_allclose(slot.memory.product, product, rtol=ROUNDING)
        if settings.max_deviation is not None:
            assert 1 - product <= settings.max_deviation + ROUNDING


def outcome(slot: DecodeState) -> tuple:
    """All but the cache and the memory."""
    trace = (slot.trace.step.tolist(), slot.trace.rule.tolist(), slot.trace.confidence.tolist())
    return slot.tokens.tolist(), slot.masked.tolist(), int(slot.end), int(slot.step), int(slot.forwards), *trace


def serve(decoder: Decoder, asked: Sequence[Asked]) -> list[DecodeState]:
    """Decode all requests, a finished slot taking the next one, and check every step; their final states."""
    state, serving, waiting = decoder.empty(), dict[int, int](), list(range(len(asked)))
    finished: dict[int, DecodeState] = {}
    while waiting or serving:
        for slot in range(SLOTS):
            if waiting and slot not in serving:
                serving[slot] = waiting.pop(0)
                state = decoder.put(state, slot, asked[serving[slot]])
        before = slots_of(state)
        state, passes = decoder.step(state)
        for slot, (old, now) in enumerate(zip(before, slots_of(state), strict=True)):
            if slot not in serving:
                assert not old.live and passes[slot] == 0
                assert_unchanged(old, now)
                continue
            check_step(old, now, int(passes[slot]), asked[serving[slot]].settings)
            if not now.live:
                finished[serving.pop(slot)] = now
    return [finished[index] for index in range(len(asked))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_step(decoder_of: Callable[[Settings], Decoder], name: str) -> None:
    """Of requests that are served together; each of them then gives the same alone, in another slot."""
    decoder = decoder_of(PROGRAMS[name])

    @examples(max_examples=8)
    @given(drawn=st.lists(requests(PROGRAMS[name]), min_size=2, max_size=5))
    def check(drawn: list[tuple[list[int], dict[str, Any]]]) -> None:
        asked = [Asked(prompt=prompt, settings=replace(PROGRAMS[name], **numbers)) for prompt, numbers in drawn]
        for index, (one, together) in enumerate(zip(asked, serve(decoder, asked), strict=True)):
            check_finished(together, one.settings)
            slot = (index + 1) % SLOTS
            alone = slots_of(decoder.run(decoder.put(decoder.empty(), slot, one), LONGEST))[slot]
            assert outcome(alone) == outcome(together)

    check()


@pytest.mark.parametrize(("ended", "most", "taken"), [(1, 8, 1), (2, 8, 3), (2, 2, 2), (3, 8, 5), (9, 8, 5)])
def test_run_goes_on_until_as_many_slots_have_finished_as_told(
    decoder_of: Callable[[Settings], Decoder], ended: int, most: int, taken: int
) -> None:
    """Of three slots one ends with the first step, one with the third, one with the fifth: there is no EOS."""
    program = replace(PROGRAMS["flash-cache"], threshold=1.0)
    decoder = decoder_of(program)
    decoder.method = method_of(program, eos_ids=())
    state = decoder.empty()
    for slot, gen_length in enumerate((1, 3, 5)):
        state = decoder.put(state, slot, Asked(prompt=[5, 6], settings=replace(program, gen_length=gen_length)))
    state = decoder.run(state, most, ended)
    assert state.step.tolist() == [1, min(3, taken), taken] and state.live.tolist() == [False, taken < 3, taken < 5]


def test_an_empty_slot_does_not_change(decoder_of: Callable[[Settings], Decoder]) -> None:
    decoder = decoder_of(PROGRAMS["flash-cache"])
    asked = Asked(prompt=[5, 6], settings=replace(PROGRAMS["flash-cache"], gen_length=2))
    before = decoder.put(decoder.empty(), 0, asked)
    unused = slots_of(before)[1:]
    for old, now in zip(unused, slots_of(decoder.step(before)[0])[1:], strict=True):
        assert_unchanged(old, now)
