"""The cached decoders against decoders without a cache, and hand-worked cases."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.cached_model import CachedForward, CachedLLaDA, Output, Row
from tests.reference.checkpoint import random_checkpoint, random_config, random_state_dict
from tests.reference.flash import (
    Options,
    View,
    draft_view,
    generate_flash,
    mask_view,
    plain_view,
    shared_view,
    visibility,
)
from tests.reference.model import ReferenceLLaDA
from tests.reference.sampler import Rule, Sample, State, generate_threshold, passing, predict
from tests.reference.test_reference import SHAPES, half_masked

MASK, EOS, EOT, VOCAB = 9, 8, 7, 10
MODEL_MASK, MODEL_EOS = 95, 94  # of the random models


def random_model(directory: Path, seed: int, **overrides: Any) -> ReferenceLLaDA:
    return ReferenceLLaDA.from_directory(random_checkpoint(directory, seed, **overrides))


def model_and_prompt(seed: int, length: int = 9, **overrides: Any) -> tuple[ReferenceLLaDA, list[int]]:
    config = random_config(**overrides)
    return ReferenceLLaDA(config, random_state_dict(config, seed)), half_masked(seed, 2 * length)[:length].tolist()


def noise(position: int) -> Tensor:
    uniform = torch.rand(96, generator=torch.Generator().manual_seed(1000 + position)).clamp(min=1e-9)
    return -torch.log(-torch.log(uniform))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


# --- the model with a cache ---


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pass_of_everything_equals_the_model(shape: str, tmp_path: Path) -> None:
    model = random_model(tmp_path, list(SHAPES).index(shape), **SHAPES[shape])
    ids = half_masked(5, 20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5)).tolist()
    output = CachedLLaDA(model)([Row(int(ids[p]), p) for p in order], 20, attention=True)
    assert error(output.logits, model.sequence(ids)[order]) < 2e-6
    assert output.attention.shape == (3, 4, 20, 20)
    assert (output.attention.sum(-1) - 1).abs().max() < 1e-6


def test_rows_that_changed_nothing_change_nothing() -> None:
    model, _ = model_and_prompt(6)
    ids = half_masked(6, 24)
    forward = CachedLLaDA(model)
    whole = forward([Row(int(ids[p]), p) for p in range(24)], 24, attention=True)
    some = [20, 3, 11]
    part = forward([Row(int(ids[p]), p) for p in some], 24, wanted=[2, 0], attention=True)
    assert error(part.logits, whole.logits[[11, 20]]) < 2e-6
    assert error(part.attention, whole.attention[:, :, some]) < 2e-6


def test_with_one_layer_a_write_is_as_good_as_a_full_pass_and_no_write_leaves_no_trace() -> None:
    model, _ = model_and_prompt(7, n_layers=1)
    ids = half_masked(7, 16)
    changed = ids.clone()
    changed[9], changed[12] = 5, 6
    forward = CachedLLaDA(model)
    before = forward([Row(int(ids[p]), p) for p in range(16)], 16).logits
    # 9 is written, 12 is only tried; a hidden row at 3 leaves the place to the row that is seen there
    rows = [Row(5, 9), Row(6, 12, False), Row(int(ids[14]), 14, False), Row(77, 3, False), Row(int(ids[3]), 3, False)]
    sees = torch.ones(5, 5, dtype=torch.bool)
    sees[:, 3] = False
    tried = forward(rows, 16, sees=sees, wanted=[0, 1, 2]).logits
    assert error(tried, model.sequence(changed)[[9, 12, 14]]) < 2e-6
    changed[12] = ids[12]
    after = forward([Row(int(ids[14]), 14)], 16).logits
    assert error(after, model.sequence(changed)[[14]]) < 2e-6 and error(after, before[[14]]) > 1e-3
    short = forward([Row(int(ids[3]), 3)], 11).logits  # what stands from kv_length on is not seen
    assert error(short, model.sequence(changed[:11])[[3]]) < 2e-6
    with pytest.raises(ValueError, match="write one position"):
        forward([Row(1, 4), Row(2, 4)], 16)


# --- ladder: what needs no hand-worked case ---


def flash(model: ReferenceLLaDA, prompt: Sequence[int], method: str, **options: Any) -> Sample:
    chosen = {"block_length": 6, "mask_window": 8, "track_budget": 8, "threshold": 0.7, "gamma": 0.2} | options
    eos_ids, gen_length = chosen.pop("eos_ids", (MODEL_EOS,)), chosen.pop("gen_length", 24)
    forward = Checked(CachedLLaDA(model))
    return generate_flash(
        forward,
        prompt,
        mask_id=MODEL_MASK,
        eos_ids=eos_ids,
        gen_length=gen_length,
        options=Options(method=method, **chosen),
    )


class Checked:
    """Every row of every pass sees every position exactly once, and no position is written twice."""

    def __init__(self, forward: CachedForward):
        self.forward, self.rows = forward, []

    def __call__(self, rows: Sequence[Row], kv_length: int, *, sees: Tensor | None = None, **rest: Any) -> Output:
        held = sorted({row.position for row in rows})
        seen = torch.ones(len(rows), len(rows), dtype=torch.bool) if sees is None else sees
        for position in held:
            there = torch.tensor([row.position == position for row in rows])
            assert (seen[:, there].sum(-1) == 1).all()
        self.rows.append(rows)
        return self.forward(rows, kv_length, sees=sees, **rest)


def same_commits(actual: Sample, expected: Sample) -> None:
    """The same tokens in the same steps, of confidences that are equal but for rounding."""
    assert (actual.ids, actual.commit_step, actual.tokens) == (expected.ids, expected.commit_step, expected.tokens)
    assert actual.steps == expected.steps
    assert actual.confidence == pytest.approx(expected.confidence, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_with_budgets_that_cover_everything_flash_cache_is_threshold_decoding(seed: int, temperature: float) -> None:
    model, prompt = model_and_prompt(seed)
    heat = {"temperature": temperature, "noise": noise if temperature else None}
    settings: dict[str, Any] = {"block_length": 6, "threshold": 0.7, **heat}
    common: dict[str, Any] = {"mask_id": MODEL_MASK, "gen_length": 24}
    endless = generate_threshold(model.sequence, prompt, eos_ids=(), **common, **settings)
    for eos_ids in ((), (endless.ids[9 + 13], endless.ids[9 + 20])):
        expected = generate_threshold(model.sequence, prompt, eos_ids=eos_ids, **common, **settings)
        whole = {"mask_window": 99, "track_budget": 99, "eos_ids": eos_ids}
        actual = flash(model, prompt, "flash-cache", **settings, **whole)
        same_commits(actual, expected)
        assert actual.rule == expected.rule
        assert actual.forwards == actual.steps < 24
        assert len(actual.tokens) < 24 or not eos_ids


@pytest.mark.parametrize("isolation", ["paper", "strict"])
@pytest.mark.parametrize("order", ["confidence", "position"])
def test_accepting_nothing_is_flash_cache(isolation: str, order: str) -> None:
    for seed in range(3):
        model, prompt = model_and_prompt(seed)
        cached = flash(model, prompt, "flash-cache")
        verified = flash(model, prompt, "flash-dllm", acceptance="nothing", isolation=isolation, order=order)
        same_commits(verified, cached)
        assert verified.rule == cached.rule
        assert cached.forwards < verified.forwards <= 2 * cached.forwards
        assert [step.tracked for step in verified.record] == [step.tracked for step in cached.record]


def exact_verify(model: ReferenceLLaDA, prompt: Sequence[int], method: str, *, bonus: bool, eos_ids: tuple) -> Sample:
    """Flash-Verify and one-pass verify by full passes: a mask view is a pass with the earlier drafts in place."""
    state = State(prompt, 24, MODEL_MASK)
    end, step, forwards, plain = len(state.ids), 0, 0, {}

    def predictions(places: list[int], ids: list[int]) -> dict[int, tuple[int, float]]:
        logits = model.sequence(torch.tensor(ids))
        return {p: predict(logits[p], 0.0, None) for p in places}

    def first_end() -> int:
        eos = state.leftmost(eos_ids)
        return len(state.ids) if eos is None else eos + 1

    while window := state.open_before(end)[:6]:
        one_pass = method == "flash-dllm-onepass" and step > 0
        ids, drafts = list(state.ids), plain
        plain = predictions(state.open_before(end)[:12] if one_pass else window, ids)
        forwards += 1
        if not one_pass:
            for p, rule in passing(plain, 0.7).items():
                state.commit(p, plain[p], step, rule)
            end, drafts, ids = first_end(), plain, list(state.ids)
        candidates = [p for p in window if state.is_open[p] and p < end and p in drafts]
        if method != "flash-dllm-onepass" and candidates:
            forwards += 1
        if method == "flash-dllm-onepass" and not one_pass:
            candidates = []
        best = min(window, key=lambda p: (-plain[p][1], p))
        candidates.sort(key=lambda p: (-drafts[p][1], p))
        for p in candidates:
            if p >= end:
                continue
            own = predictions([p], ids)[p]
            ids[p] = drafts[p][0]
            if one_pass and p == best == candidates[0] and plain[p][0] == ids[p]:
                state.commit(p, plain[p], step, Rule.MOST_CONFIDENT)
                end = first_end()
                continue
            agrees = own[0] == drafts[p][0]
            if agrees and own[1] >= 0.2:
                state.commit(p, own, step, Rule.VERIFIED)
                end = first_end()
                continue
            if bonus and not agrees and own[1] >= 0.7:
                state.commit(p, own, step, Rule.BONUS)
                end = first_end()
            break
        if step not in state.commit_step:
            state.commit(best, plain[best], step, Rule.MOST_CONFIDENT)
        end, step = first_end(), step + 1
    return state.sample(eos_ids, steps=step, forwards=forwards)


@pytest.mark.parametrize("isolation", ["paper", "strict"])
@pytest.mark.parametrize("method", ["flash-dllm", "flash-dllm-onepass"])
def test_with_one_layer_verify_is_full_passes_with_the_drafts_in_place(method: str, isolation: str) -> None:
    """With one layer K and V depend on the token alone, so that small budgets lose nothing either."""
    rules = []
    for seed in range(6):
        model, prompt = model_and_prompt(seed, n_layers=1)
        whole = exact_verify(model, prompt, method, bonus=False, eos_ids=())
        for bonus in (False, True):
            eos_ids = (whole.ids[9 + 11], whole.ids[9 + 18]) if seed % 2 else ()
            expected = exact_verify(model, prompt, method, bonus=bonus, eos_ids=eos_ids)
            settings: dict[str, Any] = {"isolation": isolation, "bonus": bonus, "eos_ids": eos_ids}
            actual = flash(model, prompt, method, mask_window=14, **settings)
            same_commits(actual, expected)
            assert (actual.rule, actual.forwards) == (expected.rule, expected.forwards)
            rules += actual.rule
    used = {Rule.NONE, Rule.THRESHOLD, Rule.MOST_CONFIDENT, Rule.VERIFIED, Rule.BONUS}
    assert used <= set(rules), "the cases do not exercise all rules"


def verify_pass(model: ReferenceLLaDA, isolation: str, drafts: list[int], *, plain: bool) -> Tensor:
    """Logits of the mask views, after a full pass: [candidates, vocab]. Candidates at 12, 15, 13, 14."""
    ids = half_masked(11, 24)
    forward = CachedLLaDA(model)
    forward([Row(int(ids[p]), p) for p in range(24)], 24)
    places = [12, 15, 13, 14]
    views = [shared_view(int(ids[p]), p, writes=False) for p in (2, 5, 11, 20)]
    views += [draft_view(token, p, rank) for rank, (p, token) in enumerate(zip(places, drafts, strict=True))]
    if plain:
        views += [plain_view(MODEL_MASK, p, rank, isolation, writes=True) for rank, p in enumerate(places)]
    views += [mask_view(MODEL_MASK, p, rank, isolation) for rank, p in enumerate(places)]
    rows = [view.row for view in views]
    return Checked(forward)(rows, 24, sees=visibility(views), wanted=range(len(views) - 4, len(views))).logits


@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_only_strict_isolation_hides_drafts_at_any_depth(n_layers: int) -> None:
    """A changed draft reaches no mask view of its rank or below; under the paper's mask it does from layer 2 on."""
    model, _ = model_and_prompt(11, n_layers=n_layers)
    drafts = [3, 14, 15, 9]
    for isolation, plain in (("strict", True), ("paper", False), ("paper", True)):
        before = verify_pass(model, isolation, drafts, plain=plain)
        for changed in range(4):
            other = [token + 30 * (rank == changed) for rank, token in enumerate(drafts)]
            after = verify_pass(model, isolation, other, plain=plain)
            untouched = [error(after[i], before[i]) for i in range(changed + 1)]
            if isolation == "strict" or n_layers == 1:
                assert max(untouched) == 0
            elif changed < 3:  # a mask view of higher rank passes it on
                assert min(untouched) > 0 and max(untouched) > 1e-4
            assert all(error(after[i], before[i]) > 1e-3 for i in range(changed + 1, 4))


