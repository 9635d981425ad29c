"""Internal covariate shift: how a step of the layers below turns a layer's gradient (Mądry's lecture, section 1.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.papers.lecture.jacobians import hidden_layers


class Shift(NamedTuple):
    """Of a layer's gradient before and after: their ``cosine``, and their ``difference`` in lengths of the former."""

    cosine: float
    difference: float


def covariate_shifts(tower: nn.Module, loss: Callable[[], Tensor], rate: float) -> list[Shift]:
    """Return the shift of each hidden layer but the first, and leave the tower as it was.

    A layer's gradient is taken before and after the hidden layers below it, and they alone, have taken their step, on
    the same rows: Santurkar et al., How Does Batch Normalization Help Optimization?, NeurIPS 2018, definition 2.1. The
    step is Adam's first one, of ``rate`` against the sign of each gradient.

    Args:
        tower: of :func:`trainer.models.layers.mlp.tower`, which is trained here: batch normalisation by the batch.
        loss: gives the mean loss of a batch by the tower as it is then.
        rate: of the step.
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
