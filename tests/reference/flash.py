"""Flash-Cache, Flash-Verify and one-pass verify of one sequence, in plain Python (arXiv 2609.26796 and one-pass, ours).

A row of a verify pass is one of four kinds of key: shared, draft, undecoded or private (`View`). Positions are those of
the sequence, prompt included. A `Step` tells of each denoising step what was asked, predicted, committed and kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cached_model import CachedForward, Row
from .sampler import Rule, Sample, State, passing, predict

Prediction = tuple[int, float]  # a token and its probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to decode.

    method: "flash-cache", "flash-dllm" (draft, then verify) or "flash-dllm-onepass". block_length (β): places of the
    decode window. mask_window (β_m), track_budget (β_t): masked and decoded positions that a pass computes anew.
    threshold (ε), gamma (γ): what a draft must reach to be committed unseen, and verified. acceptance: "agreement",
    "cumulative" or "nothing". order of the candidates: "confidence" or "position". isolation: "paper" or "strict".
    verify_rows: rows of a verify pass (flash-dllm; None: 2β, strict 3β). track_layers: layers whose attention is
    counted (None: all). bonus: commit what the mask view predicts where it rejects. plain_threshold: what a plain
    prediction must reach to be committed (onepass; None: never). skip_verify: no verify pass where few candidates would
    be accepted (flash-dllm). max_deviation: what the product of the verified tokens' probabilities may fall short of 1
    (None: anything). noise(position) -> [vocab]: the Gumbel noise of temperature > 0.
    """

    method: str
    block_length: int = 16
    mask_window: int = 64
    track_budget: int = 64
    threshold: float = 0.9
    gamma: float = 0.8
    acceptance: str = "agreement"
    order: str = "confidence"
    isolation: str = "paper"
    verify_rows: int | None = None
    track_layers: tuple[int, ...] | None = None
    bonus: bool = False
    plain_threshold: float | None = None
    skip_verify: bool = False
    max_deviation: float | None = None
    temperature: float = 0.0
    noise: Callable[[int], Tensor] | None = None

    def __post_init__(self) -> None:
        def faults():
            for name, values in (
                ("method", ("flash-cache", "flash-dllm", "flash-dllm-onepass")),
                ("acceptance", ("agreement", "cumulative", "nothing")),
                ("order", ("confidence", "position")),
                ("isolation", ("paper", "strict")),
            ):
                if getattr(self, name) not in values:
                    yield f"{name}={getattr(self, name)!r} is none of {', '.join(values)}"
            for name in ("mask_window", "track_budget"):
                if getattr(self, name) < self.block_length:
                    yield f"{name}={getattr(self, name)} is less than block_length={self.block_length}"
            for name, method in (
                ("verify_rows", "flash-dllm"),
                ("skip_verify", "flash-dllm"),
                ("plain_threshold", "flash-dllm-onepass"),
            ):
                if getattr(self, name) not in (None, False) and self.method != method:
                    yield f"{name}={getattr(self, name)} goes with {method} alone"
            exact = self.isolation == "strict" and self.acceptance == "agreement" and self.temperature == 0
            if self.max_deviation is not None and not exact:
                yield f"max_deviation={self.max_deviation} goes with strict isolation, agreement and temperature 0"
            if (self.temperature > 0) != (self.noise is not None):
                yield f"noise goes with a temperature above 0, got {self.temperature=}, {self.noise=}"

        if found := list(faults()):
            raise ValueError("; ".join(found))


@dataclass(slots=True, kw_only=True)
class MaskView:
    """What a candidate's mask view says: its own prediction, and the draft's probability there."""

    prediction: Prediction
    draft: Prediction


@dataclass(slots=True, kw_only=True)
class Step:
    """A denoising step.

    tracked: T as the step's first pass had it (of a prefill, the prompt's best-scored positions). marked: M. window:
    the decode window. predictions: of the window by the draft, or of up to twice as many places by one-pass's plain
    views. decoded: D. candidates: those that were verified, in order, with their drafts. context: the decoded positions
    with a row in the pass that verifies. mask_views: by candidate. accepted, bonus, plain, fallback: what else was
    committed. scores: by decoded position. next_tracked: T of the next step. end, rate: after the step.
    """

    tracked: list[int]
    marked: list[int]
    window: list[int]
    predictions: dict[int, Prediction] = field(default_factory=dict)
    decoded: list[int] = field(default_factory=list)
    candidates: dict[int, Prediction] = field(default_factory=dict)
    context: list[int] = field(default_factory=list)
    mask_views: dict[int, MaskView] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    bonus: int | None = None
    plain: list[int] = field(default_factory=list)
    fallback: int | None = None
    scores: dict[int, float] = field(default_factory=dict)
    next_tracked: list[int] = field(default_factory=list)
    end: int = 0
    rate: float = 1.0


