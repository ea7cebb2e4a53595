"""Rungs 2 to 9 of the exactness ladder: our decoders against one another and against plain forwards.

`test_exactness.py` compares each of them, token for token, with its PyTorch reference.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fdllm_jax.cache import KVCache, allocate
from fdllm_jax.decoding import passes
from fdllm_jax.decoding.loop import run
from fdllm_jax.decoding.methods import method_of
from fdllm_jax.decoding.state import DecodeState, Rule
from fdllm_jax.decoding.verify import CONTEXT, DRAFT_VIEW, EMPTY, MASK_VIEW, PLAIN_VIEW, visibility
from fdllm_jax.model import LLaDA
from fdllm_jax.query import Query, packed_query, partial_query
from fdllm_jax.settings import METHODS, Isolation, Settings
from pallas_kernels import Visibility
from pallas_kernels.verify_attention import DRAFT, PRIVATE
from tests.decode import decode, empty, load, put, response
from tests.reference.checkpoint import random_checkpoint
from tests.reference.model import ReferenceLLaDA

VOCAB, CAPACITY, SLOTS = 40, 32, 4
MASK = VOCAB - 1
EOS_IDS = (VOCAB - 2, VOCAB - 3, *range(4))  # six ids of forty end a text, so that many end early

SMALL: dict[str, Any] = {"gen_length": 15, "block_length": 5, "mask_window": 8, "track_budget": 6}
WIDE: dict[str, Any] = SMALL | {"mask_window": CAPACITY, "track_budget": CAPACITY}  # a step computes everything
SURE: dict[str, Any] = {"threshold": 1e-6}  # every prediction is committed: a block takes one step
NUMBERS: list[dict[str, Any]] = [{}, {"threshold": 0.4}, {"threshold": 0.4, "temperature": 0.8, "seed": 9}]
VERIFYING: dict[str, Any] = SMALL | {"threshold": 0.6, "gamma": 0.05}


class Forward(NamedTuple):
    """A model's passes outside the decoders.

    hidden(query, cache) -> activations and the cache; prefilled(tokens [slots, capacity], length [slots]) -> a cache.
    """

    hidden: Callable[[Query, KVCache], tuple[jax.Array, KVCache]]
    prefilled: Callable[[jax.Array, jax.Array], KVCache]
    logits: Callable[[jax.Array], jax.Array]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Checkpoints of a number of layers; their heads have 16 dimensions, which the kernels can take."""
    directory = tmp_path_factory.mktemp("checkpoints")
    shape: dict[str, Any] = {"d_model": 32, "n_heads": 2, "n_kv_heads": 1}
    return lambda n_layers: random_checkpoint(
        directory / str(n_layers), seed=7, vocab_size=VOCAB, n_layers=n_layers, mlp_hidden_size=48, **shape
    )


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[int], Path], kernels: str) -> LLaDA:
    """Two layers: what a draft leaks through one reaches the other."""
    return load(checkpoint(2), kernels=kernels)


@pytest.fixture
def several_packed_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes over whole sequences that hold about two of them."""
    monkeypatch.setattr(passes, "MOST_PACKED_ROWS", 48)
    run.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    yield
    run.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Query, KVCache, np.ndarray]]:
    """The model's passes, in programs that are traced from here on: the query, the cache before, and activations."""
    record: list[tuple[Query, KVCache, np.ndarray]] = []
    call = LLaDA.__call__

    def recording(self: LLaDA, query: Query, cache: KVCache) -> Any:
        output = call(self, query, cache)
        # A callback's arrays are the CPU's.
        jax.debug.callback(
            lambda *arrays: record.append(jax.device_put(arrays, jax.devices()[0])), query, cache, output.hidden
        )
        return output

    monkeypatch.setattr(LLaDA, "__call__", recording)
    return record


def forward_of(model: LLaDA) -> Forward:
    graphdef, parameters = nnx.split(model)

    @jax.jit
    def hidden(parameters: nnx.State, query: Query, cache: KVCache) -> tuple[jax.Array, KVCache]:
        output = nnx.merge(graphdef, parameters)(query, cache)
        return output.hidden, output.cache

    @jax.jit
    def prefilled(parameters: nnx.State, tokens: jax.Array, length: jax.Array) -> KVCache:
        slots, capacity = tokens.shape
        cache = allocate(model.config, slots=slots, capacity=capacity, dtype=jnp.dtype(jnp.float32))
        query, _ = packed_query(tokens, length, rows=slots * capacity)
        return nnx.merge(graphdef, parameters)(query, cache).cache

    return Forward(
        lambda query, cache: hidden(parameters, query, cache),
        lambda tokens, length: prefilled(parameters, tokens, length),
        model.logits,
    )


