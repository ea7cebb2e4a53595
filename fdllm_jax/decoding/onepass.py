"""One-pass verify: one forward a step verifies the last step's predictions and makes the next step's."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.decoding import commit, passes, track
from fdllm_jax.decoding.state import DecodeState, Rule, finish
from fdllm_jax.decoding.track import Budgets
from fdllm_jax.decoding.verify import (
    CONTEXT,
    DRAFT_VIEW,
    EMPTY,
    MASK_VIEW,
    PLAIN_VIEW,
    Candidates,
    Verification,
    accept,
    in_order,
    inverse,
    visibility,
    write,
)
from fdllm_jax.model import LLaDA
from fdllm_jax.pytree import pytree
from fdllm_jax.query import partial_query
from pallas_kernels import HeadStatistics


@pytree
class Plain:
    """Predictions of masked positions with nothing drafted anywhere; a row without one has the position -1."""

    position: Int[Array, "slots predicted"]
    token: Int[Array, "slots predicted"]
    confidence: Float[Array, "slots predicted"]


@pytree
class Memory:
    """What one-pass verify keeps between steps.

    tracked: decoded positions of the next pass, then the capacity. product: of the probabilities of all verified
    tokens. plain: the last pass's predictions, the next pass's drafts.
    """

    tracked: Int[Array, "slots track_budget"]
    product: Float[Array, "slots"]
    plain: Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePass:
    """Each pass holds the tracked positions, the masked window, and two more rows for each candidate.

    A candidate is a position of the decode window that the last pass predicted. Its row of the masked window is its
    mask view under isolation "paper", its plain view under "strict"; the draft view and the other one are the two more.
    Accepted candidates are committed, then plain predictions of at least `plain_threshold`; if there is neither, the
    most confident plain prediction. Where that is the first candidate, it is committed in any case and verification
    begins behind it. The first pass is the prefill, which commits by threshold.
    """

    block_length: int
    budgets: Budgets
    verification: Verification
    eos_ids: tuple[int, ...]
    noisy: bool

    @property
    def predicted(self) -> int:
        """Masked positions that a pass predicts: those of this decode window, and as many behind it for the next."""
        return min(2 * self.block_length, self.budgets.mask_window)

    def memory(self, slots: int) -> Memory:
        """At the start: nothing tracked, verified or predicted."""
        return Memory(
            tracked=track.nothing(slots, self.budgets),
            product=jnp.ones(slots, jnp.float32),
            plain=Plain(
                position=jnp.full((slots, self.predicted), -1, jnp.int32),
                token=jnp.zeros((slots, self.predicted), jnp.int32),
                confidence=jnp.zeros((slots, self.predicted), jnp.float32),
            ),
        )

    def step(self, model: LLaDA, state: DecodeState) -> DecodeState:
        """One denoising step of every live slot: the prefill of those that are new, a pass of the others."""
        capacity, width = state.tokens.shape[1], self.block_length
        first, later = state.live & (state.step == 0), state.live & (state.step > 0)
        decoded_before = track.decoded(state)
        masked = track.masked_window(state, self.budgets)
        plain_at = jnp.where(masked < state.end[:, None], masked, capacity)[:, : self.predicted]
        window = plain_at[:, :width]
        candidates = self._candidates(state.memory.plain, window, later, capacity)

        seen, state = self._passes(model, state, candidates, masked, window, first, later)
        found = passes.predict(
            model,
            state,
            seen.hidden,
            jnp.concatenate([candidates.position, plain_at], axis=1),
            noisy=self.noisy,
            given=jnp.pad(candidates.draft, ((0, 0), (0, self.predicted))),
        )
        assert found.given_probability is not None
        mask_views = HeadStatistics(
            found.token[:, :width], found.confidence[:, :width], found.given_probability[:, :width]
        )
        token, confidence = found.token[:, width:], found.confidence[:, width:]
        predicted = (plain_at < capacity) & (later[:, None] | (jnp.arange(self.predicted)[None] < width))

        settled = self._settled(state, candidates, window, token[:, :width], confidence[:, :width])
        accepted = accept(state, candidates, mask_views, state.memory.product, self.verification, self.eos_ids, settled)
        state = write(state, candidates, accepted)
        rule = self._rule(state, window, confidence[:, :width], first, jnp.any(accepted.rule != Rule.NONE, axis=1))
        state = commit.write(state, window, token[:, :width], confidence[:, :width], rule)
        end = commit.end_at_eos(state.end, window, token[:, :width], rule != Rule.NONE, self.eos_ids)

        assert seen.scores is not None
        new = Memory(
            tracked=track.next_tracked(state, decoded_before, seen.scores, self.budgets.track_budget),
            product=accepted.product,
            plain=Plain(position=jnp.where(predicted, plain_at, -1), token=token, confidence=confidence),
        )
        memory = jax.tree.map(
            lambda new, old: jnp.where(state.live.reshape(-1, *(1,) * (new.ndim - 1)), new, old), new, state.memory
        )
        return finish(replace(state, end=end, memory=memory))

    def _candidates(
        self,
        plain: Plain,
        window: Int[Array, "slots window"],
        later: Bool[Array, "slots"],
        capacity: int,
    ) -> Candidates:
        """The positions of the window that the last pass predicted."""
        same = window[:, :, None] == plain.position[:, None]
        index = jnp.argmax(same, axis=-1)
        draft, confidence = (jnp.take_along_axis(x, index, axis=1) for x in (plain.token, plain.confidence))
        eligible = later[:, None] & (window < capacity) & jnp.any(same, axis=-1)
        return in_order(window, draft, confidence, eligible, self.verification.order, self.eos_ids)

    def _passes(
        self,
        model: LLaDA,
        state: DecodeState,
        candidates: Candidates,
        masked: Int[Array, "slots mask_window"],
        window: Int[Array, "slots window"],
        first: Bool[Array, "slots"],
        later: Bool[Array, "slots"],
    ) -> tuple[passes.Seen, DecodeState]:
        """Activations of each candidate's mask view, in order, then of the positions to predict; and the scores.

        In the rows of a new slot stand those of its decode window.
        """
        capacity, width, strict = state.tokens.shape[1], self.block_length, self.verification.isolation == "strict"
        tracking = track.tracking(state, masked, self.budgets)
        prefill, state = passes.whole(model, state, first, jnp.minimum(window, capacity - 1), tracking=tracking)

        # Rows of a slot: the masked window, the candidates' views that are not in it, their draft views, the tracked
        # positions. So those whose attention is counted come first.
        tracked = state.memory.tracked
        others = jnp.sum(masked < capacity, axis=1, dtype=jnp.int32)[:, None]
        count = candidates.count[:, None]
        drafts = others + count
        contexts = drafts + count
        total = contexts + jnp.sum(tracked < capacity, axis=1, dtype=jnp.int32)[:, None]
        row = jnp.arange(self.budgets.track_budget + self.budgets.mask_window + 2 * width)[None]
        of_place = inverse(candidates.place)  # the rank of each place of the decode window
        of_place = jnp.pad(
            of_place, ((0, 0), (0, masked.shape[1] - width)), constant_values=width
        )  # behind the window there is no candidate

        def take(values: Array, index: Array) -> Array:
            return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)

        rank_of_place = take(of_place, row)
        in_place, apart = (PLAIN_VIEW, MASK_VIEW) if strict else (MASK_VIEW, PLAIN_VIEW)
        view = jnp.where(row < total, CONTEXT, EMPTY)
        view = jnp.where(row < contexts, DRAFT_VIEW, view)
        view = jnp.where(row < drafts, apart, view)
        view = jnp.where(row < others, jnp.where(rank_of_place < count, in_place, CONTEXT), view)
        rank = jnp.where(row < others, rank_of_place, jnp.where(row < drafts, row - others, row - drafts))
        rank = jnp.clip(rank, 0, width - 1)

        position = jnp.where(row < contexts, take(candidates.position, rank), take(tracked, row - contexts))
        position = jnp.where(row < others, take(masked, row), position)
        position = jnp.minimum(position, capacity - 1)
        token = jnp.where(row < contexts, model.config.mask_token_id, take(state.tokens, position))
        token = jnp.where(view == DRAFT_VIEW, take(candidates.draft, rank), token)
        query = partial_query(
            token,
            position,
            jnp.where(later, total[:, 0], 0),
            state.live_kv_length,
            capacity=capacity,
            write=(view == CONTEXT) | (view == PLAIN_VIEW),
            visibility=visibility(view, rank, self.verification.isolation),
            scored=(view == PLAIN_VIEW) | ((view == CONTEXT) & (row < others)),
            track_layers=self.budgets.track_layers,
        )
        ranks = jnp.arange(width)[None]
        mask_row = others + ranks if strict else candidates.place
        plain_row = jnp.broadcast_to(jnp.arange(self.predicted)[None], (len(others), self.predicted))
        if not strict:
            rank_of_place = of_place[:, : self.predicted]
            plain_row = jnp.where(rank_of_place < count, others + rank_of_place, plain_row)
        seen, state = passes.some_if_any(model, state, query, jnp.concatenate([mask_row, plain_row], axis=1))

        of_prefill = jnp.pad(prefill.hidden, ((0, 0), (width, self.predicted - width), (0, 0)))
        assert prefill.scores is not None and seen.scores is not None
        hidden = jnp.where(first[:, None, None], of_prefill, seen.hidden)
        return passes.Seen(hidden, prefill.scores + seen.scores), state

    def _settled(
        self,
        state: DecodeState,
        candidates: Candidates,
        window: Int[Array, "slots window"],
        token: Int[Array, "slots window"],
        confidence: Float[Array, "slots window"],
    ) -> Float[Array, "slots"]:
        """Confidence of the first candidate where it needs no verification, 0 elsewhere.

        That is where its draft is the most confident plain prediction of the window now too, and no prediction passes
        the plain threshold: then it would be committed anyway, and what is verified behind it has seen it.
        """
        is_open = state.live[:, None] & (window < state.end[:, None])
        best = commit.most_confident(confidence, is_open) & (confidence < state.request.plain_threshold[:, None])
        place, draft = candidates.place[:, :1], candidates.draft[:, :1]
        is_best, its_token, its_confidence = (
            jnp.take_along_axis(x, place, axis=1)[:, 0] for x in (best, token, confidence)
        )
        return jnp.where(is_best & (its_token == draft[:, 0]), its_confidence, 0.0)

    def _rule(
        self,
        state: DecodeState,
        window: Int[Array, "slots window"],
        confidence: Float[Array, "slots window"],
        first: Bool[Array, "slots"],
        any_accepted: Bool[Array, "slots"],
    ) -> Int[Array, "slots window"]:
        """What commits the plain predictions of what is left of the window."""
        is_open = jnp.take_along_axis(state.masked, window, axis=1, mode="fill", fill_value=False)
        left = state.live[:, None] & is_open & (window < state.end[:, None])
        passing = left & (confidence >= state.request.plain_threshold[:, None])
        none_yet = ~(any_accepted | jnp.any(passing, axis=1))
        fallback = none_yet[:, None] & commit.most_confident(confidence, left)
        rule = jnp.where(passing, Rule.PLAIN, jnp.where(fallback, Rule.MOST_CONFIDENT, Rule.NONE))
        return jnp.where(first[:, None], commit.threshold(confidence, left, state.request.threshold), rule)