def test_visibility_is_the_documented_table() -> None:
    """Rows: a shared one, then draft, plain and mask view of candidates 0 and 1."""
    for isolation, expected in {
        # s d0 p0 m0 d1 p1 m1
        "paper": ["1001001", "1100001", "1001001", "1001001", "1100100", "1001001", "1100001"],
        "strict": ["1010010", "1100010", "1010010", "1001010", "1100100", "1010010", "1100001"],
    }.items():
        views: list[View] = [shared_view(1, 0, writes=True)]
        for rank in (0, 1):
            views.append(draft_view(5, 1 + rank, rank))
            views.append(plain_view(MASK, 1 + rank, rank, isolation, writes=True))
            views.append(mask_view(MASK, 1 + rank, rank, isolation))
        assert ["".join(str(int(bit)) for bit in row) for row in visibility(views)] == expected
        assert [view.row.writes for view in views] == [True, False, True, False, False, True, False]


def test_one_pass_that_accepts_nothing_is_flash_cache_one_token_a_step() -> None:
    for seed in range(4):
        model, prompt = model_and_prompt(seed)
        cached = flash(model, prompt, "flash-cache", threshold=2.0)
        for eos_ids in ((), (cached.ids[9 + 10],)):
            settings: dict[str, Any] = {"threshold": 2.0, "eos_ids": eos_ids}
            one = flash(model, prompt, "flash-cache", **settings)
            drafted = {"acceptance": "nothing", "isolation": "strict"}
            same_commits(flash(model, prompt, "flash-dllm-onepass", **settings, **drafted), one)
            assert one.steps == sum(s >= 0 for s in one.commit_step)