def prompts(seed: int) -> list[list[int]]:
    """Ragged prompts: one token, one that fills the capacity but for the response, and some with [MASK] and EOS."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in (1, CAPACITY - 15, 6, 11)]


def start(model: LLaDA, settings: Settings, seed: int) -> DecodeState:
    state = empty(model, SLOTS, CAPACITY, settings)
    for slot, prompt in enumerate(prompts(seed)):
        state = put(model, state, slot, prompt, settings)
    return state


def decoded(model: LLaDA, settings: Settings, seed: int, eos_ids: tuple[int, ...] = EOS_IDS) -> DecodeState:
    return decode(model, start(model, settings, seed), settings, eos_ids)


def assert_same(one: DecodeState, other: DecodeState, *, but: tuple[str, ...] = ()) -> None:
    """Tokens, steps and rules (those not in `but`) are equal, and confidences but for rounding."""
    for slot in range(SLOTS):
        a, b = response(one, slot), response(other, slot)
        np.testing.assert_allclose(a.pop("confidence"), b.pop("confidence"), rtol=1e-4)
        assert {name: a[name] for name in a if name not in but} == {name: b[name] for name in b if name not in but}
    assert np.array_equal(one.step, other.step)


# Rung 2: full refresh in every step equals no cache


def forgetting(model: LLaDA, settings: Settings, seed: int) -> DecodeState:
    """Decoded with noise in place of the cache at the start of every step."""
    graphdef, parameters = nnx.split(model)
    method, rng = method_of(settings, eos_ids=EOS_IDS), np.random.default_rng(seed)
    state = start(model, settings, seed)
    while bool(jnp.any(state.live)):
        noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 9, x.shape), x.dtype), state.cache)
        state = run(parameters, replace(state, cache=noise), jnp.int32(1), graphdef=graphdef, method=method)
    return state


@pytest.mark.parametrize(
    "settings",
    [
        Settings(method="llada", gen_length=14, block_length=4, steps=7),
        Settings(method="threshold", gen_length=15, block_length=5, threshold=0.6),
        Settings(method="fast-dllm-parallel", gen_length=14, block_length=4, threshold=0.6),
        Settings(method="flash-cache", threshold=0.6, **WIDE),
        Settings(method="flash-dllm", **(VERIFYING | WIDE)),
        Settings(method="flash-dllm-onepass", isolation="strict", **(VERIFYING | WIDE)),
    ],
    ids=lambda settings: settings.method,
)
def test_what_is_computed_anew_owes_nothing_to_the_cache(model: LLaDA, settings: Settings) -> None:
    for seed in range(2):
        kept, forgotten = decoded(model, settings, seed), forgetting(model, settings, seed)
        assert [response(forgotten, slot) for slot in range(SLOTS)] == [response(kept, slot) for slot in range(SLOTS)]


def test_a_small_budget_relies_on_the_cache(model: LLaDA) -> None:
    """The test above can fail."""
    settings = Settings(method="flash-cache", **SMALL)
    kept, forgotten = decoded(model, settings, 0), forgetting(model, settings, 0)
    assert not np.array_equal(kept.tokens, forgotten.tokens)


def test_one_step_a_block_is_the_same_with_every_cache_of_fast_dllm(model: LLaDA) -> None:
    """Each block's only step computes everything."""
    for seed in range(2):
        states = {
            cache: decoded(model, Settings(method=f"fast-dllm-{cache}", gen_length=14, block_length=4, **SURE), seed)
            for cache in ("parallel", "prefix", "dual")
        }
        assert int(states["parallel"].step.max()) <= 4
        assert_same(states["prefix"], states["parallel"])
        assert_same(states["dual"], states["parallel"])


