"""Internal covariate shift: how a step of lower layers changes a layer's gradient (Mądry's lecture, section 1.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.papers.lecture.jacobians import hidden_layers


class Shift(NamedTuple):
    """``cosine`` of a layer's gradients before and after, and their ``difference`` / the length of the first."""

    cosine: float
    difference: float


def covariate_shifts(tower: nn.Module, loss: Callable[[], Tensor], rate: float) -> list[Shift]:
    """Return the shift of each hidden layer except the first; the tower is left unchanged.

    A layer's gradient is computed before and after a step of only the hidden layers below it, on the same rows:
    Santurkar et al., How Does Batch Normalization Help Optimization?, NeurIPS 2018, definition 2.1. The step is Adam's
    first: each weight moves by ``rate`` against the sign of its gradient.

    Args:
        tower: made by :func:`trainer.models.layers.mlp.tower`; it runs in training mode, so batch normalisation uses
            the batch's moments.
        loss: returns the mean loss of a batch with the tower's current weights.
        rate: learning rate of the step.
    """
    layers = [list(layer.parameters()) for layer in hidden_layers(tower)]
    before, was_training = copy.deepcopy(tower.state_dict()), tower.training
    tower.train()
    try:
        whole = loss()
        gradients = [torch.autograd.grad(whole, layer, retain_graph=True) for layer in layers]
        shifts = []
        for number, layer in enumerate(layers[1:], 1):
            with torch.no_grad():
                for parameter, gradient in zip(layers[number - 1], gradients[number - 1], strict=True):
                    parameter.sub_(rate * gradient.sign())
            shifts.append(_shift(gradients[number], torch.autograd.grad(loss(), layer)))
    finally:
        tower.load_state_dict(before)
        tower.train(was_training)
    return shifts


def _shift(before: Sequence[Tensor], after: Sequence[Tensor]) -> Shift:
    old, new = (torch.cat([one.reshape(-1) for one in gradient]).double() for gradient in (before, after))
    tiny = torch.finfo(torch.float64).tiny
    length = old.norm().clamp_min(tiny)
    return Shift(
        cosine=float(old @ new / (length * new.norm()).clamp_min(tiny)), difference=float((new - old).norm() / length)
    )
