"""A bound on the gap of linear models by derivatives of the cross-entropy (Wei, Kakade and Ma 2020, theorem 4.1).

For logits W x of c classes, a loss truncated at B, |W^T|_{2,1} <= A, and theta = log^3(n c) max_i |x_i|^2,

    E_P[l] - 1.01 E_Pn[l] <~ (A mu)^(2/3) (theta B)^(1/3) / n^(1/3) + A sqrt(B nu theta) / sqrt(n)
                             + B A^2 theta / (n (log^2(B A^2 theta / (nu n)) + 1)) + B (log(1 / delta) + log log n) / n

with mu = E_Pn |D l|_2 and nu = E_Pn tr D^2 l (4.7). <~ leaves out a universal constant that the paper does not give;
it is 1 here. That is on the low side: (B.7), of which the proof takes the minimum with alpha = 100, is 8 to 270 times
the first three terms, before a constant that lemma B.2 does not give.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from trainer.generalization.bounds import DELTA

TRUNCATION = 1.0
"""B, chosen before any data are seen."""
TRAINING_FACTOR = 1.01
COIN = math.log(2.0)
"""The log loss of a fair coin."""


@dataclass(frozen=True)
class LinearBound:
    """Theorem 4.1 with its constant at 1.

    ``terms``: those by mu, by nu, by norms, and the low order one; ``train``: E_Pn of the truncated loss.
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
        """Whether a fair coin, which nobody has trained, has the bound too."""
        return self.bound >= COIN


def derivatives(losses: npt.NDArray[np.floating]) -> tuple[float, float]:
    """Return (mu, nu) of the cross-entropy of two classes, from log losses [n].

    With p the probability of the right label, e^-l: |D l|_2 = |p - 1_y|_2 = sqrt(2) (1 - p) and tr D^2 l = 2 p (1 - p).
    """
    right = np.exp(-losses.astype(np.float64))
    wrong = -np.expm1(-losses.astype(np.float64))
    return float(math.sqrt(2.0) * wrong.mean()), float(2.0 * (right * wrong).mean())


def truncated(losses: npt.NDArray[np.floating]) -> float:
    """Return the mean of min(B, l)."""
    return float(np.minimum(losses.astype(np.float64), TRUNCATION).mean())


def linear_bound(
    losses: npt.NDArray[np.floating], norm: float, largest_input: float, *, num_classes: int = 2, delta: float = DELTA
) -> LinearBound:
    """Return the theorem's bound of a classifier of two classes.

    Args:
        losses: log losses of all training rows [n].
        norm: A, the sum of the Euclidean norms of the rows of W; of one logit w x, whose other class has 0, that of w.
        largest_input: max_i |x_i|_2 over training rows.
        num_classes: c.
        delta: the bound fails with this probability over training rows.
    """
    num_rows, (mu, nu) = len(losses), derivatives(losses)
    theta = math.log(num_rows * num_classes) ** 3 * largest_input**2
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
    """Return A of a layer of one logit, whose bias is the weight of an input of 1."""
    squares = layer.weight.detach().double().square().sum()
    if layer.bias is not None:
        squares = squares + layer.bias.detach().double().square().sum()
    return float(squares.sqrt())


@contextlib.contextmanager
def largest_input(layer: nn.Linear) -> Iterator[list[float]]:
    """Yield a list that the forward passes within fill with the largest |x|_2 of each, the input of the bias in it."""
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
