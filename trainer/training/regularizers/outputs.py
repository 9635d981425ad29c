"""Losses of a network's outputs F(x), and the factors of their output Hessian H_out = D_F^2 loss = sum_y w_y a_y a_y^T.

A Factor is one term of the sum. Its ``value`` [b] has the derivative a_y with respect to the outputs, and ``weight``
[b] is w_y. If J_i is the Jacobian of the outputs with respect to h_i, then a_y^T J_i is the derivative of ``value``
with respect to h_i. So no Jacobian is ever formed:
<J_i^T H_out J_i, diag(h_i^2)> = sum_y w_y |(D_{h_i} value_y) * h_i|^2.

Numbers of equations, claims and notes refer to Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of
Dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from trainer.models.losses import pointwise_loss
from trainer.spec.losses import LOSSES
from trainer.training.regularizers.draws import LABELS, Draws


class Factor(NamedTuple):
    value: Tensor
    weight: Tensor | float


class OutputLoss(Protocol):
    """A loss of the outputs of a module."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample [b]."""
        ...

    def hessian(self, outputs: Tensor, *, through: bool = False) -> list[Factor]:
        """Return the factors of the exact H_out.

        ``through``: True if autograd is to differentiate the weights with respect to the outputs. Otherwise weights are
        constants, as in :meth:`sampled`, where nothing is differentiated through the labels (the paper, note 7).
        """
        ...

    def sampled(self, outputs: Tensor, count: int, draws: Draws) -> list[Factor]:
        """Return ``count`` factors whose sum has the expectation H_out (Algorithm 3).

        The factors' values are losses for labels that ``draws`` draws from the model's distribution.
        """
        ...


class BinaryCrossEntropy:
    """The loss log(1 + e^z) - y z of logits z [b] or [b, 1]: H_out = p (1 - p), p = sigmoid(z)."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = _flat(outputs)
        return binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")

    def hessian(self, outputs: Tensor, *, through: bool = False) -> list[Factor]:
        logits = _flat(outputs)
        p = torch.sigmoid(logits if through else logits.detach())
        return [Factor(logits, p * (1.0 - p))]

    def sampled(self, outputs: Tensor, count: int, draws: Draws) -> list[Factor]:
        logits = _flat(outputs)
        labels = draws.uniforms(LABELS, count, logits) < torch.sigmoid(logits.detach())[:, None]
        return [Factor(self.loss(logits, label), 1.0 / count) for label in labels.T]


class CrossEntropy:
    """The loss -log softmax(z)_y of logits z [b, c] and classes y [b], or of sequences, z [b, ..., c] and y [b, ...].

    The loss of a sequence is the sum over its positions. H_out of one position is diag(p) - p p^T (E.4), which is the
    mean of D loss^T D loss over labels from p (claim E.1). H_out is block-diagonal over positions. Labels are drawn
    independently for each position (Algorithm 3), so their cross terms vanish in expectation.
    """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        return losses if targets.dim() == 1 else losses.view(targets.shape).flatten(1).sum(1)

    def hessian(self, outputs: Tensor, *, through: bool = False) -> list[Factor]:
        rows = _positions(outputs)
        p = torch.softmax(rows if through else rows.detach(), dim=2)
        return [
            Factor(self.loss(rows[:, at], y.expand(len(rows))), p[:, at, y])
            for at in range(rows.shape[1])
            for y in torch.arange(rows.shape[2], device=outputs.device)
        ]

    def sampled(self, outputs: Tensor, count: int, draws: Draws) -> list[Factor]:
        rows = _positions(outputs)
        ends = torch.softmax(rows.detach(), dim=2).cumsum(2)
        words = draws.uniforms(LABELS, count * rows.shape[1], outputs).view(len(rows), count, -1).transpose(1, 2)
        labels = torch.searchsorted(ends, words.contiguous(), right=True).clamp(max=rows.shape[2] - 1)
        return [Factor(self.loss(rows, labels[:, :, one]), 1.0 / count) for one in range(count)]


class SquaredError:
    """The loss |z - y|^2 of outputs z [b] or [b, c]: H_out = 2 I for any output; there are no labels to draw."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _columns((outputs - targets.to(outputs.dtype)).square()).sum(0)

    def hessian(self, outputs: Tensor, *, through: bool = False) -> list[Factor]:
        return [Factor(column, 2.0) for column in _columns(outputs)]

    def sampled(self, outputs: Tensor, count: int, draws: Draws) -> list[Factor]:
        raise ValueError("squared error has no distribution of labels: its Hessian is 2 I, leave label_samples out")


class PointwiseLoss:
    """Loss ``kind`` of trainer.models.losses. H_out is its second derivative, which must not depend on the label."""

    def __init__(self, kind: str):
        self.kind = kind

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return pointwise_loss(self.kind, _flat(outputs), targets)

    def hessian(self, outputs: Tensor, *, through: bool = False) -> list[Factor]:
        scores = _flat(outputs)
        at = scores if through else scores.detach().requires_grad_()
        (first,) = torch.autograd.grad(self.loss(at, torch.zeros_like(at)).sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), at, create_graph=through)
        return [Factor(scores, second)]

    def sampled(self, outputs: Tensor, count: int, draws: Draws) -> list[Factor]:
        raise ValueError(f"{self.kind} has no distribution of labels to draw from: leave label_samples out")


OUTPUT_LOSSES: dict[str, Callable[[], OutputLoss]] = {
    **{name: partial(PointwiseLoss, name) for name, loss in LOSSES.items() if loss.has_output_hessian},
    "bce": BinaryCrossEntropy,
    "mse": SquaredError,
}
"""Constructors of the losses of trainer.spec.losses with ``has_output_hessian``, keyed by name; none has settings."""


def identity(outputs: Tensor) -> list[Factor]:
    """Return the factors of the identity matrix, which may be used instead of H_out (section 5.2)."""
    return [Factor(column, 1.0) for column in _columns(outputs)]


def stability(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return (mu, nu) of theorem 4.1: the means over samples of |D_F loss|_2 and of the trace of H_out (4.7).

    Together with the size of the weights they bound the difference between the losses on training and unseen data. The
    pair is only for diagnosis, so no autograd graph is kept.
    """
    at = outputs.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss.loss(at, targets).sum(), at)
    trace = torch.zeros(len(at), dtype=at.dtype, device=at.device)
    for value, weight in loss.hessian(at):
        (column,) = torch.autograd.grad(value.sum(), at, retain_graph=True)
        trace = trace + weight * _columns(column).square().sum(0)
    return float(_columns(first).square().sum(0).sqrt().mean()), float(trace.mean())


def _columns(outputs: Tensor) -> Tensor:
    """Return outputs [b] or [b, ...] as [c, b]; b may be 0."""
    return outputs[None] if outputs.dim() == 1 else outputs.flatten(1).T


def _positions(outputs: Tensor) -> Tensor:
    """Return outputs [b, c] or [b, ..., c] as [b, positions, c]."""
    return outputs[:, None] if outputs.dim() == 2 else outputs.flatten(1, -2)


def _flat(outputs: Tensor) -> Tensor:
    if outputs.dim() == 1:
        return outputs
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    raise ValueError(
        f"binary cross-entropy takes one logit for each sample, not {list(outputs.shape)}: use CrossEntropy"
    )