def test_rows_keep_to_the_budgets_and_to_their_kinds() -> None:
    model, prompt = model_and_prompt(2)
    for isolation, each in (("paper", 2), ("strict", 3)):
        forward = Checked(CachedLLaDA(model))
        options = {"block_length": 4, "mask_window": 5, "track_budget": 7, "threshold": 0.8, "isolation": isolation}
        common: dict[str, Any] = {"mask_id": MODEL_MASK, "eos_ids": (), "gen_length": 20}
        sample = generate_flash(forward, prompt, **common, options=Options(method="flash-dllm", **options))
        drafts = [rows for rows in forward.rows if rows[0].writes]
        verifies = [rows for rows in forward.rows if not rows[0].writes]
        assert len(forward.rows) == sample.forwards == len(drafts) + len(verifies) and len(drafts) == sample.steps
        assert len(drafts[0]) == 29 and all(len(rows) <= 12 for rows in drafts[1:])
        assert max(len(rows) for rows in verifies) == each * 4
        assert not any(row.writes for rows in verifies for row in rows)

        forward = Checked(CachedLLaDA(model))
        sample = generate_flash(forward, prompt, **common, options=Options(method="flash-dllm-onepass", **options))
        assert len(forward.rows) == sample.forwards == sample.steps
        for step, rows in zip(sample.record[1:], forward.rows[1:], strict=True):
            assert len(rows) == len(step.tracked) + len(step.marked) + 2 * len(step.candidates) <= 7 + 5 + 2 * 4
            written = sorted(row.position for row in rows if row.writes)
            assert written == sorted(step.tracked + step.marked)
            assert all(row.token == sample.ids[row.position] for row in rows if row.position in step.tracked)


