"""The common part of sasrec, gru4rec and hstu: a state at each position of a sequence, which scores the next item."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.models.base import ModelInputs
from trainer.models.layers.dropout import Dropped, keep_mask
from trainer.models.layers.length_groups import LengthGroup, length_groups, put_back
from trainer.models.losses import sampled_loss
from trainer.models.next_item import ITEM, NEGATIVE, TARGET, NextItemModel, by_owner, owners, padded
from trainer.models.retrieval_losses import RETRIEVAL, Shared, log_draw_probabilities, shared_loss
from trainer.spec.models.sequences import PieceSpec

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData

Drop = Callable[[Tensor, int], Tensor]
"""Function ``drop(x, site)``: x [b, l, dim] after dropout at the model's place number ``site``, or x itself."""


class CausalSequenceModel(NextItemModel):
    """Base: score(i | s_1 .. s_n) = <M_i, F_n> / temperature, with F_n the state after the user's items s_1 .. s_n.

    M is the item table; the model reads its rows and scores with them, and they are published unchanged. With
    ``normalize`` M_i and F_n are scaled to length 1 in scores, but not in the model's input.

    The loss of a position is ``loss`` of its target against the target's negatives
    (trainer.models.losses.sampled_loss), or against items that all targets of the batch share
    (trainer.models.retrieval_losses). A sample's loss is their sum, divided by ``length``, the most items that are
    read. Subclasses say where ``dropout`` is applied.
    """

    def __init__(self, embeddings: nn.Module, spec: PieceSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.length, self.kind, self.seed, self.dropout = spec.length, spec.loss, inputs.seed, inputs.dropout
        self.spec, self.normalize, self.temperature = spec, spec.normalize, spec.temperature
        self.log_q, self.num_items = torch.zeros(0), 0

    def begin(self, data: PreparedData) -> None:
        """Count the items that can be drawn, and compute the log probability of each to be drawn as shared negative."""
        counts = data.row_counts(data.keys[0].table)
        self.num_items = int((counts[NUM_SPECIAL_ROWS:] > 0).sum())
        if self.spec.compared_with == "shared" and self.kind == "sampled_softmax":
            self.log_q = log_draw_probabilities(counts, self.spec.sampling, self.spec.negative_power)

    @abstractmethod
    def hidden(self, items: Tensor, positions: Tensor, drop: Drop, only: Tensor | None = None) -> Tensor:
        """Return states [b, l, dim] from rows of items [b, l, dim], oldest first and left-aligned.

        No state depends on a later item, so that padding after the items does not matter. ``positions`` [b, l]: of the
        items; the last item has ``length`` - 1. ``only`` [b, 1]: if given, only the states at these places are
        returned, [b, 1, dim].
        """

    def finished(self, states: Tensor) -> Tensor:
        """Return F, the final states, from states [n, dim] of :meth:`hidden`: [n, dim]."""
        return states

    def loss(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch.features)
        states = self._queries(self._states(rows, batch))  # [n, d], n the targets of all samples
        target = (states * self.candidates(rows[TARGET].values())).sum(1)
        negatives = self.candidates(rows[NEGATIVE].values())
        if self.spec.compared_with == "own":
            scores = torch.einsum("nd,nkd->nk", states, by_owner(negatives, len(states)))
            terms = sampled_loss(self.kind, target, scores)
        else:
            terms = self._shared_loss(states, target, negatives, batch.features)
        lengths = rows[ITEM].lengths()
        return terms.new_zeros(len(lengths)).index_add(0, owners(lengths), terms) / self.length

    def _shared_loss(self, states: Tensor, target: Tensor, negatives: Tensor, features: KeyedJaggedTensor) -> Tensor:
        loss = RETRIEVAL[self.kind](self.loss_settings, self.num_items)
        if self.spec.compared_with == "all":
            return shared_loss(loss, states, target, Shared(negatives))
        ids, target_ids, offsets = features[NEGATIVE].values(), features[TARGET].values(), None
        if len(self.log_q):
            log_q = self.log_q.to(ids.device, target.dtype)
            offsets, target = -log_q[ids], target - log_q[target_ids]
        return shared_loss(loss, states, target, Shared(negatives, ids, target_ids, offsets))

    def _queries(self, states: Tensor) -> Tensor:
        """Return the vectors [n, dim] that item vectors are multiplied with: final states F over the temperature."""
        states = normalize(states, dim=1) if self.normalize else states
        return states if self.temperature == 1.0 else states / self.temperature

    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        last = self.hidden(items, self._positions(items, lengths), not_at_all, (lengths - 1).clamp(min=0)[:, None])
        return self._queries(self.finished(last.squeeze(1))) * (lengths > 0)[:, None]

    def candidates(self, rows: Tensor) -> Tensor:
        return normalize(rows, dim=1) if self.normalize else rows

    def _states(self, rows: Mapping[str, JaggedTensor], batch: Batch) -> Tensor:
        """Return the final state F after each item that is read, [number of ids, d]; in training, with dropout."""
        lengths, values = rows[ITEM].lengths(), rows[ITEM].values()
        if not len(values):
            # A rank without samples is part of the graph too, so that its backward runs.
            return self.finished(values)
        groups = length_groups(lengths, len(values))
        states = [self._group_states(group.of(values), group, batch) for group in groups]
        return self.finished(put_back(states, [group.places for group in groups], len(values)))

    def _group_states(self, values: Tensor, group: LengthGroup, batch: Batch) -> Tensor:
        """Return :meth:`hidden` states after each of the group's items, [n, d]; in training, with dropout."""
        items = padded(values, group.lengths)
        positions = self._positions(items, group.lengths)
        hidden = self.hidden(items, positions, self._dropout(batch, group.samples, positions))
        return hidden.flatten(0, 1).index_select(0, owners(group.lengths) * hidden.shape[1] + group.positions)

    def _positions(self, items: Tensor, lengths: Tensor) -> Tensor:
        columns = torch.arange(items.shape[1], device=items.device)
        return (self.length - lengths[:, None] + columns).clamp(max=self.length - 1)

    def _dropout(self, batch: Batch, samples: Tensor, positions: Tensor) -> Drop:
        if not self.training or not self.dropout:
            return not_at_all
        step, drawn = batch.step, batch.sample_offset + samples

        def drop(x: Tensor, site: int) -> Tensor:
            keep = keep_mask(positions, drawn, self.dim, self.dropout, seed=self.seed, step=step, site=site)
            dropped: Tensor = Dropped.apply(x, keep, 1.0 / (1.0 - self.dropout))
            return dropped

        return drop


def not_at_all(x: Tensor, site: int) -> Tensor:
    """Return ``x``: a :data:`Drop` that drops nothing."""
    return x


def at(x: Tensor, only: Tensor) -> Tensor:
    """Return the rows of x [b, l, d] at the places ``only`` [b, k] of each sample, [b, k, d]."""
    return x.gather(1, only[:, :, None].expand(-1, -1, x.shape[2]))
