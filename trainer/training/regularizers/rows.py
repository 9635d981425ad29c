"""Lookup of a batch's rows once for all forward passes of a step, in a module that hooks can reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from trainer.models.base import RankingModel


LookedUp: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
"""Output of embedding tables: pooled rows of all features in one tensor, or the rows of sequences by feature."""


class RowsOnce(nn.Module):
    """Stand-in for a model's ``embeddings`` while a step's loss is computed: it looks rows up once for each batch.

    So ranks exchange ids, rows and gradients once, and backward records gradients once, for any number of forward
    passes.

    Attributes:
        vectors: an identity module for hooks. If ``hooked``, pooled rows pass through it in each forward pass, as
            [b, features times dim]: only the vectors, without columns after them such as biases.
    """

    def __init__(self, embeddings: nn.Module, dim: int, *, hooked: bool):
        super().__init__()
        # In a tuple: as a submodule, its parameters would be registered twice.
        self._embeddings, self._dim, self._hooked = (embeddings,), dim, hooked
        self.vectors = nn.Identity()
        self._lookups: list[tuple[KeyedJaggedTensor, LookedUp]] = []

    def forward(self, features: KeyedJaggedTensor) -> LookedUp:
        rows = self.looked_up(features)
        if not self._hooked or not isinstance(rows, KeyedTensor):
            return rows
        values, lengths = rows.values(), rows.length_per_key()
        if all(length == self._dim for length in lengths):
            values = self.vectors(values)
        else:
            columns = torch.cat([
                torch.arange(end - length, end - length + self._dim)
                for end, length in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True)
            ]).to(values.device)  # fmt: skip
            values = values.index_copy(1, columns, self.vectors(values[:, columns]))
        return KeyedTensor(rows.keys(), lengths, values)

    def looked_up(self, features: KeyedJaggedTensor) -> LookedUp:
        """Return the tables' output for ``features``: a KeyedTensor, or {feature: JaggedTensor}."""
        for asked, rows in self._lookups:
            if asked is features:
                return rows
        rows = self._embeddings[0](features)
        # Sharded tables return an awaitable of rows, to be waited for once.
        rows = rows.wait() if hasattr(rows, "wait") else rows
        self._lookups.append((features, rows))
        return rows

    def squares(self) -> Tensor:
        """Return for each sample [b] the sum of |e|^2 over everything looked up: pooled rows, or rows of sequences."""
        total: Tensor | None = None
        for _, rows in self._lookups:
            if isinstance(rows, KeyedTensor):
                parts = [rows.values().square().sum(1)]
            else:
                parts = [_by_sample(part) for part in rows.values()]
            for part in parts:
                total = part if total is None else total + part
        assert total is not None
        return total


@contextlib.contextmanager
def rows_once(model: RankingModel, dim: int, *, hooked: bool) -> Iterator[RowsOnce]:
    """Replace the model's ``embeddings`` by a :class:`RowsOnce` within the block, and yield it."""
    embeddings = model.embeddings
    stand_in = RowsOnce(embeddings, dim, hooked=hooked).train(model.training)
    model.embeddings = stand_in
    try:
        yield stand_in
    finally:
        model.embeddings = embeddings


def _by_sample(part: JaggedTensor) -> Tensor:
    lengths, squares = part.lengths(), part.values().square().sum(1)
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return squares.new_zeros(len(lengths)).index_add(0, owners, squares)