def test_decoding_is_repeatable_with_noise_and_without() -> None:
    model, prompt = model_and_prompt(3)
    results = []
    for method in ("flash-cache", "flash-dllm", "flash-dllm-onepass"):
        heat = {"temperature": 2.0, "noise": noise}
        cold, again = flash(model, prompt, method), flash(model, prompt, method)
        hot, hot_again = flash(model, prompt, method, **heat), flash(model, prompt, method, **heat)
        assert cold == again and hot == hot_again and cold.rule == again.rule
        assert cold.record == again.record and hot.record == hot_again.record
        assert cold.ids != hot.ids
        results.append(hot)
    # The noise of a place is the same in all views: with noise too, drafts are found to agree.
    assert all(Rule.VERIFIED in sample.rule for sample in results[1:])


# --- hand-worked cases ---


class Stub:
    """A model of which each row predicts from the ids that it sees: predict(ids, position) -> token, probability.

    The rest of the probability goes to the other ids in equal parts. attention: per layer, the weight of each position.
    """

    def __init__(
        self, predict: Callable[[list[int], int], tuple[int, float]], attention: Sequence[Sequence[float]] = ()
    ):
        self.predict, self.weights, self.cache, self.passes = predict, attention, {}, []

    def __call__(
        self,
        rows: Sequence[Row],
        kv_length: int,
        *,
        sees: Tensor | None = None,
        wanted: Sequence[int] | None = None,
        attention: bool = False,
    ) -> Output:
        self.passes.append([(row.token, row.position) for row in rows])
        logits = []
        for i in range(len(rows)) if wanted is None else wanted:
            visible = [row for j, row in enumerate(rows) if sees is None or sees[i, j]]
            ids = self.cache | {row.position: row.token for row in visible}
            token, probability = self.predict([ids[p] for p in range(kv_length)], rows[i].position)
            logits.append(torch.full((VOCAB,), math.log((1 - probability) / (VOCAB - 1))))
            logits[-1][token] = math.log(probability)
        self.cache |= {row.position: row.token for row in rows if row.writes}
        weights = torch.tensor(self.weights if self.weights else [[1.0] * kv_length])
        probabilities = weights / weights.sum(-1, keepdim=True)
        return Output(torch.stack(logits), probabilities[:, None, None].expand(-1, 2, len(rows), -1))


def fixed(tokens: list[int], probabilities: list[float], start: int = 2) -> Stub:
    """Predicts these at the places after the prompt, whatever it sees."""
    return Stub(lambda ids, p: (tokens[p - start], probabilities[p - start]) if p >= start else (0, 0.5))


def run(model: Stub, gen_length: int, prompt: Sequence[int] = (1, 2), **options: Any) -> Sample:
    chosen = {"method": "flash-dllm", "block_length": 4, "mask_window": 8, "track_budget": 8} | options
    return generate_flash(
        model, prompt, mask_id=MASK, eos_ids=(EOS, EOT), gen_length=gen_length, options=Options(**chosen)
    )


R = Rule


def test_verify_commits_in_order_and_stops_at_the_first_failure() -> None:
    # Places 2..5. 4 is the best; then 2 (0.7), 5 (0.6), 3 (0.5) in order of confidence.
    model = fixed([3, 4, 5, 6], [0.7, 0.5, 0.8, 0.6])
    sample = run(model, 4, gamma=0.55)
    assert sample.commit_step == [0, 1, 0, 0]
    assert sample.rule == [R.VERIFIED, R.MOST_CONFIDENT, R.MOST_CONFIDENT, R.VERIFIED]
    assert sample.confidence == pytest.approx([0.7, 0.5, 0.8, 0.6])
    assert (sample.steps, sample.forwards) == (2, 3)  # nothing is left to verify in the second
    step = sample.record[0]
    assert (step.marked, step.window, step.decoded) == ([2, 3, 4, 5], [2, 3, 4, 5], [4])
    assert list(step.candidates) == list(step.mask_views) == [2, 5, 3] and step.accepted == [2, 5]
    # Context, draft views, mask views; 8 rows of which 6 are views.
    assert model.passes[1] == [(5, 4), (1, 0), (3, 2), (6, 5), (4, 3), (MASK, 2), (MASK, 5), (MASK, 3)]
    # By position 3 comes second, fails, and 5 waits.
    assert run(fixed([3, 4, 5, 6], [0.7, 0.5, 0.8, 0.6]), 4, gamma=0.55, order="position").commit_step == [0, 2, 0, 1]


