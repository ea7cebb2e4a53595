"""The forwards that decoding is made of, as queries over random tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from benchmarks import roofline
from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding.verify import CONTEXT, DRAFT_VIEW, MASK_VIEW, PLAIN_VIEW, visibility
from fdllm_jax.query import Query, packed_query, partial_query
from fdllm_jax.settings import Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of a slot, in tokens: its sequence's and its own. Rows of a pass: tracked, masked, and of the decode window."""

    prompt: int = 700
    response: int = 256
    capacity: int = 1024
    tracked: int = 64
    masked: int = 64
    block: int = 16
    isolation: Isolation = "paper"


class Part(NamedTuple):
    """A forward: its query, the rows whose logits are wanted, and what it cannot do without."""

    name: str
    query: Query
    wanted: Int[Array, "wanted"]
    work: roofline.Work


PARTS = ("draft", "draft without scores", "verify", "one-pass", "block", "prefill")


def shape_of(config: ModelConfig) -> roofline.Shape:
    """The sizes that decide floors."""
    return roofline.Shape(
        d_model=config.d_model, heads=config.n_heads, head_dim=config.head_dim, mlp=config.mlp_size,
        vocab=config.vocab_size, layers=config.n_layers,
    )  # fmt: skip


def parts(config: ModelConfig, slots: int, lengths: Lengths) -> list[Part]:
    """The forwards of `slots` sequences: all of PARTS, in their order, but the prefill."""
    rng = np.random.default_rng(slots)
    block, length, shape = lengths.block, lengths.prompt + lengths.response, shape_of(config)
    kv_length = jnp.full(slots, length, jnp.int32)
    tracked = np.stack([rng.permutation(lengths.prompt)[: lengths.tracked] for _ in range(slots)])
    contexts = tracked.shape[1]
    masked = lengths.prompt + np.arange(min(lengths.masked, lengths.response))
    masked = np.broadcast_to(masked, (slots, len(masked)))

    def part(name: str, position: np.ndarray, first: int, count: int, **more: Any) -> Part:
        """Rows at `position`, of which `count` from `first` on are wanted."""
        rows = position.shape[1]
        token = jnp.asarray(rng.integers(0, config.vocab_size, position.shape), jnp.int32)
        query = partial_query(
            token, jnp.asarray(position, jnp.int32), jnp.full(slots, rows, jnp.int32), kv_length,
            capacity=lengths.capacity, **more,
        )  # fmt: skip
        wanted = (jnp.arange(slots)[:, None] * rows + first + jnp.arange(count)[None]).reshape(-1)
        work = roofline.forward(shape, rows=rows, slots=slots, kv_length=length, head_rows=count)
        return Part(name, query, wanted, work)

    def views(*counts: tuple[int, int]) -> tuple[Array, Array]:
        """View and rank of rows given as (view, count)."""
        view = np.concatenate([np.full(count, view) for view, count in counts])
        rank = np.concatenate([np.arange(count) if view != CONTEXT else np.zeros(count) for view, count in counts])
        view, rank = (np.broadcast_to(x, (slots, len(x))) for x in (view, rank))
        return jnp.asarray(view, jnp.int32), jnp.asarray(rank, jnp.int32)

    draft = np.concatenate([tracked, masked], axis=1)
    in_window = jnp.broadcast_to(jnp.arange(draft.shape[1])[None] >= contexts, draft.shape)
    window = masked[:, :block]
    block = window.shape[1]
    strict = lengths.isolation == "strict"
    of_verify = [(DRAFT_VIEW, block), (MASK_VIEW, block), *([(PLAIN_VIEW, block)] if strict else [])]
    verify = np.concatenate([window] * len(of_verify), axis=1)
    in_place, apart = (PLAIN_VIEW, MASK_VIEW) if strict else (MASK_VIEW, PLAIN_VIEW)
    view, rank = views(
        (in_place, block), (CONTEXT, masked.shape[1] - block), (apart, block), (DRAFT_VIEW, block), (CONTEXT, contexts)
    )
    plain = (view == PLAIN_VIEW) | ((view == CONTEXT) & (jnp.arange(view.shape[1])[None] < masked.shape[1]))
    return [
        part("draft", draft, contexts, block, scored=in_window),
        part("draft without scores", draft, contexts, block),
        part(
            "verify", verify, block, block, visibility=visibility(*views(*of_verify), lengths.isolation),
            write=jnp.zeros(verify.shape, jnp.bool_),
        ),
        part(
            "one-pass", np.concatenate([masked, window, window, tracked], axis=1), 0, 3 * block,
            visibility=visibility(view, rank, lengths.isolation), write=(view == CONTEXT) | (view == PLAIN_VIEW),
            scored=plain,
        ),
        part("block", window, 0, block),
    ]  # fmt: skip


def prefill(config: ModelConfig, slots: int, lengths: Lengths) -> Part:
    """The packed pass over whole sequences."""
    rows, position = lengths.prompt + lengths.response, jnp.arange(lengths.capacity)[None]
    token = jax.random.randint(jax.random.key(1), (slots, lengths.capacity), 0, config.vocab_size, jnp.int32)
    scored = (position >= lengths.prompt) & (position < lengths.prompt + lengths.masked)
    query, first = packed_query(
        token,
        jnp.full(slots, rows, jnp.int32),
        rows=slots * rows,
        scored=jnp.broadcast_to(scored, token.shape),
        most_scored=lengths.masked,
    )
    wanted = (first[:, None] + lengths.prompt + jnp.arange(lengths.block)[None]).reshape(-1)
    shape = shape_of(config)
    return Part("prefill", query, wanted, roofline.forward(shape, rows=rows, slots=slots, kv_length=rows))
