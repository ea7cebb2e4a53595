"""Verify: candidates of the decode window, their views in a verify pass, and which of them are accepted.

A candidate is a masked position with a drafted token. In a pass it has a draft view (the draft stands there), a mask
view ([MASK] stands there, the candidates before it are decoded, those behind it masked) and perhaps a plain view
([MASK], and all other candidates masked too). Who sees whom: `pallas_kernels.Visibility`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdllm_jax.decoding import commit
from fdllm_jax.decoding.state import DecodeState, Rule, any_of
from fdllm_jax.settings import Acceptance, Isolation, Order
from pallas_kernels import HeadStatistics, Visibility
from pallas_kernels.verify_attention import DRAFT, PRIVATE, SHARED, UNDECODED

CONTEXT, DRAFT_VIEW, MASK_VIEW, PLAIN_VIEW, EMPTY = range(5)  # what a row of a verify pass is


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How candidates are verified; see `Settings` for the fields."""

    acceptance: Acceptance
    order: Order
    isolation: Isolation
    bonus: bool

    @property
    def views(self) -> int:
        """Rows of a candidate in a verify pass of its own: draft and mask view, if strict a plain view as well."""
        return 3 if self.isolation == "strict" else 2


class Candidates(NamedTuple):
    """In the order in which they are verified: where they stand, and what was drafted there.

    place: index in the decode window. A row of rank >= count is none.
    """

    place: Int[Array, "slots window"]
    position: Int[Array, "slots window"]
    draft: Int[Array, "slots window"]
    count: Int[Array, "slots"]

    @property
    def real(self) -> Bool[Array, "slots window"]:
        """Which rows are candidates."""
        return jnp.arange(self.position.shape[1])[None] < self.count[:, None]


def in_order(
    position: Int[Array, "slots window"],
    draft: Int[Array, "slots window"],
    confidence: Float[Array, "slots window"],
    eligible: Bool[Array, "slots window"],
    order: Order,
    eos_ids: tuple[int, ...],
) -> Candidates:
    """The eligible positions of the window, the most confident first (ties: the lower position), or left to right.

    Those to the right of a drafted EOS that comes before them in the order are left out: wherever all before them are
    accepted, they are behind the end.
    """
    key = confidence if order == "confidence" else jnp.zeros_like(confidence)
    rank = commit.rank(jnp.where(eligible, key, -jnp.inf))
    eos = (eligible & any_of(draft, eos_ids))[:, None]
    behind = eos & (position[:, None] < position[:, :, None]) & (rank[:, None] < rank[:, :, None])
    eligible &= ~jnp.any(behind, axis=2)
    place = inverse(commit.rank(jnp.where(eligible, key, -jnp.inf)))
    position, draft = (jnp.take_along_axis(x, place, axis=1) for x in (position, draft))
    return Candidates(place, position, draft, jnp.sum(eligible, axis=1, dtype=jnp.int32))


def inverse(permutation: Int[Array, "slots window"]) -> Int[Array, "slots window"]:
    """Where each number 0 .. window - 1 stands."""
    number = jnp.arange(permutation.shape[1])
    here = permutation[:, None] == number[None, :, None]
    return jnp.sum(jnp.where(here, number[None, None], 0), axis=2, dtype=jnp.int32)


def visibility(view: Int[Array, "slots rows"], rank: Int[Array, "slots rows"], isolation: Isolation) -> Visibility:
    """The rule for rows of the given views and ranks. What is masked to others is the mask view or the plain one."""
    strict = isolation == "strict"
    undecoded = view == (PLAIN_VIEW if strict else MASK_VIEW)
    kind = jnp.where(view == CONTEXT, SHARED, PRIVATE)
    kind = jnp.where(view == DRAFT_VIEW, DRAFT, jnp.where(undecoded, UNDECODED, kind)).astype(jnp.int32)
    after = jnp.where(view == DRAFT_VIEW, rank + 1, 0)
    is_mask = view == MASK_VIEW
    return Visibility(
        kind,
        rank,
        jnp.where(is_mask, rank, after),
        jnp.where(is_mask, rank + int(strict), after),
        is_mask if strict else jnp.zeros_like(is_mask),
    )


class Accepted(NamedTuple):
    """What became of the candidates: the rule that commits each, its token and probability; and the running numbers.

    end: moved up to behind an EOS that was committed. product: of the probabilities of all verified tokens.
    """

    rule: Int[Array, "slots window"]
    token: Int[Array, "slots window"]
    confidence: Float[Array, "slots window"]
    end: Int[Array, "slots"]
    product: Float[Array, "slots"]


def accept(
    state: DecodeState,
    candidates: Candidates,
    mask_views: HeadStatistics,
    product: Float[Array, "slots"],
    how: Verification,
    eos_ids: tuple[int, ...],
    settled: Float[Array, "slots"] | None = None,
) -> Accepted:
    """Accept in order until the rule fails first; there, perhaps, the mask view's own token is taken (the bonus).

    mask_views: in the candidates' order; its given tokens are the drafts. settled: where the first candidate's draft is
    the most confident prediction, to be committed in any case, its confidence; 0 elsewhere.
    """
    request, real = state.request, candidates.real
    draft, position, probability = candidates.draft, candidates.position, mask_views.given_probability
    own, own_probability = mask_views.token, mask_views.confidence
    assert probability is not None
    settled = jnp.zeros(len(real)) if settled is None else settled
    is_settled = real & (jnp.arange(real.shape[1]) == 0)[None] & (settled > 0)[:, None]
    # What follows holds up to the first failure, before which every candidate is accepted.
    so_far = jnp.cumprod(jnp.where(real & ~is_settled, probability, 1.0), axis=1)  # this candidate's included
    if how.acceptance == "agreement":
        passes = (own == draft) & (probability >= request.gamma[:, None])
    elif how.acceptance == "cumulative":
        passes = so_far >= request.gamma[:, None]
    else:
        passes = jnp.zeros_like(real)
    least = 1 - request.max_deviation[:, None]
    passes &= product[:, None] * so_far >= least
    failures = jnp.cumsum(real & ~(passes | is_settled), axis=1, dtype=jnp.int32)
    accepted = real & (failures == 0)
    bonus = jnp.zeros_like(real)
    if how.bonus:
        sure = jnp.maximum(request.threshold, request.gamma)[:, None]
        before = product[:, None] * _before(so_far, 1.0)
        first_failure = real & ~passes & (failures == 1)
        bonus = first_failure & (own != draft) & (own_probability >= sure) & (before * own_probability >= least)
    verified, committed = accepted & ~is_settled, accepted | bonus
    token, confidence = jnp.where(accepted, draft, own), jnp.where(accepted, probability, own_probability)
    rule = jnp.where(verified, Rule.VERIFIED, jnp.where(bonus, Rule.BONUS, Rule.NONE))
    return Accepted(
        jnp.where(is_settled, Rule.MOST_CONFIDENT, rule),
        token,
        jnp.where(is_settled, settled[:, None], confidence),
        commit.end_at_eos(state.end, position, token, committed, eos_ids),
        product * jnp.prod(jnp.where(verified | bonus, confidence, 1.0), axis=1),
    )


def _before(running: Array, first: int | float) -> Array:
    """A running value [slots, window] as it was before each candidate."""
    return jnp.pad(running[:, :-1], ((0, 0), (1, 0)), constant_values=first)


def write(state: DecodeState, candidates: Candidates, accepted: Accepted) -> DecodeState:
    """Commit what was accepted."""
    state = commit.write(state, candidates.position, accepted.token, accepted.confidence, accepted.rule)
    return replace(state, end=accepted.end)
