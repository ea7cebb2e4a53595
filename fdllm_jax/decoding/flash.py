"""Flash-Cache and Flash-Verify: a bounded part of the cache is computed anew in every step; a second pass verifies."""

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
    visibility,
    write,
)
from fdllm_jax.model import LLaDA
from fdllm_jax.pytree import pytree
from fdllm_jax.query import partial_query

RATE_KEPT, RATE_REGAINED = 0.9, 1.05  # of the running acceptance rate: after a verify pass, and in a step without one


@pytree
class Memory:
    """What Flash-dLLM keeps between steps.

    tracked: decoded positions of the next draft, then the capacity. product: of the probabilities of all verified
    tokens. rate: running share of candidates that verify accepts.
    """

    tracked: Int[Array, "slots track_budget"]
    product: Float[Array, "slots"]
    rate: Float[Array, "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashDLLM:
    """A draft over the tracked and the masked window, its confident tokens committed, and a verify pass of the others.

    Source: Flash-dLLM (arXiv 2609.26796). The first step's draft is the prefill. verification None is Flash-Cache
    alone. verify_rows: rows of a verify pass; the context gets what the candidates' views leave. skip_verify: no pass
    for a slot where the running rate lets it expect less than one token.
    """

    block_length: int
    budgets: Budgets
    verification: Verification | None
    verify_rows: int
    skip_verify: bool
    eos_ids: tuple[int, ...]
    noisy: bool

    def memory(self, slots: int) -> Memory:
        """At the start: nothing tracked, nothing verified, and verify is worth its cost."""
        return Memory(
            tracked=track.nothing(slots, self.budgets),
            product=jnp.ones(slots, jnp.float32),
            rate=jnp.ones(slots, jnp.float32),
        )

    def step(self, model: LLaDA, state: DecodeState) -> DecodeState:
        """One denoising step of every live slot."""
        decoded_before = track.decoded(state)
        score, state, candidates = self._draft(model, state, decoded_before)
        if self.verification is not None:
            state = self._verify(model, state, self.verification, candidates, decoded_before, score)
        tracked = track.next_tracked(state, decoded_before, score, self.budgets.track_budget)
        memory = replace(state.memory, tracked=jnp.where(state.live[:, None], tracked, state.memory.tracked))
        return finish(replace(state, memory=memory))

    def _draft(
        self, model: LLaDA, state: DecodeState, decoded_before: Bool[Array, "slots capacity"]
    ) -> tuple[Array, DecodeState, Candidates]:
        """Compute T and M (at first everything), commit by threshold; the rest of the window are candidates."""
        capacity = state.tokens.shape[1]
        masked = track.masked_window(state, self.budgets)
        window = masked[:, : self.block_length]
        window = jnp.where(window < state.end[:, None], window, capacity)
        position = _one_after_the_other(state.memory.tracked, masked, capacity)
        first = state.live & (state.step == 0)
        seen, state = passes.whole_or_some(
            model, state, first, position, window, tracking=track.tracking(state, masked, self.budgets)
        )
        assert seen.scores is not None
        token, confidence, _ = passes.predict(model, state, seen.hidden, window, noisy=self.noisy)
        eligible = state.live[:, None] & (window < capacity)
        rule = commit.threshold(confidence, eligible, state.request.threshold)
        state = commit.write(state, window, token, confidence, rule)
        end = commit.end_at_eos(state.end, window, token, rule != Rule.NONE, self.eos_ids)
        left = eligible & (rule == Rule.NONE) & (window < end[:, None])
        order = "confidence" if self.verification is None else self.verification.order
        # A prefill queries everything; the best of it stand for its T.
        of_prefill = track.best(seen.scores, decoded_before, self.budgets.track_budget)
        tracked = jnp.where(first[:, None], of_prefill, state.memory.tracked)
        state = replace(state, end=end, memory=replace(state.memory, tracked=tracked))
        return seen.scores, state, in_order(window, token, confidence, left, order, self.eos_ids)

    def _verify(
        self,
        model: LLaDA,
        state: DecodeState,
        how: Verification,
        candidates: Candidates,
        decoded_before: Bool[Array, "slots capacity"],
        score: Float[Array, "slots capacity"],
    ) -> DecodeState:
        """Verify the candidates that fit, unless no slot has any."""
        memory = state.memory
        committed = track.decoded(state) & ~decoded_before
        most = jnp.maximum(0, (self.verify_rows - jnp.sum(committed, axis=1, dtype=jnp.int32)) // how.views)
        count = jnp.where(state.live, jnp.minimum(candidates.count, most), 0)
        skipped = jnp.zeros_like(state.live)
        if self.skip_verify:
            skipped = (count > 0) & (memory.rate * count.astype(jnp.float32) < 1.0)
            rate = jnp.where(skipped, jnp.minimum(1.0, RATE_REGAINED * memory.rate), memory.rate)
            state = replace(state, memory=replace(memory, rate=rate))
        candidates = candidates._replace(count=jnp.where(skipped, 0, count))
        of_draft = track.at(memory.tracked, state.tokens.shape[1])
        context = track.best(jnp.where(committed, jnp.inf, score), committed | of_draft, self.verify_rows)

        def verify(state: DecodeState) -> DecodeState:
            return self._verify_pass(model, state, how, candidates, context)

        return jax.lax.cond(jnp.any(candidates.count > 0), verify, lambda state: state, state)

    def _verify_pass(
        self,
        model: LLaDA,
        state: DecodeState,
        how: Verification,
        candidates: Candidates,
        context: Int[Array, "slots verify_rows"],
    ) -> DecodeState:
        """A pass over context and views that writes nothing, and what it accepts."""
        memory, capacity = state.memory, state.tokens.shape[1]
        contexts = jnp.sum(context < capacity, axis=1, dtype=jnp.int32)
        contexts = jnp.minimum(contexts, self.verify_rows - how.views * candidates.count)
        rows = jnp.where(candidates.count > 0, contexts + how.views * candidates.count, 0)

        # Rows of a slot: its context, then every candidate's draft view, mask view and, if strict, plain view.
        row = jnp.arange(self.verify_rows)[None]
        behind, each = row - contexts[:, None], jnp.maximum(candidates.count, 1)[:, None]
        rank = jnp.where(behind >= 0, behind % each, 0)
        view = jnp.where(behind >= 0, DRAFT_VIEW + behind // each, CONTEXT)
        view = jnp.where(row < rows[:, None], view, EMPTY)
        position = jnp.where(view == CONTEXT, context, jnp.take_along_axis(candidates.position, rank, axis=1))
        safe = jnp.minimum(position, capacity - 1)
        token = jnp.where(view == DRAFT_VIEW, jnp.take_along_axis(candidates.draft, rank, axis=1), 0)
        token = jnp.where(view == CONTEXT, jnp.take_along_axis(state.tokens, safe, axis=1), token)
        token = jnp.where((view == MASK_VIEW) | (view == PLAIN_VIEW), model.config.mask_token_id, token)
        query = partial_query(
            token,
            safe,
            rows,
            state.live_kv_length,
            capacity=capacity,
            write=jnp.zeros(token.shape, jnp.bool_),
            visibility=visibility(view, rank, how.isolation),
        )
        mask_row = (contexts + candidates.count)[:, None] + jnp.arange(self.block_length)[None]
        seen, state = passes.some(model, state, query, mask_row)

        found = passes.predict(model, state, seen.hidden, candidates.position, noisy=self.noisy, given=candidates.draft)
        accepted = accept(state, candidates, found, memory.product, how, self.eos_ids)
        verified = jnp.sum(accepted.rule == Rule.VERIFIED, axis=1, dtype=jnp.int32)
        share = verified / jnp.maximum(candidates.count, 1)
        rate = jnp.where(rows > 0, RATE_KEPT * memory.rate + (1 - RATE_KEPT) * share, memory.rate)
        state = write(state, candidates, accepted)
        return replace(state, memory=replace(memory, product=accepted.product, rate=rate))


def _one_after_the_other(
    first: Int[Array, "slots first"], second: Int[Array, "slots second"], capacity: int
) -> Int[Array, "slots rows"]:
    """The positions of both, without the gap between them: each holds its positions, then the capacity or more."""
    count = jnp.sum(first < capacity, axis=1, keepdims=True, dtype=jnp.int32)
    row = jnp.arange(first.shape[1] + second.shape[1])[None]
    of_second = jnp.take_along_axis(second, row - count, axis=1, mode="fill", fill_value=capacity)
    of_first = jnp.take_along_axis(first, jnp.minimum(row, first.shape[1] - 1), axis=1)
    return jnp.where(row < count, of_first, of_second)