# --- the rows of a verify pass ---


@dataclass(frozen=True, slots=True)
class View:
    """A row and whom it sees: shared rows, drafts of rank < drafts_below, undecoded rows of rank >= undecoded_from.

    kind, rank: what it is to others: "shared", "draft" or "undecoded" (with a rank), or "private". sees_self: it sees
    itself too, whatever it is.
    """

    row: Row
    kind: str
    rank: int = 0
    drafts_below: int = 0
    undecoded_from: int = 0
    sees_self: bool = False


def shared_view(token: int, position: int, *, writes: bool) -> View:
    """A context row, or a window row that is no candidate."""
    return View(Row(token, position, writes), "shared")


def draft_view(token: int, position: int, rank: int) -> View:
    """The candidate of that rank, decoded as drafted; those before it are too."""
    return View(Row(token, position, False), "draft", rank, rank + 1, rank + 1)


def mask_view(mask_id: int, position: int, rank: int, isolation: str) -> View:
    """The candidate of that rank, still masked, as are those after it; those before it are decoded."""
    if isolation == "paper":
        return View(Row(mask_id, position, False), "undecoded", rank, rank, rank)
    return View(Row(mask_id, position, False), "private", 0, rank, rank + 1, sees_self=True)


def plain_view(mask_id: int, position: int, rank: int, isolation: str, *, writes: bool) -> View:
    """The candidate of that rank, masked like all others. The paper's isolation lets nobody see it, itself included."""
    if isolation == "paper":
        return View(Row(mask_id, position, writes), "private")
    return View(Row(mask_id, position, writes), "undecoded", rank)


def visibility(views: Sequence[View]) -> Tensor:
    """Which view sees which: [views, views] bool, first index the one that looks."""
    sees = torch.zeros(len(views), len(views), dtype=torch.bool)
    for i, query in enumerate(views):
        for j, key in enumerate(views):
            sees[i, j] = (
                key.kind == "shared"
                or (key.kind == "draft" and key.rank < query.drafts_below)
                or (key.kind == "undecoded" and key.rank >= query.undecoded_from)
                or (i == j and query.sees_self)
            )
    return sees


# --- decoding ---


def generate_flash(
    forward: CachedForward,
    prompt: Sequence[int],
    *,
    mask_id: int,
    eos_ids: Sequence[int],
    gen_length: int,
    options: Options,
) -> Sample:
    """Decode one sequence with the cache of `forward`, which the first pass fills.

    forwards counts the passes in which the sequence had rows. The confidence of a place is the probability that its
    token had where it was committed: in the draft, the mask view or the plain view. record: a `Step` a step.
    """
    decoder = _Decoder(forward, State(prompt, gen_length, mask_id), mask_id, eos_ids, options)
    while decoder.window():
        decoder.denoise()
    sample = decoder.state.sample(eos_ids, steps=len(decoder.record), forwards=decoder.forwards)
    sample.record.extend(decoder.record)
    return sample