def test_samplers_without_a_cache_agree_on_one_block(model: LLaDA) -> None:
    """A block of the response's length is a decode window of that length; one token a step is a threshold of 1."""
    lengths = {"gen_length": 15, "block_length": 20}
    for seed in range(2):

        def of(seed: int = seed, **settings: Any) -> DecodeState:
            return decoded(model, Settings(**lengths, **settings), seed, eos_ids=())

        assert_same(of(method="fast-dllm-parallel", threshold=0.4), of(method="threshold", threshold=0.4))
        assert_same(of(method="llada"), of(method="threshold", threshold=1.0), but=("rule",))


# Rung 3: budgets that cover everything


def test_flash_cache_that_computes_everything_equals_threshold(model: LLaDA) -> None:
    lengths = {name: WIDE[name] for name in ("gen_length", "block_length")}
    for seed, numbers in enumerate(NUMBERS):
        cached = decoded(model, Settings(method="flash-cache", **WIDE, **numbers), seed)
        plain = decoded(model, Settings(method="threshold", **lengths, **numbers), seed)
        assert_same(cached, plain)
        assert np.array_equal(cached.forwards, plain.forwards)


# Rung 4: nothing is accepted


@pytest.mark.parametrize("isolation", ["paper", "strict"])
def test_flash_dllm_that_accepts_nothing_equals_flash_cache(model: LLaDA, isolation: str) -> None:
    for seed, numbers in enumerate(NUMBERS):
        verifying = Settings(method="flash-dllm", acceptance="nothing", isolation=isolation, **SMALL, **numbers)
        verified = decoded(model, verifying, seed)
        plain = decoded(model, Settings(method="flash-cache", **SMALL, **numbers), seed)
        assert_same(verified, plain)
        assert np.array_equal(verified.memory.tracked, plain.memory.tracked)
        assert int(verified.forwards.sum()) > int(plain.forwards.sum())  # it did verify


# Rungs 5 and 6 on a single pass: who is influenced by whom


class Case(NamedTuple):
    """A verify pass of one sequence.

    tokens: [length], [MASK] where masked. candidates: positions by rank. drafts: their tokens. context: positions of
    rows that are no views, decoded or masked. writes: as one-pass verify does.
    """

    tokens: np.ndarray
    candidates: list[int]
    drafts: np.ndarray
    context: list[int]
    writes: bool


ViewRow = tuple[int, int, int]  # view, rank, position
MOST_CANDIDATES, BUFFER_ROWS, ITS_SLOT = 5, 24, 1


@st.composite
def cases(draw: st.DrawFn, *, fewest_candidates: int = 1) -> Case:
    length = draw(st.integers(fewest_candidates, CAPACITY))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(fewest_candidates, min(MOST_CANDIDATES, length)))
    order = rng.permutation(length)
    tokens = rng.integers(0, MASK, length)
    tokens[order[: draw(st.integers(count, length))]] = MASK
    context = order[count:][: draw(st.integers(0, BUFFER_ROWS - 3 * count))]
    drafts = rng.integers(0, MASK, count)
    return Case(tokens, order[:count].tolist(), drafts, rng.permutation(context).tolist(), draw(st.booleans()))


def query_of(case: Case, isolation: Isolation) -> tuple[Query, list[ViewRow]]:
    """The pass in the second of two slots, and its rows."""
    kinds = (DRAFT_VIEW, MASK_VIEW, *((PLAIN_VIEW,) if isolation == "strict" else ()))
    rows = [(CONTEXT, 0, position) for position in case.context]
    rows += [(view, rank, position) for view in kinds for rank, position in enumerate(case.candidates)]
    view, rank, position = np.array([*rows, *[(EMPTY, 0, 0)] * (BUFFER_ROWS - len(rows))], np.int32).T
    token = np.where(view == CONTEXT, case.tokens[position], MASK)
    token = np.where(view == DRAFT_VIEW, case.drafts[np.minimum(rank, len(case.drafts) - 1)], token)

    def of_slots(values: np.ndarray) -> jax.Array:
        return jnp.asarray(np.stack([np.zeros_like(values), values]))

    query = partial_query(
        of_slots(token.astype(np.int32)),
        of_slots(position),
        jnp.array([0, len(rows)], jnp.int32),
        jnp.array([0, len(case.tokens)], jnp.int32),
        capacity=CAPACITY,
        write=of_slots(case.writes & ((view == CONTEXT) | (view == PLAIN_VIEW))),
        visibility=visibility(of_slots(view), of_slots(rank), isolation),
    )
    return query, rows


