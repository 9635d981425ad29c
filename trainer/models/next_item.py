"""Common base of sequence models: scores of a target, and its ranks among its negatives and among all items."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from embeddings.kernels.cpu import product
from trainer.data.batches.sequence_batches import catalogue_features
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.prepare.sequences import ITEM, NEGATIVE, SEQUENCE_KEYS, TARGET
from trainer.metrics import rank_of
from trainer.models.base import ModelInputs, RankingModel
from trainer.models.layers.length_groups import length_groups, put_back
from trainer.spec.models.base import ModelSpec

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData

SCORES_AT_ONCE = 1 << 20
"""Number of scores in a block when targets are ranked among all items: its 4 MiB fit into a cache."""
LEAST_QUERIES = 64
"""Fewest queries in such a block of scores: with fewer, reading all items takes longer than the products."""
FULL_RANKING_ROWS = 100_000
"""Most rows of an item table of which all items are ranked: every rank reads the whole table in each evaluation."""


class NextItemModel(RankingModel):
    """Base of sequence models; ``embeddings`` maps a KeyedJaggedTensor to {feature: JaggedTensor}, a row for each id.

    A batch (trainer.data.batches.sequence_batches) has lists of ``item``, ``item__target`` and ``item__negative``. In
    evaluation ``item`` has the user's earlier items, and ``item__target`` the one item to predict. The target is ranked
    among the items of ``item__negative``, of which every sample has equally many.
    """

    is_sequence = True
    targets: ClassVar[tuple[str, ...]] = (TARGET, NEGATIVE)

    def __init__(self, embeddings: nn.Module, spec: ModelSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        missing = set(SEQUENCE_KEYS) - set(self.features)
        if missing:
            raise ValueError(f"{spec.kind} needs the features {', '.join(SEQUENCE_KEYS)}: {sorted(missing)} missing")

    @abstractmethod
    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Return the query of each sample [b, dim] from the rows ``items`` of its items [b, l, columns], oldest first.

        ``lengths`` [b]: number of items of each sample; the rows after them are zeros. Without items the query is 0.
        """

    def queries(self, rows: Mapping[str, JaggedTensor]) -> Tensor:
        """Return the query of each sample [b, dim]: :meth:`encode` of the looked-up rows of feature ``item``."""
        values, lengths = rows[ITEM].values(), rows[ITEM].lengths()
        groups = length_groups(lengths, len(values))
        if not groups:
            return self.encode(padded(values, lengths), lengths)
        found = [self.encode(padded(group.of(values), group.lengths), group.lengths) for group in groups]
        return put_back(found, [group.samples for group in groups], len(lengths))

    @abstractmethod
    def candidates(self, rows: Tensor) -> Tensor:
        """Return the item vectors that queries are multiplied with [n, dim], from looked-up rows [n, ...]."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the score of each sample's target [b]."""
        rows = self.embeddings(features)
        return (self.queries(rows) * self.candidates(rows[TARGET].values())).sum(1)

    def catalogue(self, data: PreparedData, device: torch.device | None = None) -> Tensor | None:
        """Return :meth:`candidates` of every row of the item table; None if there are too many rows. Collective."""
        num_rows = data.tables[data.keys[0].table].num_rows
        if num_rows > FULL_RANKING_ROWS:
            return None
        features = catalogue_features(num_rows).to(device or torch.device("cpu"))
        return self.candidates(self.embeddings(features)[NEGATIVE].values())

    def evaluate(
        self, batch: Batch, catalogue: Tensor | None = None, left_out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Rank each target, and compute the share of negatives that score below it, each [n].

        Args:
            batch: samples with targets and negatives.
            catalogue: the tensor that :meth:`catalogue` returned.
            left_out: rows of the item table that no target is ranked against, int64 [m].

        Returns:
            (rank of the target among its negatives, share of the negatives that score below it, rank of the target
            among all items except the user's earlier items). Ranks count from 0, and ties count against the target. A
            target without training rows is not found: inf, 0 and inf. Without a catalogue the last rank is NaN.
        """
        rows = self.embeddings(batch.features)
        queries = self.queries(rows)
        ids = batch.features[TARGET].values()
        # Such items share one untrained row, whose score has no meaning.
        is_unknown = ids < NUM_SPECIAL_ROWS
        target = (queries * self.candidates(rows[TARGET].values())).sum(1)
        negatives = by_owner(self.candidates(rows[NEGATIVE].values()), len(queries))
        scores = torch.einsum("bd,bnd->bn", queries, negatives)
        below = (scores < target[:, None]).double() + 0.5 * (scores == target[:, None]).double()
        rank = rank_of(target, scores).double().masked_fill(is_unknown, torch.inf)
        ranks = rank, below.mean(1).masked_fill(is_unknown, 0.0)
        if catalogue is None:
            return *ranks, torch.full_like(ranks[1], torch.nan)
        assert batch.seen is not None  # of evaluation batches
        size = max(LEAST_QUERIES, SCORES_AT_ONCE // len(catalogue))
        starts = torch.arange(0, len(queries) + size, size, device=ids.device)
        bounds = torch.searchsorted(batch.seen[:, 0].contiguous(), starts).tolist()
        parts = []
        for number, start in enumerate(range(0, len(queries), size)):
            scores = product(queries[start : start + size], catalogue.T)
            rows = torch.arange(len(scores), device=ids.device)
            own = ids[start : start + size]
            target = scores[rows, own]
            seen = batch.seen[bounds[number] : bounds[number + 1]]
            scores[seen[:, 0] - start, seen[:, 1]] = -torch.inf
            scores[:, :NUM_SPECIAL_ROWS] = -torch.inf
            if left_out is not None:
                scores[:, left_out] = -torch.inf
            scores[rows, own] = -torch.inf
            parts.append(rank_of(target, scores))
        full = torch.cat(parts) if parts else ids
        return *ranks, full.double().masked_fill(is_unknown, torch.inf)


def owners(lengths: Tensor, total: int | None = None) -> Tensor:
    """Return for each entry of concatenated lists the number of its list, int64 [total]; ``lengths``: of the lists [b].

    ``total``: sum of the lengths; None: it is computed.
    """
    if torch.jit.is_tracing():
        # In a form that the ONNX exporter supports: an entry's owner is the number of lists that end before it.
        ends = lengths.new_zeros(total + 1).scatter_add(0, lengths.cumsum(0), torch.ones_like(lengths))  # type: ignore[operator]
        return ends.cumsum(0)[:-1]
    samples = torch.arange(lengths.shape[0], device=lengths.device)
    return torch.repeat_interleave(samples, lengths, output_size=total)


def sums_by_owner(values: Tensor, owner: Tensor, num_owners: int) -> Tensor:
    """Return the sum of each owner's rows, [num_owners, d]; ``values``: rows [n, d]; ``owner``: their owners [n]."""
    zeros = values.new_zeros(num_owners, values.shape[1])
    if torch.jit.is_tracing():
        # torch 2.13's ONNX exporter takes index_add for an assignment.
        return zeros.scatter_add(0, owner[:, None].expand_as(values), values)
    return zeros.index_add(0, owner, values)


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """Return concatenated lists [n, d] of lengths [b] as a padded tensor [b, l, d], zeros following each list.

    l is the largest length, at least 1.
    """
    owner = owners(lengths)
    position = torch.arange(len(values), device=values.device) - (lengths.cumsum(0) - lengths)[owner]
    longest = max(1, int(lengths.max())) if len(lengths) else 1
    return values.new_zeros(len(lengths), longest, values.shape[1]).index_put((owner, position), values)


def by_owner(rows: Tensor, num_owners: int) -> Tensor:
    """Return rows [n k, d] of n owners, k for each, as [n, k, d]; n may be 0."""
    return rows.view(num_owners, len(rows) // max(1, num_owners), rows.shape[1])


__all__ = ["ITEM", "NEGATIVE", "TARGET", "NextItemModel", "by_owner", "owners", "padded", "sums_by_owner"]
