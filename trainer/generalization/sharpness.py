"""Sharpness of a loss at a point, and a reparametrisation that changes sharpness but not the function.

The rise along the gradient and under Gaussian noise, and the largest eigenvalue of the Hessian (Mądry's lecture,
section 6, figure 2; Keskar et al. 2016). Along the steepest direction a loss rises by lambda_max / 2 times the square
of the distance. With a ``scale`` s, one number for each parameter, eigenvalues are those of D H D, D = diag(s). For
s = abs(theta) (Kwon et al. 2021, ASAM, definition 1) rescaled layers change nothing: theta_i -> c_i theta_i gives
H_ij -> H_ij / (c_i c_j), and abs(theta_i) H_ij abs(theta_j) stays.

T_alpha (Dinh et al. 2017, definition 3; Mądry's lecture, section 6.1): (theta_1, theta_2) -> (alpha theta_1,
theta_2 / alpha). ReLU is non-negative homogeneous (theorem 2), so a network computes the same with both, while
curvatures along theta_1 shrink by alpha^2 and those along theta_2 grow by it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trainer.generalization.parameters import Point, norm, restored

RHO, RELATIVE_RHO = 0.05, 0.5
"""Radii that SAM and ASAM take by default."""
SIGMA, RELATIVE_SIGMA = 0.01, 0.1
NUM_DRAWS = 10
NUM_STEPS = 30
ALPHA = 32.0


def ascent_rise(point: Point, rho: float = RHO, *, scale: Sequence[Tensor] | None = None) -> float:
    """Return L(theta + d) - L(theta), d = rho g / |g| (Foret et al. 2021, SAM, equation 2), g the gradient.

    With a ``scale`` s, d = rho s^2 g / |s g| (ASAM, equation 4). The result is 0 if the gradient is 0.
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
    point: Point, sigma: float = SIGMA, *, scale: Sequence[Tensor] | None = None, num_draws: int = NUM_DRAWS
) -> float:
    """Return the mean of L(theta + z) - L(theta) over draws of z ~ N(0, sigma^2), or sigma s N(0, 1) with a scale.

    ``scale`` is s. Each draw of z is used with both signs, so that terms linear in z cancel.
    """
    generator = torch.Generator().manual_seed(0)
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


def top_eigenvalue(point: Point, *, scale: Sequence[Tensor] | None = None, num_steps: int = NUM_STEPS) -> float:
    """Return the largest eigenvalue of the Hessian at ``point``, or of D H D (see the module).

    The function takes ``num_steps`` Lanczos steps with full reorthogonalisation, each with a Hessian-vector product, or
    fewer if the space is exhausted. The result is a lower bound that is tight after a few dozen steps.
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

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(sum(counts), generator=generator, dtype=point.leaves[0].dtype)
    diagonal, beside = _lanczos(times, start, min(num_steps, sum(counts)))
    tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return float(np.linalg.eigvalsh(tridiagonal)[-1])


def _lanczos(times: object, start: Tensor, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the diagonal and the subdiagonal of the tridiagonal matrix after at most ``num_steps`` Lanczos steps."""
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


def gradient_norms(point: Point) -> dict[str, tuple[float, float]]:
    """Return {parameter: (|gradient|, |gradient| / |value|)}, Euclidean; the ratio is NaN if all values are zero."""
    norms = {}
    for (name, leaf), gradient in zip(point.parameters.items(), point.gradient(), strict=True):
        length, size = float(gradient.double().norm()), float(leaf.detach().double().norm())
        norms[name] = (length, length / size if size > 0 else float("nan"))
    return norms


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