def hidden_of(forward: Forward, case: Case, isolation: Isolation) -> tuple[np.ndarray, list[ViewRow], KVCache]:
    """Activations of the pass's rows, the rows, and the cache after it; before it, it was that of a full pass."""
    tokens = np.zeros((2, CAPACITY), np.int32)
    tokens[ITS_SLOT, : len(case.tokens)] = case.tokens
    cache = forward.prefilled(jnp.asarray(tokens), jnp.array([0, len(case.tokens)], jnp.int32))
    query, rows = query_of(case, isolation)
    hidden, cache = forward.hidden(query, cache)
    first = ITS_SLOT * BUFFER_ROWS
    return np.asarray(hidden[first : first + len(rows)]), rows, cache


@pytest.mark.parametrize("isolation", ["paper", "strict"])
def test_views_of_one_layer_are_plain_forwards(
    checkpoint: Callable[[int], Path], kernels: str, isolation: Isolation
) -> None:
    """Mask view i: drafts 0 .. i - 1 placed; draft view i: 0 .. i; other rows: none."""
    directory = checkpoint(1)
    forward, reference = forward_of(load(directory, kernels=kernels)), ReferenceLLaDA.from_directory(directory)

    @examples(max_examples=30)
    @given(case=cases())
    def check(case: Case) -> None:
        hidden, rows, _ = hidden_of(forward, case, isolation)
        placed = np.stack([case.tokens] * (len(case.candidates) + 1))
        for rank, position in enumerate(case.candidates):
            placed[rank + 1 :, position] = case.drafts[rank]
        logits = reference(torch.tensor(placed)).numpy()
        drafts_of = {CONTEXT: lambda _: 0, PLAIN_VIEW: lambda _: 0, MASK_VIEW: lambda i: i, DRAFT_VIEW: lambda i: i + 1}
        expected = np.stack([logits[drafts_of[view](rank), position] for view, rank, position in rows])
        ours = np.asarray(forward.logits(jnp.asarray(hidden)))
        assert np.max(np.abs(ours - expected)) / np.max(np.abs(expected)) < 1e-5

    check()


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_strict_views_do_not_depend_on_drafts_they_may_not_see(
    checkpoint: Callable[[int], Path], kernels: str, n_layers: int
) -> None:
    """Bit for bit; nor does what the pass writes to the cache."""
    forward = forward_of(load(checkpoint(n_layers), kernels=kernels))

    @examples(max_examples=30)
    @given(case=cases(), data=st.data())
    def check(case: Case, data: st.DataObject) -> None:
        changed = data.draw(st.integers(0, len(case.candidates) - 1))
        others = np.concatenate([case.drafts[:changed], (case.drafts[changed:] + 1) % MASK])
        before, rows, cache = hidden_of(forward, case, "strict")
        after, _, cache_after = hidden_of(forward, case._replace(drafts=others), "strict")
        sees = [(v == DRAFT_VIEW and rank >= changed) or (v == MASK_VIEW and rank > changed) for v, rank, _ in rows]
        np.testing.assert_array_equal(before[~np.array(sees)], after[~np.array(sees)])
        jax.tree.map(np.testing.assert_array_equal, cache, cache_after)
        own = rows.index((DRAFT_VIEW, changed, case.candidates[changed]))
        assert np.any(before[own] != after[own])

    check()


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_the_papers_mask_leaks_a_draft_into_its_own_mask_view(
    checkpoint: Callable[[int], Path], kernels: str, n_layers: int
) -> None:
    """From the second layer on: mask view 1 sees draft 0, and mask view 0 sees mask view 1."""
    forward = forward_of(load(checkpoint(n_layers), kernels=kernels))
    tokens = np.random.default_rng(0).integers(0, MASK, 12)
    tokens[6:] = MASK
    case = Case(tokens, [7, 9], np.array([3, 4]), [0, 2], writes=False)
    before, rows, _ = hidden_of(forward, case, "paper")
    after, _, _ = hidden_of(forward, case._replace(drafts=np.array([5, 4])), "paper")
    own = rows.index((MASK_VIEW, 0, 7))
    change = np.max(np.abs(after[own] - before[own])) / np.max(np.abs(before[own]))
    assert change == 0 if n_layers == 1 else change > 1e-3


# Rung 5 end to end: with one layer a verify pass is sequential decoding


