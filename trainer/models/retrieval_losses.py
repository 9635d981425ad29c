"""Losses of a target's score against the scores of items that all targets of a batch share, or of all items.

A loss is a function of the score z of a target and the scores z_1 .. z_k of the shared items. A loss returns its
derivatives too, so that scores are computed and used block by block: the matrix [targets, items] is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from embeddings.kernels.cpu import product
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.spec.losses import LEAST_TARGETS_AT_ONCE, SCORES_AT_ONCE


class Terms(NamedTuple):
    """Losses [n] of a block of targets, and their derivatives.

    Derivatives by the shared items' scores are ``scores * scale[:, None]``, where the loss has replaced ``scores``.
    """

    losses: Tensor
    by_target: Tensor
    """Derivatives by the targets' scores [n]."""
    scale: Tensor | None = None


class RetrievalLoss(Protocol):
    """A loss of targets' scores against the scores of shared items."""

    def terms(self, target: Tensor, scores: Tensor) -> Terms:
        """Return the losses of target scores ``target`` [n] against the shared items' ``scores`` [n, k].

        The function overwrites ``scores`` (:class:`Terms`). A score of -inf is left out, because that item is the
        target itself.
        """
        ...


@dataclass(frozen=True)
class Softmax:
    """Cross-entropy over all items: -z + log sum_j e^z_j, j over all items including the target."""

    def terms(self, target: Tensor, scores: Tensor) -> Terms:
        largest = scores.detach().amax(1)
        total = scores.sub_(largest[:, None]).exp_().sum(1)
        return Terms(largest + total.log() - target, -torch.ones_like(target), total.reciprocal())


@dataclass(frozen=True)
class SampledSoftmax:
    """Sampled softmax: -z + log(e^z + sum_j e^z_j), j over drawn items.

    The scores already include - log Q, Q the probability of drawing the item (Jean et al., On Using Very Large Target
    Vocabulary for Neural Machine Translation, ACL 2015, section 3.1). For uniform draws Q is constant and cancels.
    """

    def terms(self, target: Tensor, scores: Tensor) -> Terms:
        largest = torch.maximum(scores.detach().amax(1), target.detach())
        of_target = (target - largest).exp()
        total = scores.sub_(largest[:, None]).exp_().sum(1).add_(of_target)
        return Terms(largest + total.log() - target, of_target / total - 1.0, total.reciprocal())


@dataclass(frozen=True)
class GeneralizedBCE:
    """-beta log s(z) - sum_j log(1 - s(z_j)), s the sigmoid: gBCE with its k + 1 terms summed, not averaged.

    beta = alpha (t (1 - 1 / alpha) + 1 / alpha), alpha = k / (items - 1) the sampling rate and t the calibration: t = 0
    is plain BCE, t = 1 gives the probabilities of training without sampling (Petrov and Macdonald, gSASRec: Reducing
    Overconfidence in Sequential Recommendation Trained with Negative Sampling, RecSys 2023, equations 7 and 9).
    """

    num_items: int
    calibration: float

    def terms(self, target: Tensor, scores: Tensor) -> Terms:
        rate = min(1.0, scores.shape[1] / max(1, self.num_items - 1))
        beta = self.calibration * (rate - 1.0) + 1.0
        losses = softplus(scores).sum(1) - beta * logsigmoid(target)
        scores.sigmoid_()
        return Terms(losses, -beta * torch.sigmoid(-target))


@dataclass(frozen=True)
class PairwiseLogistic:
    """The mean over j of -log s(z - z_j), s the sigmoid (Rendle et al., Bayesian Personalized Ranking, UAI 2009)."""

    def terms(self, target: Tensor, scores: Tensor) -> Terms:
        scores.sub_(target[:, None])
        losses = softplus(scores).mean(1)
        scores.sigmoid_().div_(scores.shape[1])
        return Terms(losses, -scores.sum(1))


@dataclass(frozen=True)
class CosineContrastive:
    """(1 - z) + (weight / k) sum_j max(0, z_j - margin), scores being cosines.

    Mao et al., SimpleX: A Simple and Strong Baseline for Collaborative Filtering, CIKM 2021, equation 3.
    """

    margin: float
    weight: float

    def terms(self, target: Tensor, scores: Tensor) -> Terms:
        above = scores.sub_(self.margin).relu_()
        each = self.weight / scores.shape[1]
        losses = 1.0 - target + each * above.sum(1)
        scores.copy_(above > 0).mul_(each)
        return Terms(losses, -torch.ones_like(target))


RETRIEVAL: Mapping[str, Callable[[Mapping[str, Any], int], RetrievalLoss]] = {
    "softmax": lambda settings, num_items: Softmax(),
    "sampled_softmax": lambda settings, num_items: SampledSoftmax(),
    "bce": lambda settings, num_items: GeneralizedBCE(num_items, 0.0),
    "gbce": lambda settings, num_items: GeneralizedBCE(num_items, settings["calibration"]),
    "bpr": lambda settings, num_items: PairwiseLogistic(),
    "cosine_contrastive": lambda settings, num_items: CosineContrastive(
        settings["margin"], settings["negative_weight"]
    ),
}
"""Functions, keyed by the loss's name, that make a :class:`RetrievalLoss`. They take the loss's settings, fields of
trainer.spec.losses.RetrievalSettings, and the number of items that can be drawn."""


