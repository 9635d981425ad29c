"""The adaptive softmax (Grave et al. 2017) as an output loss of dropout's explicit regularizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.training.regularizers.draws import LABELS, Draws
from trainer.training.regularizers.outputs import Factor


class AdaptiveSoftmax:
    """The loss of ``torch.nn.AdaptiveLogSoftmaxWithLoss`` on states [b, ..., d] and classes [b, ...].

    The states are the outputs F(x) of the network, and the head's weights are a part of the loss. Algorithm 3 of Wei,
    Kakade and Ma draws a cluster and a word within it (see below their claim C.1); -log p(y) is the loss of both. As
    H_out the regularizer takes the mean of D loss^T D loss over labels from p, the Gauss-Newton form of -log p.

    Args:
        head: the adaptive softmax. The softmax's own parameters are trained like the parameters of any other module.
    """

    def __init__(self, head: nn.AdaptiveLogSoftmaxWithLoss):
        self.head = head

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of the targets for each sample [b], summed over the sample's positions."""
        losses = -self.head(outputs.flatten(0, -2), targets.flatten()).output
        return losses if targets.dim() == 1 else losses.view(targets.shape).flatten(1).sum(1)

    def hessian(self, outputs: Tensor, *, through: bool = False) -> list[Factor]:
        """Return the exact factors, a factor for each position and class: only practical for few classes."""
        logs = self.head.log_prob(outputs.flatten(0, -2)).view(len(outputs), -1, self.head.n_classes)
        p = logs.exp() if through else logs.detach().exp()
        return [Factor(-logs[:, at, y], p[:, at, y]) for at in range(logs.shape[1]) for y in range(self.head.n_classes)]

    def sampled(self, outputs: Tensor, count: int, draws: Draws) -> list[Factor]:
        """Return ``count`` factors from labels drawn from the model: first a cluster, then a word within it."""
        states = outputs.detach().flatten(0, -2)
        shape = outputs.shape[:-1]
        positions = shape[1:].numel()
        words = draws.uniforms(LABELS, 2 * count * positions, outputs).view(len(outputs), count, positions, 2)
        factors = []
        for one in range(count):
            labels = self._draw(states, words[:, one].reshape(-1, 2)).view(shape)
            factors.append(Factor(self.loss(outputs, labels), 1.0 / count))
        return factors

    @torch.no_grad()
    def _draw(self, states: Tensor, words: Tensor) -> Tensor:
        """Return a label for each state, [n], drawn by ``words``, two uniform numbers [n, 2]. States are [n, d]."""
        entries = _inverted(self.head.head(states), words[:, 0])
        labels = entries.clone()
        for cluster, tail in enumerate(self.head.tail):
            (inside,) = torch.nonzero(entries == self.head.shortlist_size + cluster, as_tuple=True)
            labels[inside] = self.head.cutoffs[cluster] + _inverted(tail(states[inside]), words[inside, 1])
        return labels


def _inverted(logits: Tensor, words: Tensor) -> Tensor:
    """Return classes [n] drawn from the softmax of logits [n, c] by uniform numbers ``words`` [n]."""
    ends = torch.softmax(logits, dim=1).cumsum(1)
    return torch.searchsorted(ends, words[:, None].contiguous(), right=True)[:, 0].clamp(max=logits.shape[1] - 1)