def replay(reference: ReferenceLLaDA, state: DecodeState, slot: int, settings: Settings) -> int:
    """Decode again, one token after the other, what verify committed, and compare; returns how many tokens that was."""
    prompt, ours = int(state.request.prompt_length[slot]), response(state, slot)
    tokens, step, rule = (np.array(ours[name]) for name in ("tokens", "step", "rule"))
    verified = (rule == Rule.VERIFIED) | (rule == Rule.BONUS)

    def probabilities(placed: np.ndarray) -> np.ndarray:
        """Of a forward in which these tokens of the response stand and the others are masked."""
        ids = np.concatenate([np.asarray(state.tokens[slot, :prompt]), np.where(placed, tokens, MASK)])
        return torch.softmax(reference.sequence(torch.tensor(ids)), dim=-1).numpy()[prompt:]

    for number in range(int(state.step[slot])):
        onepass = settings.method == "flash-dllm-onepass"
        drafted_with = (step >= 0) & (step < number - int(onepass))  # there the last pass drafted
        placed = (step >= 0) & ((step < number) | ((step == number) & ~verified))  # with what needed no verification
        confidence = probabilities(drafted_with).max(axis=-1)
        now = np.flatnonzero(verified & (step == number))
        in_order = now if settings.value("order") == "position" else now[np.argsort(-confidence[now], kind="stable")]
        for place in in_order:
            found = probabilities(placed)[place]
            assert found.argmax() == tokens[place]
            np.testing.assert_allclose(found[tokens[place]], ours["confidence"][place], rtol=1e-4)
            placed = placed | (np.arange(len(tokens)) == place)
    return int(verified.sum())


@pytest.mark.parametrize(
    ("method", "isolation", "order"),
    [
        ("flash-dllm", "paper", "confidence"),
        ("flash-dllm", "strict", "position"),
        ("flash-dllm-onepass", "paper", "position"),
        ("flash-dllm-onepass", "strict", "confidence"),
    ],
)
def test_what_one_layer_accepts_is_sequential_decoding(
    checkpoint: Callable[[int], Path], kernels: str, method: str, isolation: str, order: str
) -> None:
    """In the same order, under agreement: each token is the argmax with those before it placed, the rest masked."""
    directory = checkpoint(1)
    shallow, reference = load(directory, kernels=kernels), ReferenceLLaDA.from_directory(directory)
    settings = Settings(method=method, isolation=isolation, order=order, bonus=True, **VERIFYING)
    eos_ids = EOS_IDS if order == "position" else ()
    states = [decoded(shallow, settings, seed, eos_ids) for seed in range(4)]
    assert sum(replay(reference, state, slot, settings) for state in states for slot in range(SLOTS)) > 20


@pytest.mark.parametrize("method", ["flash-dllm", "flash-dllm-onepass"])
def test_what_one_layer_accepts_after_an_eos_is_sequential_decoding(
    checkpoint: Callable[[int], Path], kernels: str, method: str
) -> None:
    """As above, by confidence, where a candidate right of an accepted EOS comes before one left of it."""
    directory = checkpoint(1)
    shallow, reference = load(directory, kernels=kernels), ReferenceLLaDA.from_directory(directory)
    state = decoded(shallow, Settings(method=method, bonus=True, **VERIFYING), 3, eos_ids=tuple(range(0, MASK, 3)))
    for slot in range(SLOTS):
        replay(reference, state, slot, Settings(method=method, bonus=True, **VERIFYING))


# Rung 6 end to end


def without_later_drafts(query: Query, slot: int, row: int) -> tuple[Query, int]:
    """The rows that a slot's pass would have, had it to verify this mask view alone, and where the view then is."""
    rows = query.block_rows
    rule = query.visibility
    assert rule is not None
    _, kv_length, first, count = (int(x) for x in query.block_table[slot])
    kind, rank = np.asarray(rule.kind), np.asarray(rule.rank)
    index = np.arange(first, first + count)
    kept = index[
        ((kind != DRAFT) | (rank < rule.draft_cutoff[row]))[index] & ((kind != PRIVATE)[index] | (index == row))
    ]

    def taken(values: jax.Array) -> jax.Array:
        out = np.zeros((SLOTS, rows), np.asarray(values).dtype)
        out[slot, : len(kept)] = np.asarray(values)[kept]
        return jnp.asarray(out)

    here = jnp.arange(SLOTS) == slot
    alone = partial_query(
        taken(query.token),
        taken(query.position),
        jnp.where(here, len(kept), 0).astype(jnp.int32),
        jnp.where(here, kv_length, 0).astype(jnp.int32),
        capacity=CAPACITY,
        write=taken(query.write),
        visibility=Visibility(*map(taken, rule)),
    )
    return alone, slot * rows + int(np.flatnonzero(kept == row)[0])