def log_draw_probabilities(counts: npt.NDArray[np.integer], sampling: str, power: float) -> Tensor:
    """Return log Q for each row of the item table, Q the probability that a draw is this row; 0 for rows without count.

    For uniform draws, whose Q is constant, the result is empty. ``counts``: training rows of each item.
    ``sampling``, ``power``: ``negative_distribution`` and ``negative_power`` of the job's model.
    """
    if sampling == "uniform":
        return torch.zeros(0)
    weights = np.where(counts > 0, counts.astype(np.float64) ** (power if sampling == "popularity" else 1.0), 0.0)
    weights[:NUM_SPECIAL_ROWS] = 0.0
    shares = weights / max(weights.sum(), 1.0)
    return torch.from_numpy(np.log(shares, out=np.zeros(len(shares)), where=shares > 0))


class Shared(NamedTuple):
    """The items that all targets of a batch share.

    Attributes:
        rows: vectors of the items [k, d].
        ids: ids of the items, int64 [k]; an item with the target's id is left out of that target's loss. None: no item
            is left out.
        target_ids: ids of the targets, int64 [n]; None without ``ids``.
        offsets: numbers added to the scores of the items [k], such as - log Q; None: nothing is added.
    """

    rows: Tensor
    ids: Tensor | None = None
    target_ids: Tensor | None = None
    offsets: Tensor | None = None


def shared_loss(loss: RetrievalLoss, queries: Tensor, target: Tensor, shared: Shared) -> Tensor:
    """Return the loss of each target [n]: of its score ``target`` [n] against the scores of the shared items.

    The shared items' scores are ``queries`` [n, d] times ``shared.rows``. The losses can be differentiated by queries,
    target and rows, those of a softmax twice. If backward weighs all losses equally, as a mean does, scores are
    computed once; otherwise twice.
    """
    losses: Tensor = _InBlocks.apply(queries, target, shared.rows, loss, shared)
    return losses


class _InBlocks(torch.autograd.Function):
    """:func:`shared_loss`: derivatives are computed in the forward pass, while a block of scores is at hand."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, target: Tensor, rows: Tensor, loss: RetrievalLoss, shared: Shared) -> Tensor:
        losses, by_target = torch.empty_like(target), torch.empty_like(target)
        by_query, by_row = torch.empty_like(queries), torch.zeros_like(rows)
        for block, scores in _blocks(queries, rows, shared):
            terms = loss.terms(target[block], scores)
            losses[block], by_target[block] = terms.losses, terms.by_target
            if any(ctx.needs_input_grad):
                scaled = queries[block]
                by_query[block] = product(scores, rows)
                if terms.scale is not None:
                    by_query[block] *= terms.scale[:, None]
                    scaled = scaled * terms.scale[:, None]
                by_row += product(scores.T, scaled)
        ctx.save_for_backward(queries, target, rows, by_query, by_target, by_row)
        ctx.loss, ctx.shared = loss, shared
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        queries, target, rows, by_query, by_target, by_row = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradient is to be differentiated again: autograd records the losses, block by block.
            blocks = _blocks(queries, rows, ctx.shared)
            losses = torch.cat([ctx.loss.terms(target[block], scores).losses for block, scores in blocks])
            inputs = (queries, target, rows)
            return *torch.autograd.grad(losses, inputs, gradient, create_graph=True), None, None
        if not len(gradient):
            return by_query, by_target, by_row, None, None
        if bool((gradient == gradient[0]).all()):
            by_row = by_row * gradient[0]
        else:
            by_row = torch.zeros_like(rows)
            for block, scores in _blocks(queries, rows, ctx.shared):
                scale = ctx.loss.terms(target[block], scores).scale
                weights = gradient[block] if scale is None else gradient[block] * scale
                by_row += product(scores.T, queries[block] * weights[:, None])
        return gradient[:, None] * by_query, gradient * by_target, by_row, None, None


def _blocks(queries: Tensor, rows: Tensor, shared: Shared):  # type: ignore[no-untyped-def]
    """Yield (slice of the targets, their scores of all shared items) for one block of targets after another."""
    size = max(LEAST_TARGETS_AT_ONCE, SCORES_AT_ONCE // max(1, len(rows)))
    for start in range(0, len(queries), size):
        block = slice(start, start + size)
        scores = product(queries[block], rows.T)
        if shared.offsets is not None:
            scores += shared.offsets
        if shared.ids is not None:
            assert shared.target_ids is not None
            scores.masked_fill_(shared.target_ids[block, None] == shared.ids, -torch.inf)
        yield block, scores