def test_verify_sees_the_drafts_before_and_no_others() -> None:
    def predict(ids: list[int], p: int) -> tuple[int, float]:
        if p == 2:
            return 3, 0.95
        if p == 3:
            return 4, 0.6 + 0.1 * (ids[2] == 3) + 0.1 * (ids[4] == 5)  # 4 comes after it
        return 5, 0.5 + 0.2 * (ids[3] == 4)

    for isolation, views in (("paper", 2), ("strict", 3)):
        model = Stub(predict)
        sample = run(model, 3, gamma=0.7 - 1e-6, isolation=isolation)
        assert sample.rule == [R.THRESHOLD, R.VERIFIED, R.VERIFIED]
        assert sample.confidence == pytest.approx([0.95, 0.7, 0.7])
        assert (sample.steps, sample.forwards) == (1, 2)
        assert len(model.passes[1]) == 3 + 2 * views


def test_cumulative_acceptance_multiplies_the_drafts_probabilities() -> None:
    # 0.8 * 0.7 = 0.56 passes, 0.56 * 0.6 = 0.336 does not.
    sample = run(fixed([3, 4, 5, 6], [0.8, 0.7, 0.85, 0.6]), 4, gamma=0.5, acceptance="cumulative")
    assert sample.rule == [R.VERIFIED, R.VERIFIED, R.MOST_CONFIDENT, R.MOST_CONFIDENT]

    # Unlike agreement it asks for the draft's probability even where another token has more of it.
    def predict(ids: list[int], p: int) -> tuple[int, float]:
        return (3, 0.95) if p == 2 else (5 if ids[2] == 3 else 4, 0.6)

    for acceptance, rule in (("agreement", R.MOST_CONFIDENT), ("cumulative", R.VERIFIED)):
        sample = run(Stub(predict), 2, gamma=0.04, acceptance=acceptance)
        assert sample.rule[1] == rule and sample.tokens[1] == (4 if rule == R.VERIFIED else 5)
        assert sample.confidence[1] == pytest.approx(0.4 / 9 if rule == R.VERIFIED else 0.6)


def test_bonus_is_what_the_mask_view_says_where_it_rejects() -> None:
    def predict(ids: list[int], p: int, changed: float) -> tuple[int, float]:
        if p == 2:
            return 3, 0.96
        if p == 3:
            return (5, changed) if ids[2] == 3 else (4, 0.6)
        return 6, 0.5

    for changed, bonus, expected in (
        (0.95, True, ([R.THRESHOLD, R.BONUS, R.MOST_CONFIDENT], [0, 0, 1])),  # 4 would pass, but comes after a failure
        (0.95, False, ([R.THRESHOLD, R.THRESHOLD, R.VERIFIED], [0, 1, 1])),
        (0.85, True, ([R.THRESHOLD, R.MOST_CONFIDENT, R.VERIFIED], [0, 1, 1])),  # below the threshold
    ):
        model = Stub(lambda ids, p, changed=changed: predict(ids, p, changed))
        sample = run(model, 3, gamma=0.4, bonus=bonus)
        assert (sample.rule, sample.commit_step) == expected
        assert sample.tokens == [3, 5, 6]
        assert sample.record[0].bonus == (3 if R.BONUS in sample.rule else None)
    assert run(Stub(lambda ids, p: predict(ids, p, 0.95)), 3, gamma=0.97, bonus=True).rule[1] == R.THRESHOLD


def test_the_end_moves_with_the_draft() -> None:
    # EOS at place 5 and a token behind it commit together; place 6 leaves S and is never committed.
    model = fixed([3, 4, 5, EOS, 6, 0], [0.5, 0.6, 0.7, 0.95, 0.8, 0.96])
    sample = run(model, 6, block_length=6, gamma=0.55)
    assert sample.tokens == [3, 4, 5, EOS]
    assert sample.commit_step == [1, 0, 0, 0, -1, 0] and math.isnan(sample.confidence[4])
    assert sample.rule[4] == R.NONE
    first, second = sample.record
    assert (first.end, list(first.candidates), first.accepted) == (6, [4, 3, 2], [4, 3])
    assert (second.window, second.marked) == ([2], [2, 6])  # M goes on behind the end
    assert sorted(second.tracked) == [0, 1, 3, 4, 5, 7]


def test_the_end_moves_within_verify() -> None:
    # Place 5 is drafted; of the others 3, an EOS, is the first, so that 4 is no candidate; then 2 is accepted.
    model, probabilities = [3, EOT, 5, 6], [0.5, 0.7, 0.65, 0.8]
    sample = run(fixed(model, probabilities), 4, gamma=0.45)
    assert sample.tokens == [3, EOT] and sample.ids == [1, 2, 3, EOT, MASK, 6]
    assert sample.rule == [R.VERIFIED, R.VERIFIED, R.NONE, R.MOST_CONFIDENT]
    assert (sample.steps, sample.forwards, sample.record[0].end) == (1, 2, 4)
    assert list(sample.record[0].candidates) == [3, 2]
    # Left to right, 2 comes before the EOS; and where 4 comes before it, it is verified though it may be left out.
    assert list(run(fixed(model, probabilities), 4, gamma=0.45, order="position").record[0].candidates) == [2, 3]
    early = run(fixed(model, [0.5, 0.65, 0.7, 0.8]), 4, gamma=0.45)
    assert list(early.record[0].candidates) == [4, 3, 2] and early.rule == [R.VERIFIED] * 3 + [R.MOST_CONFIDENT]
    assert run(fixed(model, probabilities), 4, gamma=0.45, bonus=True).rule == sample.rule

    def late_eos(ids: list[int], p: int) -> tuple[int, float]:
        return {2: (3, 0.5), 3: (EOS if ids[5] == 6 else 4, 0.97 if ids[5] == 6 else 0.7), 4: (5, 0.6)}.get(p, (6, 0.8))

    sample = run(Stub(late_eos), 4, gamma=0.45, bonus=True)
    assert sample.rule == [R.MOST_CONFIDENT, R.BONUS, R.NONE, R.MOST_CONFIDENT] and sample.tokens == [3, EOS]