def accepted_in(state: DecodeState, step: int) -> np.ndarray:
    """[accepted, 2]: slots and positions."""
    return np.argwhere((np.asarray(state.trace.step) == step) & (np.asarray(state.trace.rule) == Rule.VERIFIED))


@pytest.mark.parametrize("method", ["flash-dllm", "flash-dllm-onepass"])
def test_strict_tokens_have_the_distribution_of_a_pass_with_the_earlier_drafts_alone(
    model: LLaDA, seen: list[tuple[Query, KVCache, np.ndarray]], method: str
) -> None:
    settings = Settings(method=method, isolation="strict", **VERIFYING)
    strategy, forward = method_of(settings, eos_ids=()), forward_of(model)
    graphdef, parameters = nnx.split(model)
    step = jax.jit(lambda parameters, state: strategy.step(nnx.merge(graphdef, parameters), state))
    state, checked = start(model, settings, 0), 0
    while bool(jnp.any(state.live)):
        number = int(state.step.max())
        seen.clear()
        state = jax.block_until_ready(step(parameters, state))
        jax.effects_barrier()
        verify = [one for one in seen if one[0].visibility is not None]
        for slot, position in accepted_in(state, number).tolist():
            ((query, cache, hidden),) = verify
            assert query.visibility is not None
            own = (np.asarray(query.position) == position) & (np.asarray(query.slot) == slot)
            (row,) = np.flatnonzero(own & np.asarray(query.visibility.sees_self)).tolist()
            alone, alone_row = without_later_drafts(query, slot, row)
            expected = jax.nn.softmax(model.logits(forward.hidden(alone, cache)[0][alone_row]))
            found = jax.nn.softmax(model.logits(jnp.asarray(hidden[row])))
            assert float(jnp.max(jnp.abs(found - expected)) / jnp.max(expected)) < 1e-5
            token = int(state.tokens[slot, position])
            assert int(jnp.argmax(expected)) == token
            np.testing.assert_allclose(state.trace.confidence[slot, position], expected[token], rtol=1e-5)
            checked += 1
    assert checked >= 10


# Rung 7: batches and refills


def every_method() -> list[Settings]:
    common = {"gen_length": 15, "block_length": 5, "temperature": 0.5, "seed": 3}
    numbers: dict[str, dict[str, Any]] = {
        "llada": {"steps": 6},
        "flash-cache": {"mask_window": 8, "track_budget": 6},
        "flash-dllm": {"mask_window": 8, "track_budget": 6, "gamma": 0.05},
        "flash-dllm-onepass": {"mask_window": 8, "track_budget": 6, "gamma": 0.05, "isolation": "strict"},
    }
    return [
        Settings(
            method=name,
            **common,
            **({"threshold": 0.6} if "threshold" in METHODS[name] else {}),
            **numbers.get(name, {}),
        )
        for name in METHODS
    ]


NARROW = 24  # two of the four first sequences are no longer


