"""Bounds on the generalization gap: by Rademacher complexity and PAC-Bayes (Mądry's lecture, sections 3 and 4).

Both bounds ask for a loss in [0, 1]. This loss is the probability that a model gives to the wrong label, 1 - e^(-l) of
a log loss l: half of 1 - sigma f with f = 2 p - 1 in [-1, 1] and the label as a sign sigma.

A third bound is by derivatives of the cross-entropy of linear models (Wei, Kakade and Ma 2020, theorem 4.1):

For logits W x of c classes, a loss truncated at B, |W^T|_{2,1} <= A, and theta = log^3(n c) max_i |x_i|^2,

    E_P[l] - 1.01 E_Pn[l] <~ (A mu)^(2/3) (theta B)^(1/3) / n^(1/3) + A sqrt(B nu theta) / sqrt(n)
                             + B A^2 theta / (n (log^2(B A^2 theta / (nu n)) + 1)) + B (log(1 / delta) + log log n) / n

with mu = E_Pn |D l|_2 and nu = E_Pn tr D^2 l (4.7). <~ leaves out a universal constant that the paper does not give;
it is 1 here. 1 is too low: (B.7), minimised with alpha = 100 in the proof, is 8 to 270 times the first three terms,
even without a constant that lemma B.2 does not give.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer.generalization.parameters import Point

DELTA = 0.05
"""A bound holds with probability 1 - DELTA over training rows."""
SIGMAS = tuple(10.0 ** (n / 4) for n in range(-10, 1))
NUM_DRAWS = 5
TRUNCATION = 1.0
"""B, chosen before any data are seen."""
TRAINING_FACTOR = 1.01
COIN = math.log(2.0)
"""The log loss of a fair coin."""
Losses = npt.NDArray[np.floating]


def wrong(losses: Losses) -> float:
    """Return the mean probability that a model gives to the wrong label, from its log losses [n]."""
    return float(-np.expm1(-losses.astype(np.float64)).mean())


def fit_of_signs(losses: Losses) -> float:
    """Return (1 / m) sum_i sigma_i f(x_i) for a model trained on fair coins as labels.

    ``losses``: its log losses [m] on these labels. The result is a lower bound of the empirical Rademacher complexity
    of the models that this training can reach (section 3).
    """
    return 1.0 - 2.0 * wrong(losses)


def rademacher_bound(complexity: float, num_rows: int, delta: float = DELTA) -> float:
    """Return 2 R + 3 sqrt(log(1 / delta) / m) of section 3.

    ``complexity``: the Rademacher complexity R of the functions f. The loss is half as steep, so its complexity is
    R / 2 (Talagrand's contraction).
    """
    return complexity + 3.0 * math.sqrt(math.log(1.0 / delta) / num_rows)


def norm_bound(layers: Sequence[float], tables: Sequence[float], squared_inputs: float, num_rows: int) -> float:
    """Return a bound on the empirical Rademacher complexity of an MLP over embeddings, by the norms of its weights.

    (1 / T) (prod_l M_F(l)) sqrt(sum_i M_Ei^2) (sqrt(2 log(2) L) + 1) sqrt(sum_t sum_i |x_i(t)|^2): Li and Lyu, Adaptive
    Regularization, preliminaries. Activations have slope 1 at most and layers no bias.

    ``layers``: M_F(l), Frobenius norms of the weight matrices of the L layers. ``tables``: M_Ei, the tables' norms.
    ``squared_inputs``: the mean over rows t of sum_i |x_i(t)|^2, the number of features where each is one id. T:
    ``num_rows``.
    """
    spread = math.sqrt(2.0 * math.log(2.0) * len(layers)) + 1.0
    return math.prod(layers) * math.hypot(*tables) * spread * math.sqrt(squared_inputs / num_rows)


def massart_bound(num_parameters: int, num_rows: int, bits: int = 32) -> float:
    """Return sqrt(2 log N / m), Massart's bound on the Rademacher complexity of N functions on m = ``num_rows`` rows.

    N = 2^(bits of all parameters) is the number of models that the stored parameters can represent; ``bits`` are for
    each parameter. The functions have values in [-1, 1].
    """
    return math.sqrt(2.0 * math.log(2.0) * bits * num_parameters / num_rows)


@dataclass(frozen=True)
class PacBayes:
    """A PAC-Bayes bound.

    ``sigma``: the noise of P and Q. ``divergence``: KL(Q, P) in nats. ``loss``: the mean loss on the sample of models
    drawn from Q. ``gap``: the bound on E_Q[L_D] - E_Q[L_S], the mean loss on new rows less that on training rows.
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
    """Return sqrt((KL + ln(m / delta)) / (2 (m - 1))) of section 4, with delta divided by the sigmas ``tried``."""
    return math.sqrt((divergence + math.log(num_rows * tried / delta)) / (2 * (num_rows - 1)))


def pac_bayes(
    point: Point, losses: Callable[[], torch.Tensor], squared_distance: float, num_rows: int, num_draws: int = NUM_DRAWS
) -> PacBayes:
    """Return the smallest bound over SIGMAS.

    P = N(theta_0, sigma^2) is around the initial and Q = N(theta, sigma^2) around the trained parameters:
    KL = |theta - theta_0|^2 / (2 sigma^2).

    ``losses()`` returns log losses [n] of a sample of training rows; noise is added to ``point``, whose parameters it
    reads. ``squared_distance``: |theta - theta_0|^2 over all parameters. ``num_rows``: number m of training rows.
    """
    bounds = []
    for sigma in SIGMAS:
        generator = torch.Generator().manual_seed(0)
        drawn = []
        for _ in range(num_draws):
            noise = [sigma * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in point.leaves]
            with point.moved(noise), torch.no_grad():
                drawn.append(wrong(losses().numpy()))
        divergence = squared_distance / (2.0 * sigma**2)
        gap = pac_bayes_gap(divergence, num_rows, tried=len(SIGMAS))
        bounds.append(PacBayes(sigma, divergence, statistics.fmean(drawn), gap))
    return min(bounds, key=lambda one: one.bound)


@dataclass(frozen=True)
class LinearBound:
    """Theorem 4.1 with its constant at 1.

    ``terms``: the theorem's four terms: by mu, by nu, by norms, and the low-order term. ``train``: mean truncated loss
    of the training rows.
    """

    terms: tuple[float, float, float, float]
    train: float

    @property
    def gap(self) -> float:
        """The bound on E_P[l] - 1.01 E_Pn[l]."""
        return sum(self.terms)

    @property
    def bound(self) -> float:
        """The bound on the truncated loss of new rows."""
        return TRAINING_FACTOR * self.train + self.gap

    @property
    def is_vacuous(self) -> bool:
        """True if the bound is no better than the log loss of an untrained fair coin."""
        return self.bound >= COIN


def derivatives(losses: npt.NDArray[np.floating]) -> tuple[float, float]:
    """Return (mu, nu) of the cross-entropy of two classes, from log losses [n].

    With p the probability of the right label, e^-l: |D l|_2 = |p - 1_y|_2 = sqrt(2) (1 - p) and tr D^2 l = 2 p (1 - p).
    """
    right = np.exp(-losses.astype(np.float64))
    wrong = -np.expm1(-losses.astype(np.float64))
    return float(math.sqrt(2.0) * wrong.mean()), float(2.0 * (right * wrong).mean())


def truncated(losses: npt.NDArray[np.floating]) -> float:
    """Return the mean of min(B, l) over losses l [n], with B = TRUNCATION."""
    return float(np.minimum(losses.astype(np.float64), TRUNCATION).mean())


def linear_bound(
    losses: npt.NDArray[np.floating], norm: float, largest_input: float, *, delta: float = DELTA
) -> LinearBound:
    """Return theorem 4.1's bound for a classifier of two classes.

    ``losses``: log losses of all training rows [n]. ``norm``: A, the sum of the Euclidean norms of the rows of W; for a
    single logit w x it is |w|. ``largest_input``: max_i |x_i|_2 over the training rows.
    """
    num_rows, (mu, nu) = len(losses), derivatives(losses)
    theta = math.log(2 * num_rows) ** 3 * largest_input**2
    by_norms = TRUNCATION * norm**2 * theta / num_rows
    logarithm = math.log(by_norms / nu) if by_norms and nu else math.inf
    terms = (
        (norm * mu) ** (2 / 3) * (theta * TRUNCATION / num_rows) ** (1 / 3),
        norm * math.sqrt(TRUNCATION * nu * theta / num_rows),
        by_norms / (logarithm**2 + 1.0),
        TRUNCATION * (math.log(1.0 / delta) + math.log(math.log(max(num_rows, 3)))) / num_rows,
    )
    return LinearBound(terms, truncated(losses))


def norm_of(layer: nn.Linear) -> float:
    """Return A, the norm of the weights, of a layer with one output. The bias counts as the weight of an input of 1."""
    squares = layer.weight.detach().double().square().sum()
    if layer.bias is not None:
        squares = squares + layer.bias.detach().double().square().sum()
    return float(squares.sqrt())


@contextlib.contextmanager
def largest_input(layer: nn.Linear) -> Iterator[list[float]]:
    """Yield a list; each forward pass within the block appends its largest |x|_2, with an input of 1 for the bias."""
    found: list[float] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if len(inputs[0]):
            squares = inputs[0].detach().double().square().sum(1).max()
            found.append(math.sqrt(float(squares) + (layer.bias is not None)))

    handle = layer.register_forward_hook(record)
    try:
        yield found
    finally:
        handle.remove()
