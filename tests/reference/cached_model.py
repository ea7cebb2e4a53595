"""Forwards of some rows of one sequence against a cache of all of its positions, in plain PyTorch.

A pass has a row for each token that it computes. Several rows may stand at one position (what if this token stood
there, what if it did not); a matrix says which rows see which. Positions that no row stands at are read from the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .model import ReferenceLLaDA, attend


@dataclass(frozen=True, slots=True)
class Row:
    """A token at a position. One that `writes` leaves its K and V in the cache."""

    token: int
    position: int
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass returns.

    logits: [rows asked for, vocab]. attention: [layers, heads, rows, kv_length], or None where it was not asked for:
    the probability that a row gives a position, to its cached k or to the rows that stand there.
    """

    logits: Tensor
    attention: Tensor | None


class CachedForward(Protocol):
    """A pass of one sequence; what the cached decoders call. `CachedLLaDA` says what it means."""

    def __call__(
        self,
        rows: Sequence[Row],
        kv_length: int,
        *,
        sees: Tensor | None = None,
        wanted: Sequence[int] | None = None,
        attention: bool = False,
    ) -> Output: ...


class CachedLLaDA:
    """A model and the cache of one sequence: per layer, position -> (rotated k, v), both [KV heads, head_dim]."""

    def __init__(self, model: ReferenceLLaDA):
        self.model = model
        self.cache: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(model.n_layers)]

    @torch.no_grad()
    def __call__(
        self,
        rows: Sequence[Row],
        kv_length: int,
        *,
        sees: Tensor | None = None,
        wanted: Sequence[int] | None = None,
        attention: bool = False,
    ) -> Output:
        """One pass.

        A row sees the cached positions below kv_length at which no row of the pass stands, and of the pass's rows those
        that `sees` [rows, rows] bool names, first index the one that looks; None is all of them. wanted: the indices of
        the rows whose logits are returned, None all. Rows that write do so after they were computed, which is the same
        as before: none of them is read from the cache in this pass.
        """
        if sees is None:
            sees = torch.ones(len(rows), len(rows), dtype=torch.bool)
        if wanted is None:
            wanted = range(len(rows))
        written = [row.position for row in rows if row.writes]
        if len(written) != len(set(written)):
            raise ValueError(f"two rows write one position: {sorted(written)}")
        held = {row.position for row in rows}
        cached = [position for position in range(kv_length) if position not in held]
        positions = torch.tensor([row.position for row in rows])
        key_positions = torch.tensor(cached + positions.tolist())
        visible = torch.cat([torch.ones(len(rows), len(cached), dtype=torch.bool), sees], dim=1)

        x = self.model.embed(torch.tensor([[row.token for row in rows]]))
        probabilities = []
        for layer in range(self.model.n_layers):
            cache = self.cache[layer]
            q, k, v = self.model.project(layer, x, positions)
            keys = torch.stack([cache[p][0] for p in cached] + list(k[0]))
            values = torch.stack([cache[p][1] for p in cached] + list(v[0]))
            mixed, of_keys = attend(q, keys[None], values[None], visible[None])
            x = self.model.finish(layer, x, mixed)
            for index, row in enumerate(rows):
                if row.writes:
                    cache[row.position] = k[0, index], v[0, index]
            if attention:
                by_position = torch.zeros(*of_keys.shape[1:3], kv_length, dtype=of_keys.dtype)
                probabilities.append(by_position.index_add(-1, key_positions, of_keys[0]))
        logits = self.model.logits(x[0, list(wanted)])
        return Output(logits, torch.stack(probabilities) if attention else None)
