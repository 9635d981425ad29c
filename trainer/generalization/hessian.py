"""The largest eigenvalues of a loss's Hessian by Lanczos' method: how sharp a point is (Mądry's lecture, section 6).

Keskar et al. 2016 call a minimum sharp where the loss rises quickly around it; along the steepest direction it rises by
lambda_max / 2 times the square of the distance. With ``scale`` s, one number for each parameter, the eigenvalues are
those of D H D, D = diag(s). For s = abs(theta) they are the same wherever elements of theta are rescaled and the
function stays: theta_i -> c_i theta_i gives H_ij -> H_ij / (c_i c_j), and abs(theta_i) H_ij abs(theta_j) stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.generalization.parameters import Point

NUM_STEPS = 30


def top_eigenvalue(
    point: Point, *, scale: Sequence[Tensor] | None = None, num_steps: int = NUM_STEPS, seed: int = 0
) -> float:
    """Return the largest eigenvalue of the Hessian of ``point``, or of D H D (see the module).

    ``num_steps`` Lanczos steps with full reorthogonalisation, so many Hessian-vector products; fewer where the space is
    exhausted. A lower bound that is tight after a few dozen steps.
    """
    product = point.hessian_products()
    sizes = [leaf.shape for leaf in point.leaves]
    counts = [leaf.numel() for leaf in point.leaves]

    def times(vector: Tensor) -> Tensor:
        parts = [one.reshape(size) for one, size in zip(vector.split(counts), sizes, strict=True)]
        if scale is not None:
            parts = [one * by for one, by in zip(parts, scale, strict=True)]
        products = product(parts)
        if scale is not None:
            products = [one * by for one, by in zip(products, scale, strict=True)]
        return torch.cat([one.reshape(-1) for one in products])

    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(sum(counts), generator=generator, dtype=point.leaves[0].dtype)
    diagonal, beside = _lanczos(times, start, min(num_steps, sum(counts)))
    tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return float(np.linalg.eigvalsh(tridiagonal)[-1])


def _lanczos(times: object, start: Tensor, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the diagonal and the one beside it of the tridiagonal matrix of ``num_steps`` steps."""
    assert callable(times)
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        ahead = times(basis[-1])
        diagonal.append(float(ahead @ basis[-1]))
        if len(diagonal) == num_steps:
            return diagonal, beside
        # Twice is enough (Giraud et al. 2005): without it rounding brings back directions that were found before.
        for _ in range(2):
            stacked = torch.stack(basis)
            ahead = ahead - stacked.T @ (stacked @ ahead)
        length = float(ahead.norm())
        if length < 1e-10 * max(abs(value) for value in diagonal) or length == 0.0:
            return diagonal, beside
        beside.append(length)
        basis.append(ahead / length)