def test_verify_rows_limits_candidates_then_context() -> None:
    weights = [[3.0, 5.0] + [1.0] * 4]
    tokens, probabilities = [3, 4, 5, 6], [0.5, 0.6, 0.7, 0.8]

    def first(**options: Any) -> tuple[list[int], list[int], int]:
        model = Stub(fixed(tokens, probabilities).predict, weights)
        step = run(model, 4, acceptance="nothing", **options).record[0]
        return list(step.candidates), step.context, len(model.passes[1])

    assert first() == ([4, 3, 2], [5, 1], 8)
    assert first(verify_rows=9) == ([4, 3, 2], [5, 1, 0], 9)
    assert first(verify_rows=99) == ([4, 3, 2], [5, 1, 0], 9)
    assert first(verify_rows=7) == ([4, 3, 2], [5], 7)
    assert first(verify_rows=6) == ([4, 3], [5, 1], 6)
    assert first(verify_rows=6, order="position") == ([2, 3], [5, 1], 6)
    assert first(isolation="strict") == ([4, 3, 2], [5, 1, 0], 12)
    assert first(isolation="strict", verify_rows=9) == ([4, 3], [5, 1, 0], 9)
    assert first(isolation="strict", verify_rows=7) == ([4, 3], [5], 7)
    none = run(fixed(tokens, probabilities), 4, verify_rows=2)
    assert (none.steps, none.forwards) == (4, 4)  # no candidate fits beside D


def test_tracked_tokens_are_the_new_ones_and_the_best_scored() -> None:
    #        prompt                    answer
    layers = [[1.0, 6.0, 2.0, 6.0, 3.0] + [1.0] * 6, [9.0, 1.0, 1.0, 1.0, 1.0] + [0.5] * 4 + [7.0, 0.5]]
    tokens, probabilities = [3, 4, 5, 6, 0, 1], [0.5, 0.95, 0.95, 0.6, 0.7, 0.8]

    def tracked(**options: Any) -> tuple[Sample, list[list[int]]]:
        model = Stub(fixed(tokens, probabilities, start=5).predict, layers)
        window = {"block_length": 3, "mask_window": 3, "track_budget": 4}
        sample = run(model, 6, (1, 2, 3, 4, 5), method="flash-cache", **window, **options)
        queried = [[position for _, position in rows] for rows in model.passes]
        return sample, queried

    # Layer 0 sums to 24, layer 1 to 22.5: scores of the prompt 0.4417, 0.2944, 0.1278, 0.2944, 0.1694.
    sample, queried = tracked()
    assert [sample.record[0].scores[p] for p in range(5)] == pytest.approx(
        [a / 24 + b / 22.5 for a, b in zip(*layers, strict=True)][:5]
    )
    assert sample.record[0].tracked == [0, 1, 3, 4]
    assert sample.record[0].decoded == [6, 7] and sample.record[0].next_tracked == [6, 7, 0, 1]
    # Then 5, 8, 9 are open; 9 commits. Position 9 scores much (7 / 22.5) but only from the pass after.
    assert queried[1] == [0, 1, 5, 6, 7, 8, 9]
    assert sample.record[1].next_tracked == [9, 0, 1, 3] and 9 not in sample.record[1].scores
    assert sample.record[2].decoded == [10] and sample.record[2].next_tracked == [10, 0, 9, 1]
    assert tracked(track_layers=(0,))[0].record[0].next_tracked == [6, 7, 1, 3]
    assert tracked(track_layers=(1,))[0].record[0].next_tracked == [6, 7, 0, 1]
    assert tracked(track_layers=(1,))[0].record[0].tracked == [0, 1, 2, 3]


def test_scores_are_the_attention_of_the_window_rows() -> None:
    """Of a random model: recomputed without a cache, in every step that computed all positions."""
    model, prompt = model_and_prompt(4)
    whole: dict[str, Any] = {"block_length": 4, "mask_window": 5, "track_budget": 99, "threshold": 2.0, "gen_length": 8}
    for method in ("flash-cache", "flash-dllm-onepass"):
        sample = flash(model, prompt, method, acceptance="nothing", isolation="strict", **whole)
        for number in (0, *range(3, 8)):  # from 3 on M holds all that is masked
            step = sample.record[number]
            ids = [
                token if place < 9 or sample.commit_step[place - 9] < number else MODEL_MASK
                for place, token in enumerate(sample.ids)
            ]
            masked = [p for p in range(9, 17) if ids[p] == MODEL_MASK]
            assert step.marked == masked[:5] and (number == 0 or len(masked) <= 5)
            output = CachedLLaDA(model)([Row(token, p) for p, token in enumerate(ids)], 17, attention=True)
            expected = output.attention.mean(1)[:, step.marked].mean(1).sum(0)
            decoded = [p for p in range(17) if p not in masked]
            assert list(step.scores) == decoded
            assert list(step.scores.values()) == pytest.approx(expected[decoded].tolist(), rel=1e-4)


