"""Bounds on the generalization gap: by Rademacher complexity and PAC-Bayes (Mądry's lecture, sections 3 and 4).

Both ask for a loss in [0, 1]. It is the probability that a model gives to the wrong label, 1 - e^(-l) of a log loss l:
half of 1 - sigma f with f = 2 p - 1 in [-1, 1] and the label as a sign sigma.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainer.generalization.parameters import Point

DELTA = 0.05
"""A bound holds with probability 1 - DELTA over training rows."""
SIGMAS = tuple(10.0 ** (n / 4) for n in range(-10, 1))
NUM_DRAWS = 5
Losses = npt.NDArray[np.floating]


def wrong(losses: Losses) -> float:
    """Return the mean probability of the wrong label, of log losses [n]."""
    return float(-np.expm1(-losses.astype(np.float64)).mean())


def fit_of_signs(losses: Losses) -> float:
    """Return (1 / m) sum_i sigma_i f(x_i) of a model trained on fair coins as labels, from its log losses [m] on them.

    It is a lower bound of the supremum in the empirical Rademacher complexity of what this training reaches (section
    3).
    """
    return 1.0 - 2.0 * wrong(losses)


def rademacher_bound(complexity: float, num_rows: int, delta: float = DELTA) -> float:
    """Return 2 R + 3 sqrt(log(1 / delta) / m) of section 3.

    ``complexity``: of f; the loss, which is half as steep, has half of it (Talagrand's contraction).
    """
    return complexity + 3.0 * math.sqrt(math.log(1.0 / delta) / num_rows)


def norm_bound(layers: Sequence[float], tables: Sequence[float], squared_inputs: float, num_rows: int) -> float:
    """Return a bound on the empirical Rademacher complexity of an MLP over embeddings, by the norms of its weights.

    (1 / T) (prod_l M_F(l)) sqrt(sum_i M_Ei^2) (sqrt(2 log(2) L) + 1) sqrt(sum_t sum_i |x_i(t)|^2): Li and Lyu, Adaptive
    Regularization, preliminaries. Activations have slope 1 at most and layers no bias.

    Args:
        layers: M_F(l), the Frobenius norm of the weight matrix of each of the L layers.
        tables: M_Ei, the Frobenius norm of the table of each feature.
        squared_inputs: the mean over rows t of sum_i |x_i(t)|^2, the number of features where each is one id.
        num_rows: number T of training rows.
    """
    spread = math.sqrt(2.0 * math.log(2.0) * len(layers)) + 1.0
    return math.prod(layers) * math.hypot(*tables) * spread * math.sqrt(squared_inputs / num_rows)


def massart_bound(num_parameters: int, num_rows: int, bits: int = 32) -> float:
    """Return sqrt(2 log N / m), Massart's bound on the Rademacher complexity of N functions (section 5).

    N = 2^(bits of all parameters): every model that the stored numbers can say. Values of functions are in [-1, 1].
    """
    return math.sqrt(2.0 * math.log(2.0) * bits * num_parameters / num_rows)


@dataclass(frozen=True)
class PacBayes:
    """A PAC-Bayes bound.

    ``divergence``: KL(Q, P) in nats; ``loss``: E_Q of the loss on the sample; ``gap``: the bound on E_Q[L_D] -
    E_Q[L_S].
    """

    sigma: float
    divergence: float
    loss: float
    gap: float

    @property
    def bound(self) -> float:
        """The bound on the expected loss of a model drawn from Q, on new rows."""
        return self.loss + self.gap


def pac_bayes_gap(divergence: float, num_rows: int, delta: float = DELTA, tried: int = 1) -> float:
    """Return sqrt((KL + ln(m / delta)) / (2 (m - 1))) of section 4; delta is shared by as many as were tried."""
    return math.sqrt((divergence + math.log(num_rows * tried / delta)) / (2 * (num_rows - 1)))


def pac_bayes(
    point: Point,
    losses: Callable[[], torch.Tensor],
    squared_distance: float,
    num_rows: int,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> PacBayes:
    """Return the smallest bound over SIGMAS.

    P = N(theta_0, sigma^2) is around the initial and Q = N(theta, sigma^2) around the trained parameters:
    KL = |theta - theta_0|^2 / (2 sigma^2).

    Args:
        point: the parameters that ``losses()`` reads, which are given noise; those that it does not read need none.
        losses: log losses of a sample of training rows [n], at the parameters' present values.
        squared_distance: |theta - theta_0|^2 over all parameters.
        num_rows: number m of training rows.
        num_draws: number of draws of noise for each sigma.
        seed: of the noise.
    """
    bounds = []
    for sigma in SIGMAS:
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        for _ in range(num_draws):
            noise = [sigma * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in point.leaves]
            with point.moved(noise), torch.no_grad():
                drawn.append(wrong(losses().numpy()))
        divergence = squared_distance / (2.0 * sigma**2)
        gap = pac_bayes_gap(divergence, num_rows, tried=len(SIGMAS))
        bounds.append(PacBayes(sigma, divergence, statistics.fmean(drawn), gap))
    return min(bounds, key=lambda one: one.bound)