class _Decoder:
    def __init__(self, forward: CachedForward, state: State, mask_id: int, eos_ids: Sequence[int], options: Options):
        self.forward, self.state, self.mask_id, self.eos_ids, self.options = forward, state, mask_id, eos_ids, options
        self.total = len(state.ids)
        self.end = self.total  # what stands from here on is not decoded
        self.tracked: list[int] = []
        self.plain: dict[int, Prediction] = {}  # one-pass: predictions of places still open, from the last pass
        self.product = 1.0  # of the probabilities of all verified tokens (max_deviation)
        self.rate = 1.0  # of acceptance (skip_verify)
        self.forwards = 0
        self.record: list[Step] = []

    def window(self) -> list[int]:
        return self.state.open_before(self.end)[: self.options.block_length]

    def denoise(self) -> None:
        first = not self.record
        step = Step(
            tracked=self.tracked,
            marked=self.state.open_before(self.total)[: self.options.mask_window],
            window=self.window(),
        )
        self.record.append(step)
        if self.options.method == "flash-dllm-onepass" and not first:
            self.verify_and_draft(step)
        else:
            self.draft(step, everything=first)
            if self.options.method == "flash-dllm":
                self.verify(step)
        committed = sorted(p for p in range(self.total) if self.committed_now(p))
        best = _by_score(step.scores)
        self.tracked = step.next_tracked = (committed + best)[: self.options.track_budget]
        step.end, step.rate = self.end, self.rate

    def committed_now(self, position: int) -> bool:
        place = position - self.state.start
        return place >= 0 and self.state.commit_step[place] == len(self.record) - 1

    def commit(self, position: int, prediction: Prediction, rule: Rule) -> None:
        self.state.commit(position, prediction, len(self.record) - 1, rule)
        if prediction[0] in self.eos_ids:
            self.end = min(self.end, position + 1)

    def predict(self, logits: Tensor, position: int) -> Prediction:
        noise = self.options.noise
        return predict(logits.float(), self.options.temperature, noise(position) if noise else None)

    def scores(self, attention: Tensor, marked_rows: Sequence[int]) -> dict[int, float]:
        """Tracking scores of all decoded positions: equation 2. attention: [layers, heads, rows, positions]."""
        layers = self.options.track_layers
        chosen = attention if layers is None else attention[list(layers)]
        scores = chosen[:, :, list(marked_rows)].mean(dim=(1, 2)).sum(dim=0)
        return {p: float(scores[p]) for p in range(self.total) if not self.state.is_open[p]}

    def draft(self, step: Step, *, everything: bool) -> None:
        """Compute T and M, or everything; commit what reaches the threshold, or the best."""
        queried = list(range(self.total)) if everything else sorted([*step.tracked, *step.marked])
        output = self.forward(
            [Row(self.state.ids[p], p) for p in queried],
            self.total,
            wanted=[queried.index(p) for p in step.window],
            attention=True,
        )
        self.forwards += 1
        step.scores = self.scores(output.attention, [queried.index(p) for p in step.marked])
        if everything:
            step.tracked = _by_score(step.scores)[: self.options.track_budget]
        for logits, position in zip(output.logits, step.window, strict=True):
            step.predictions[position] = self.predict(logits, position)
        for position, rule in passing(step.predictions, self.options.threshold).items():
            self.commit(position, step.predictions[position], rule)
            step.decoded.append(position)
        self.plain = step.predictions

    def in_order(self, predictions: dict[int, Prediction]) -> dict[int, Prediction]:
        """The same, in the order in which they are verified, without those that an EOS before them would leave out."""
        by_confidence = self.options.order == "confidence"
        chosen, end = {}, self.total
        for p in sorted(predictions, key=lambda p: (-predictions[p][1] if by_confidence else 0.0, p)):
            if p < end:
                chosen[p] = predictions[p]
                end = p + 1 if predictions[p][0] in self.eos_ids else end
        return chosen

    def verify(self, step: Step) -> None:
        """Verify in a pass of its own, which writes nothing."""
        isolation = self.options.isolation
        views_each = 2 if isolation == "paper" else 3
        budget = self.options.verify_rows
        if budget is None:
            budget = views_each * self.options.block_length
        most = max(0, (budget - len(step.decoded)) // views_each)
        left = {p: step.predictions[p] for p in step.window if self.state.is_open[p] and p < self.end}
        candidates = dict(list(self.in_order(left).items())[:most])
        if not candidates:
            return
        if self.options.skip_verify and self.rate * len(candidates) < 1.0:
            self.rate = min(1.0, self.rate * 1.05)
            return
        step.candidates = candidates
        best = _by_score({p: step.scores[p] for p in step.tracked})
        step.context = (step.decoded + best)[: budget - views_each * len(candidates)]

        views = [shared_view(self.state.ids[p], p, writes=False) for p in step.context]
        views += [draft_view(draft, p, rank) for rank, (p, (draft, _)) in enumerate(candidates.items())]
        if isolation == "strict":
            views += [plain_view(self.mask_id, p, rank, isolation, writes=False) for rank, p in enumerate(candidates)]
        views += [mask_view(self.mask_id, p, rank, isolation) for rank, p in enumerate(candidates)]
        mask_rows = range(len(views) - len(candidates), len(views))
        output = self.forward([view.row for view in views], self.total, sees=visibility(views), wanted=mask_rows)
        self.forwards += 1
        self.accept(step, dict(zip(candidates, output.logits, strict=True)))
        self.rate = 0.9 * self.rate + 0.1 * (len(step.accepted) / len(candidates))

    def accept(self, step: Step, mask_logits: dict[int, Tensor]) -> None:
        """Commit candidates in order while they pass, then the bonus token; a committed one is what it is."""
        options = self.options
        so_far = 1.0
        for position, (token, _) in step.candidates.items():
            own = self.predict(mask_logits[position], position)
            draft = token, float(mask_logits[position].float().softmax(-1)[token])
            step.mask_views[position] = MaskView(prediction=own, draft=draft)
        for position, view in step.mask_views.items():
            if not self.state.is_open[position]:
                continue
            token, probability = view.draft
            if options.acceptance == "agreement":
                passes = view.prediction[0] == token and probability >= options.gamma
            elif options.acceptance == "cumulative":
                passes = so_far * probability >= options.gamma
            else:
                passes = False
            if passes and self.is_within_deviation(probability):
                self.commit(position, view.draft, Rule.VERIFIED)
                step.accepted.append(position)
                so_far *= probability
                self.product *= probability
                continue
            token, probability = view.prediction
            sure = token != view.draft[0] and probability >= max(options.threshold, options.gamma)
            if options.bonus and sure and self.is_within_deviation(probability):
                self.commit(position, view.prediction, Rule.BONUS)
                step.bonus = position
                self.product *= probability
            return

    def is_within_deviation(self, probability: float) -> bool:
        most = self.options.max_deviation
        return most is None or self.product * probability >= 1 - most

    def verify_and_draft(self, step: Step) -> None:
        """The pass of one-pass verify: candidates of the last one's plain predictions, and new plain predictions."""
        isolation = self.options.isolation
        step.candidates = self.in_order({p: self.plain[p] for p in step.window if p in self.plain})
        step.context = step.tracked
        # Who is looked at for a plain prediction and writes the cache, and who for a mask view, by position.
        plain_rows, mask_rows = {}, {}
        views = [shared_view(self.state.ids[p], p, writes=True) for p in step.context]
        for position in step.marked:
            if position not in step.candidates:
                plain_rows[position] = len(views)
                views.append(shared_view(self.mask_id, position, writes=True))
        for rank, (position, (draft, _)) in enumerate(step.candidates.items()):
            plain_rows[position], mask_rows[position] = len(views), len(views) + 1
            views.append(plain_view(self.mask_id, position, rank, isolation, writes=True))
            views.append(mask_view(self.mask_id, position, rank, isolation))
            views.append(draft_view(draft, position, rank))
        output = self.forward([view.row for view in views], self.total, sees=visibility(views), attention=True)
        self.forwards += 1
        step.scores = self.scores(output.attention, [plain_rows[p] for p in step.marked])
        for position in self.state.open_before(self.end)[: 2 * self.options.block_length]:
            if position in plain_rows:
                step.predictions[position] = self.predict(output.logits[plain_rows[position]], position)
        self.plain = step.predictions

        least = self.options.plain_threshold
        passing_now = [p for p in step.window if least is not None and step.predictions[p][1] >= least]
        best = self.most_confident(step, step.window)
        goes_first = list(step.candidates)[:1] == [best] and step.candidates[best][0] == step.predictions[best][0]
        if goes_first and not passing_now:
            self.fall_back(step, best)  # the mask views behind it have seen just that
        self.accept(step, {p: output.logits[row] for p, row in mask_rows.items()})
        left = [p for p in step.window if self.state.is_open[p] and p < self.end]
        for position in left:
            if position in passing_now:
                self.commit(position, step.predictions[position], Rule.PLAIN)
                step.plain.append(position)
        if not step.accepted and step.bonus is None and not step.plain and step.fallback is None:
            self.fall_back(step, self.most_confident(step, left))

    def most_confident(self, step: Step, positions: Sequence[int]) -> int:
        """Of those positions the one with the most confident prediction; ties go to the lower one."""
        return min(positions, key=lambda p: (-step.predictions[p][1], p))

    def fall_back(self, step: Step, position: int) -> None:
        """Commit a prediction that nothing speaks for but that it is the best."""
        step.fallback = position
        self.commit(position, step.predictions[position], Rule.MOST_CONFIDENT)


def _by_score(scores: dict[int, float]) -> list[int]:
    """Positions by score, descending; ties go to the lower position."""
    return sorted(scores, key=lambda p: (-scores[p], p))
