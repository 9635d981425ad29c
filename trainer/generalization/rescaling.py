"""The reparametrisation check: layers rescaled so that the function stays.

Dinh et al. 2017; Mądry's lecture, section 6.1.

T_alpha (definition 3): (theta_1, theta_2) -> (alpha theta_1, theta_2 / alpha). ReLU is non-negative homogeneous
(theorem 2), so a network computes the same with both, while curvatures along theta_1 shrink by alpha^2 and those along
theta_2 grow by it: any sharpness that is no function of the function alone can be made as large as one likes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from trainer.generalization.parameters import restored

ALPHA = 32.0


def rescalable(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """Return pairs of linear layers with nothing but a ReLU between them."""
    pairs = []
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            layers = list(module)
            pairs += [
                (first, second)
                for first, between, second in zip(layers, layers[1:], layers[2:], strict=False)
                if isinstance(first, nn.Linear) and isinstance(between, nn.ReLU) and isinstance(second, nn.Linear)
            ]
    return pairs


@contextlib.contextmanager
def rescaled(pairs: list[tuple[nn.Linear, nn.Linear]], alpha: float = ALPHA) -> Iterator[None]:
    """Apply T_alpha to each pair, first to last, within the block: (W_1, b_1) times alpha, W_2 divided by it.

    After it, every parameter is what it was, bit for bit. ``alpha`` > 0; a power of two rounds nothing.
    """
    parameters = [parameter for pair in pairs for layer in pair for parameter in layer.parameters()]
    with restored(parameters):
        with torch.no_grad():
            for first, second in pairs:
                for parameter in first.parameters():
                    parameter.mul_(alpha)
                second.weight.div_(alpha)
        yield
