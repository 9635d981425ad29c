"""The size of the dense part of a model before it is built: parameters, activations, multiply-adds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

NORMALISED = 6
"""Memory that batch normalisation keeps for a hidden unit, in float32 numbers: input, difference and result, each a
float64."""


@dataclass(frozen=True)
class ModelSize:
    """The dense part of a model.

    ``parameters``: number of parameters. The other fields count numbers per sample. ``tower``: sum of the widths of the
    tower's layers, input and output included. ``interaction``: values that all other layers keep for the backward pass.
    ``widest``: most values that one of these layers needs at once. ``multiply_adds``: multiply-adds of a forward pass.
    """

    parameters: int = 0
    tower: int = 0
    interaction: int = 0
    widest: int = 0
    multiply_adds: int = 0

    def __add__(self, other: ModelSize) -> ModelSize:
        return ModelSize(
            self.parameters + other.parameters,
            self.tower + other.tower,
            self.interaction + other.interaction,
            max(self.widest, other.widest),
            self.multiply_adds + other.multiply_adds,
        )


def linear_layers(sizes: Sequence[int]) -> tuple[int, int]:
    """Return (parameters, multiply-adds) of linear layers: sums of (a + 1) b and of a b over consecutive sizes a, b."""
    pairs = list(itertools.pairwise(sizes))
    return sum((a + 1) * b for a, b in pairs), sum(a * b for a, b in pairs)


def tower_size(sizes: Sequence[int], *, residual: bool, batch_norm: bool, logits: bool = True) -> ModelSize:
    """Return the size of a trainer.models.layers.mlp.tower of these layer sizes."""
    parameters, multiply_adds = linear_layers(sizes)
    outputs = sizes[1:-1] if logits else sizes[1:]
    between = list(itertools.pairwise(sizes))[: len(outputs)]
    held = 0
    if batch_norm:
        parameters += 2 * sum(outputs)
        held += NORMALISED * sum(outputs)
    if residual:
        shortcuts = sum(a * b for a, b in between if a != b)
        parameters, multiply_adds, held = parameters + shortcuts, multiply_adds + shortcuts, held + sum(outputs)
    return ModelSize(parameters, sum(sizes), held, max(sizes), multiply_adds)