def test_verify_is_skipped_where_it_would_gain_less_than_a_pass() -> None:
    settings: dict[str, Any] = {"threshold": 2.0, "acceptance": "nothing", "skip_verify": True}
    probabilities = [0.5] * 8
    # Three candidates while four are open: 0.9, 0.81, 0.729, 0.6561, 0.59; then two (1.18), one (0.53), none.
    sample = run(fixed([3] * 8, probabilities), 8, **settings)
    assert [step.rate for step in sample.record] == pytest.approx([0.9**n for n in range(1, 7)] + [0.9**6 * 1.05] * 2)
    assert [len(step.candidates) for step in sample.record] == [3] * 5 + [2, 0, 0]
    assert sample.forwards == 8 + 6
    # One candidate: a failure silences it until the rate is back at 1.
    sample = run(fixed([3] * 8, probabilities), 8, block_length=2, **settings)
    assert [len(step.candidates) for step in sample.record] == [1, 0, 0, 0, 1, 0, 0, 0]
    assert sample.record[3].rate == 1.0 and sample.forwards == 8 + 2
    # Two of three accepted.
    sample = run(fixed([3, 4, 5, 6], [0.6, 0.7, 0.8, 0.9]), 4, threshold=0.85, gamma=0.65, skip_verify=True)
    assert sample.record[0].accepted == [4, 3] and sample.record[0].rate == pytest.approx(0.9 + 0.1 * 2 / 3)

    # A bonus is no accepted candidate.
    def predict(ids: list[int], p: int) -> tuple[int, float]:
        return (5, 0.9) if p == 3 and ids[2] == 3 else (4, 0.5) if p == 3 else (3, 0.8)

    sample = run(Stub(predict), 2, threshold=0.85, bonus=True, skip_verify=True)
    assert sample.rule == [R.MOST_CONFIDENT, R.BONUS] and sample.record[0].rate == pytest.approx(0.9)


def test_max_deviation_is_spent_once_for_the_whole_sequence() -> None:
    # 0.9 and 0.81 are within 0.2 of 1, 0.729 is not.
    settings: dict[str, Any] = {"threshold": 0.95, "gamma": 0.8, "isolation": "strict", "max_deviation": 0.2}
    sample = run(fixed([3] * 6, [0.9] * 6), 6, **settings)
    assert sample.commit_step == [0, 0, 0, 1, 2, 3]
    assert sample.rule == [R.MOST_CONFIDENT, R.VERIFIED, R.VERIFIED] + [R.MOST_CONFIDENT] * 3
    assert [len(step.candidates) for step in sample.record] == [3, 2, 1, 0]

    def predict(ids: list[int], p: int) -> tuple[int, float]:
        return (5, 0.9) if p == 3 and ids[2] == 3 else (3 if p == 2 else 4, 0.89)

    bonus = {"bonus": True, "threshold": 0.85, "gamma": 0.85}
    low = {**settings, **bonus, "threshold": 0.895}  # 2 alone is committed, then the bonus at 3
    for most, rule in ((0.2, R.BONUS), (0.1 - 1e-6, R.THRESHOLD)):
        sample = run(Stub(predict), 2, **{**low, "max_deviation": most})
        assert sample.rule == [R.MOST_CONFIDENT, rule] and sample.tokens == [3, 5]
    # The bonus of 0.9 leaves 0.89 * 0.9 = 0.801 to the next step's candidate, which 0.15 does not allow.
    for most, rule in ((0.2, R.VERIFIED), (0.15, R.MOST_CONFIDENT)):
        sample = run(Stub(predict), 4, **{**low, "max_deviation": most})
        assert sample.rule == [R.MOST_CONFIDENT, R.BONUS, R.MOST_CONFIDENT, rule]


