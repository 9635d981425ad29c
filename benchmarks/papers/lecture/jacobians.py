"""Jacobians of a tower's representations by depth (Mądry's lecture, section 1, equation 1)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.models.layers.mlp import HiddenLayer

NUM_ROWS = 256
LARGE = 4.0
"""Factor of torch's initial weights with which a plain tower's Jacobian grows with depth."""


def jacobian_norms(tower: nn.Module, inputs: Tensor) -> list[float]:
    """Return |d X^l / d X^1| for each hidden layer l, where X^1 is the first hidden layer's output.

    The norm is the Frobenius norm, as a root mean square over rows and over the directions of X^1: 1 for the identity.

    Args:
        tower: made by :func:`trainer.models.layers.mlp.tower`; it runs in evaluation mode, so batch normalisation uses
            running moments.
        inputs: [n, width of the tower's input].
    """
    hidden = hidden_layers(tower)
    with torch.no_grad():
        first = hidden[0](inputs)
    squares = [0.0] * len(hidden)
    for direction in torch.eye(first.shape[1], dtype=first.dtype):
        x, tangent = first, direction.expand_as(first).contiguous()
        squares[0] += float(tangent.square().sum())
        for number, layer in enumerate(hidden[1:], 1):
            outputs: tuple[Tensor, Tensor] = torch.func.jvp(layer, (x,), (tangent,))  # type: ignore[assignment]
            x, tangent = (one.detach() for one in outputs)
            squares[number] += float(tangent.square().sum())
    return [math.sqrt(one / first.numel()) for one in squares]


def scale_weights(tower: nn.Module, factor: float) -> None:
    """Multiply the weights of every linear map of a tower, but not the biases."""
    with torch.no_grad():
        for module in tower.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(factor)


def hidden_layers(tower: nn.Module) -> list[nn.Module]:
    """Return the hidden layers of a tower, each with the modules that follow its linear map."""
    layers: list[nn.Module] = []
    parts: list[nn.Module] = []
    for module in tower.children():
        parts.append(module)
        if isinstance(module, (nn.ReLU, HiddenLayer)):
            layers.append(nn.Sequential(*parts))
            parts = []
    return layers


def with_moments_of(tower: nn.Module, inputs: Tensor) -> None:
    """Set the batch normalisation moments of an untrained tower to those of ``inputs`` [n, width], layer by layer."""
    x = inputs
    with torch.no_grad():
        for layer in hidden_layers(tower):
            for one in layer.modules():
                if isinstance(one, HiddenLayer) and one.norm is not None:
                    before = one.linear(x)
                    one.norm.running_mean.copy_(before.mean(dim=0))
                    one.norm.running_variance.copy_(before.var(dim=0))
            x = layer(x)


def inputs_of(tower: nn.Module, call: Callable[[], object]) -> Tensor:
    """Return the inputs that a tower receives while ``call()`` runs its model."""
    seen: list[Tensor] = []
    hook = tower.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    try:
        with torch.no_grad():
            call()
    finally:
        hook.remove()
    return seen[0]
