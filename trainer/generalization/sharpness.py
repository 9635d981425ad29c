"""Rise of a loss near a point: along its gradient, and under Gaussian noise (Mądry's lecture, section 6, figure 2).

Both also in the scale abs(theta) of the parameters, where rescaled layers change nothing (Kwon et al. 2021, ASAM,
definition 1: T = diag(abs(theta))).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.generalization.parameters import Point, norm

RHO, RELATIVE_RHO = 0.05, 0.5
"""Radii that SAM and ASAM take by default."""
SIGMA, RELATIVE_SIGMA = 0.01, 0.1
NUM_DRAWS = 10


def ascent_rise(point: Point, rho: float = RHO, *, scale: Sequence[Tensor] | None = None) -> float:
    """Return L(theta + d) - L(theta), d = rho g / |g| (Foret et al. 2021, SAM, equation 2), g the gradient.

    With a ``scale`` s, d = rho s^2 g / |s g| (ASAM, equation 4). 0 where the gradient is.
    """
    gradient = point.gradient()
    scaled = gradient if scale is None else [one * by for one, by in zip(gradient, scale, strict=True)]
    length = norm(scaled)
    if length == 0.0:
        return 0.0
    step = scaled if scale is None else [one * by for one, by in zip(scaled, scale, strict=True)]
    before = point.value()
    with point.moved([one * (rho / length) for one in step]):
        return point.value() - before


def noise_rise(
    point: Point,
    sigma: float = SIGMA,
    *,
    scale: Sequence[Tensor] | None = None,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> float:
    """Return the mean of L(theta + z) - L(theta) over draws of z ~ N(0, sigma^2), or sigma s N(0, 1) with a scale.

    The scale is s. Each draw is used with its opposite: what is linear in z cancels.
    """
    generator = torch.Generator().manual_seed(seed)
    before, rises = point.value(), []
    for _ in range(num_draws):
        draw = [
            sigma * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) * (1.0 if scale is None else by)
            for leaf, by in zip(point.leaves, scale or point.leaves, strict=True)
        ]
        for sign in (1.0, -1.0):
            with point.moved([sign * one for one in draw]):
                rises.append(point.value() - before)
    return statistics.fmean(rises)