def test_one_pass_by_hand() -> None:
    # Window of 2 over 5 places. The prefill commits the best of places 2 and 3, so that 3 is the only candidate.
    def predict(ids: list[int], p: int) -> tuple[int, float]:
        return {2: (3, 0.8), 3: (4, 0.85 if ids[2] == 3 else 0.6), 4: (5, 0.7), 5: (6, 0.75), 6: (0, 0.65)}[p]

    def one_pass(predict: Callable, **options: Any) -> tuple[Sample, Stub]:
        model = Stub(lambda ids, p: predict(ids, p) if p >= 2 else (0, 0.5))
        chosen = {"block_length": 2, "mask_window": 4, "gamma": 0.69, **options}
        return run(model, 5, method="flash-dllm-onepass", **chosen), model

    sample, model = one_pass(predict)
    first, second, third = sample.record[:3]
    assert first.decoded == [2] and not first.candidates and sorted(first.predictions) == [2, 3]
    # Window 3, 4. The mask view of 3 sees 2, and so does its plain view; 4 has no prediction yet.
    assert list(second.candidates) == [3] and second.candidates[3] == (4, pytest.approx(0.6))
    # It is the best there is, so that it needs no verification.
    assert (second.fallback, second.accepted) == (3, []) and sorted(second.predictions) == [3, 4, 5, 6]
    # Context, window rows that are no candidates, then plain, mask and draft view of 3.
    tracked = [(sample.ids[p], p) for p in second.tracked]
    assert model.passes[1] == [*tracked, (MASK, 4), (MASK, 5), (MASK, 6), (MASK, 3), (MASK, 3), (4, 3)]
    # Window 4, 5: both are candidates now, the more confident one first.
    assert list(third.candidates) == [5, 4] and (third.fallback, third.accepted) == (5, [4])
    assert list(sample.record[3].candidates) == [6] and sample.record[3].fallback == 6  # 0.65 < gamma
    assert sample.rule == [R.MOST_CONFIDENT, R.MOST_CONFIDENT, R.VERIFIED, R.MOST_CONFIDENT, R.MOST_CONFIDENT]
    assert sample.confidence == pytest.approx([0.8, 0.85, 0.7, 0.75, 0.65])
    assert (sample.steps, sample.forwards) == (4, 4)

    # What is the best goes first whatever gamma; what is behind it is verified with it in place.
    sure = one_pass(lambda ids, p: (5, 0.95) if (p, ids[5]) == (4, 6) else predict(ids, p), gamma=0.9)[0]
    assert (sure.record[2].fallback, sure.record[2].accepted) == (5, [4])
    # Where another prediction is better by now, the first candidate is verified like all others.
    other = one_pass(lambda ids, p: (5, 0.8) if (p, ids[3]) == (4, 4) else predict(ids, p), gamma=0.76)[0]
    assert list(other.record[2].candidates) == [5, 4]
    assert (other.record[2].fallback, other.record[2].accepted) == (4, [])
    # Nor does it go first where it is another token by now.
    changed = one_pass(lambda ids, p: (2, 0.9) if (p, ids[3]) == (5, 4) else predict(ids, p), gamma=0.76)[0]
    assert changed.record[2].candidates[5][0] == 6 and changed.record[2].fallback == 5 and changed.tokens[3] == 2
    assert list(one_pass(predict, order="position")[0].record[2].candidates) == [4, 5]
    nothing = one_pass(predict, acceptance="nothing")[0]
    assert nothing.rule == [R.MOST_CONFIDENT] * 5 and nothing.commit_step == [0, 1, 3, 2, 4]
    # Plain views that pass are committed where verify stopped, in the decode window alone.
    plain = one_pass(predict, acceptance="nothing", plain_threshold=0.69)[0]
    assert plain.rule == [R.MOST_CONFIDENT, R.PLAIN, R.PLAIN, R.PLAIN, R.MOST_CONFIDENT]
    assert plain.commit_step == [0, 1, 1, 2, 3] and plain.record[1].plain == [3, 4]


def test_one_pass_bonus_and_end() -> None:
    def predict(ids: list[int], p: int) -> tuple[int, float]:
        if p < 2:
            return 0, 0.5
        if p == 3:
            return (EOS, 0.95) if ids[2] == 3 else (4, 0.6)
        return {2: (3, 0.8), 4: (5, 0.7), 5: (6, 0.75)}[p]

    settings: dict[str, Any] = {"method": "flash-dllm-onepass", "gamma": 0.4}
    for isolation in ("paper", "strict"):
        # 5 and 4 are accepted before 3 is rejected, and its bonus ends the text before them.
        sample = run(Stub(predict), 4, bonus=True, isolation=isolation, **settings)
        assert sample.rule == [R.MOST_CONFIDENT, R.BONUS, R.VERIFIED, R.VERIFIED]
        assert sample.tokens == [3, EOS] and (sample.steps, sample.record[1].end) == (2, 4)
    # By position 3 comes first; its bonus leaves nothing before the end, also not to the plain views.
    sample = run(Stub(predict), 4, bonus=True, order="position", plain_threshold=0.6, **settings)
    assert sample.rule == [R.MOST_CONFIDENT, R.BONUS, R.NONE, R.NONE] and sample.steps == 2


def test_masks_and_eos_of_the_prompt_are_text() -> None:
    for method in ("flash-cache", "flash-dllm", "flash-dllm-onepass"):
        sample = run(fixed([MASK, 4, 5], [0.9, 0.5, 0.4], 4), 3, (1, MASK, EOS, 2), method=method, gamma=0.45)
        assert sample.tokens == [MASK, 4, 5] and sample.ids[:4] == [1, MASK, EOS, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "flash"}, "method='flash' is none of"),
        ({"isolation": "loose", "order": "random"}, "order='random'.*isolation='loose'"),
        ({"mask_window": 3}, "mask_window=3 is less than block_length=4"),
        ({"track_budget": 3}, "track_budget=3"),
        ({"plain_threshold": 0.9}, "plain_threshold=0.9 goes with flash-dllm-onepass"),
        ({"method": "flash-dllm-onepass", "verify_rows": 8}, "verify_rows=8 goes with flash-dllm alone"),
        ({"method": "flash-cache", "skip_verify": True}, "skip_verify"),
        ({"max_deviation": 0.1}, "max_deviation=0.1 goes with strict"),
        ({"temperature": 0.5}, "noise"),
    ],
)
def test_options_that_make_no_sense_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(fixed([3], [0.5]), 1, **options)