@pytest.mark.parametrize(
    ("settings", "narrow"),
    [
        *((settings, None) for settings in every_method()),
        *((s, NARROW) for s in every_method() if s.method in ("llada", "fast-dllm-dual", "flash-dllm")),
    ],
    ids=lambda given: given.method if isinstance(given, Settings) else f"narrow {given}",
)
@pytest.mark.usefixtures("several_packed_passes")
def test_alone_equals_batch_and_refills(model: LLaDA, settings: Settings, narrow: int | None) -> None:
    """Bit for bit, in any slot, next to slots that start, go on and have finished."""
    nothing = replace(empty(model, SLOTS, CAPACITY, settings), narrow=narrow)
    graphdef, parameters = nnx.split(model)
    method = method_of(settings, eos_ids=EOS_IDS)

    def outcome(state: DecodeState, slot: int) -> tuple:
        return response(state, slot), int(state.step[slot]), int(state.forwards[slot])

    queue = [(prompt, replace(settings, seed=i)) for i, prompt in enumerate([*prompts(0), *prompts(1)[2:]])]
    state, where, together = jax.tree.map(jnp.copy, nothing), {}, {}
    for index, request in enumerate(queue[:SLOTS]):
        state, where[index] = put(model, state, index, *request), index
    assert int(jnp.sum(state.length)) > passes.MOST_PACKED_ROWS
    waiting = list(range(SLOTS, len(queue)))
    while where:
        state = run(parameters, state, jnp.int32(100), graphdef=graphdef, method=method)
        for index, slot in [(i, s) for i, s in where.items() if not state.live[s]]:
            together[index] = outcome(state, slot)
            del where[index]
            if waiting:
                where[waiting[0]] = slot
                state = put(model, state, slot, *queue[waiting.pop(0)])
    for index, request in enumerate(queue):
        slot = (index + 1) % SLOTS
        alone = decode(model, put(model, jax.tree.map(jnp.copy, nothing), slot, *request), settings, EOS_IDS)
        assert outcome(alone, slot) == together[index]


def test_several_packed_passes_leave_what_one_does(
    model: LLaDA, seen: list[tuple[Query, KVCache, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = start(model, Settings(method="threshold", gen_length=15), 0)
    which, wanted = jnp.array([True, True, False, True]), jnp.broadcast_to(jnp.arange(3, 9), (SLOTS, 6))
    tracking, found, calls = passes.Tracking(state.masked, state.masked.shape[1], None), [], []
    cases = (4096, 1, None), (48, 1, None), (1, 1, None), (4096, 4096, None), (4096, 1, NARROW), (48, 1, NARROW)
    for rows, short, narrow in cases:
        monkeypatch.setattr(passes, "MOST_PACKED_ROWS", rows)
        monkeypatch.setattr(passes, "SHORT", short)
        seen.clear()
        one = jax.jit(lambda state: passes.whole(model, state, which, wanted, tracking=tracking))
        result, after = jax.block_until_ready(one(replace(state, narrow=narrow)))
        jax.effects_barrier()
        calls.append(len(seen))
        found.append((result.hidden[which], result.scores, after.cache, after.forwards))
    assert calls == [1, 2, 3, 3, 2, 3]
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found[0], other)


# Rung 8: kernels


@pytest.mark.parametrize("which", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(method="flash-dllm", threshold=0.6, gamma=0.05, gen_length=6, block_length=3, mask_window=4,
                 track_budget=4),
        Settings(method="flash-dllm-onepass", threshold=0.6, gamma=0.05, gen_length=6, block_length=3, mask_window=4,
                 track_budget=4, isolation="strict"),
    ],
    ids=lambda settings: settings.method,
)  # fmt: skip
def test_kernels_give_the_tokens_of_xla(checkpoint: Callable[[int], Path], settings: Settings, which: str) -> None:
    directory, found = checkpoint(1), {}
    for kernels in ("xla", which):
        model = load(directory, kernels=kernels)
        state = empty(model, 2, 16, settings)
        for slot, prompt in enumerate(([5], [9, 4, 30, 8, 17])):
            state = put(model, state, slot, prompt, settings)
        state = decode(model, state, settings, EOS_IDS)
        found[kernels] = [response(state, slot) for slot in range(2)]
    for ours, expected in zip(found[which], found["xla"], strict=True):
        np.testing.assert_allclose(ours.pop("confidence"), expected.pop("confidence"), rtol=1e-4)
        assert ours == expected


# Rung 9: one pass that accepts nothing


def test_onepass_that_accepts_nothing_equals_flash_cache_one_token_a_step(model: LLaDA) -> None:
    for seed, noise in enumerate(({}, {}, {"temperature": 0.8, "seed": 9})):
        common = {**SMALL, **noise, "threshold": 1.0}
        onepass = Settings(method="flash-dllm-onepass", isolation="strict", acceptance="nothing", bonus=False, **common)
        one, other = decoded(model, onepass, seed), decoded(model, Settings(method="flash-cache", **common), seed)
        assert_same(one, other)
        assert np.array_equal(one.forwards, other.forwards)
        assert np.array_equal(one.memory.tracked, other.memory.tracked)
        assert set(response(one, 0)["rule"]) <= {Rule.NONE, Rule.MOST_CONFIDENT}
