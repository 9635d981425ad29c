"""The terms by which momentum moves an untouched row, and the number of quadrature nodes that replace their sum.

The formulas are those of :mod:`embeddings.optim.deferred_update`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from embeddings.optim import quadrature
from embeddings.optim.adam import Adam

# Largest error of a sum, for any v and the largest m that v allows, in units of eta. Errors of many touches add up.
MAX_ERROR = 4e-7
NUM_NODES = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
# Most nodes from moments of plain powers: with more, rounding errors would reach 1e-4 of a step.
MOST_OF_POWERS = 10
# Largest eps a of a node (of its root, if eps is inside): a larger one moves nothing, and a product of two roots must
# not overflow in float32.
LARGEST = 1e15
# Steps whose learning rates and bias corrections are computed at a time. The blocks are fixed, because the last bit of
# exp may depend on an element's index.
_BLOCK = 4096


class Terms(NamedTuple):
    """For steps t: eta_t c_t; the part of log a_j that depends on t; the share of a row that constant decay leaves."""

    weights: np.ndarray
    points: np.ndarray
    keeps: np.ndarray


class MomentumTerms:
    """The terms eta_t r^j c_t m / (sqrt(v) + eps a_j), log a_j = point of t + ``slope`` j (a_j^2 if eps is inside).

    With ``ahead`` rows are stored ahead, and a decay of ``alpha`` must be undone. ``horizon`` is the number of terms of
    a sum, ``smallest`` the smallest eps term.
    """

    def __init__(self, optimizer: Adam, ahead: bool, alpha: float, horizon: int, smallest: float) -> None:
        self.optimizer, self.horizon, self.smallest = optimizer, horizon, smallest
        self._power = 1.0 if optimizer.eps_inside_root else 0.5
        self.slope = -self._power * math.log(optimizer.beta2)
        # Largest distance of two terms. Nodes of sums that are nearly zero may be farther apart, by rounding.
        self._widest = self.slope * horizon - self._power * math.log1p(-optimizer.beta2)
        self._largest = 2.0 * self._power * math.log(LARGEST) - math.log(optimizer.eps)
        self.basis, self._counts = _basis_and_counts(
            optimizer.beta1, optimizer.beta2, optimizer.eps_inside_root, ahead, alpha if ahead else 0.0, horizon
        )
        self.few_from = self._counts[0].first if self._counts[0].nodes == NUM_NODES[0] else math.inf
        self._blocks: dict[int, Terms] = {}

    def num_nodes(self, step: int) -> tuple[int, int]:
        """Return (nodes for sums of terms after ``step``, the row age from which NUM_NODES[0] suffice)."""
        found = next(each for each in self._counts if step >= each.first)
        return found.nodes, found.few_from_age

    def between(self, first: int, end: int) -> Terms:
        """Return the terms of each step in [first, end)."""
        blocks = [self._block(number) for number in range(first // _BLOCK, (end - 1) // _BLOCK + 1)]
        start = first - first // _BLOCK * _BLOCK
        whole = blocks[0] if len(blocks) == 1 else Terms(*map(np.concatenate, zip(*blocks, strict=True)))
        return Terms(*(each[start : start + end - first] for each in whole))

    def eps_terms(self, starts: np.ndarray | float, points: np.ndarray) -> np.ndarray:
        """Return eps a for nodes with log a = ``starts`` + ``points``, within limits."""
        widened = np.minimum(starts + np.clip(points, 0.0, self._widest), self._largest)
        return np.maximum(self.optimizer.eps * np.exp(widened), self.smallest)

    def _block(self, number: int) -> Terms:
        if number not in self._blocks:
            # There is no step 0: it has no weight.
            steps = np.maximum(np.arange(number * _BLOCK, (number + 1) * _BLOCK), 1)
            weights, points = _bias_corrections(self.optimizer.beta1, self.optimizer.beta2, self._power, steps)
            rates = self.optimizer.rates(steps)
            weights = rates * weights
            if number == 0:
                weights[0] = 0.0
            while len(self._blocks) > 2 + self.horizon // _BLOCK:
                del self._blocks[min(self._blocks)]
            self._blocks[number] = Terms(weights, points, 1.0 - rates * self.optimizer.constant_decay)
        return self._blocks[number]


def _bias_corrections(beta1: float, beta2: float, power: float, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return c_t = sqrt(1 - beta2^t) / (1 - beta1^t), and ``power`` log(1 - beta2^t), of steps t."""
    square = -np.expm1(steps * math.log(beta2))
    return np.sqrt(square) / -np.expm1(steps * math.log(beta1)), power * np.log(square)


class _Count(NamedTuple):
    """The ``nodes`` needed by sums that begin after step ``first`` or later; old enough rows need only NUM_NODES[0]."""

    first: int
    nodes: int
    few_from_age: int


@cache
def _basis_and_counts(
    beta1: float, beta2: float, inside: bool, ahead: bool, alpha: float, horizon: int
) -> tuple[quadrature.Basis, tuple[_Count, ...]]:
    """Return the quadrature's polynomials, and for each range of steps the number of nodes that it takes.

    That number is the smallest of NUM_NODES with an error below MAX_ERROR; the ranges are in order from the last steps
    to the first. The learning rate is assumed constant, and m at most ``bound`` sqrt(v), by Cauchy and Schwarz. If rows
    are stored ahead, a sum has all terms or only the last terms, and the polynomials are orthogonal for all terms. Else
    sums start with one term, for which plain powers are more accurate.
    """
    bound = (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1**2 / beta2))
    ages = np.arange(1, horizon + 1, dtype=np.float64)
    power = 1.0 if inside else 0.5
    undone = (beta1 / math.sqrt(beta2)) ** ages / np.cumprod(1.0 - np.minimum(1.0, alpha * (ages - 1.0)))
    distances = -power * math.log(beta2) * (ages - 1.0)
    # As many nodes as terms are enough.
    most = max(NUM_NODES[0], horizon if ahead else min(horizon, MOST_OF_POWERS))
    choices = [each for each in NUM_NODES if each <= most]
    basis = quadrature.orthogonal_basis(undone, distances, 2 * choices[-1])
    if not ahead:
        basis = basis.powers()
    counts: list[_Count] = []
    step, count = 0, choices[-1]
    while count > NUM_NODES[0] and beta2**step > MAX_ERROR:
        corrections, points = _bias_corrections(beta1, beta2, power, max(step, 1) + ages)
        points = points - points[0] + distances
        weights = undone * corrections
        # log v if eps is inside the root, else log sqrt(v); outside this range both sums are equal.
        at = np.arange(-5.0, points[-1] + 5.0, 0.25)
        # Leave out terms that are too small to change a bit of the sum.
        kept = weights > quadrature.NO_WEIGHT * weights.sum()
        exact = _sum_by_v(weights[kept], points[kept], at, inside)
        errors: list[float] = []
        for count in choices:
            few = quadrature.gauss_rule(quadrature.moments(weights[None], points[None], basis, 2 * count), basis)
            errors.append(bound * _largest_error(exact, few[0][0], few[1][0], at, inside))
            if errors[-1] <= MAX_ERROR:
                break
        # The sum shrinks with age, and so does its error.
        left = np.cumsum(weights[::-1])[::-1] / weights.sum() * errors[0]
        counts.insert(0, _Count(step, count, int((left > MAX_ERROR).sum())))
        step = 2 * step or 1
    # A block computes its moments from those of the block before, so it cannot have more, whatever the errors.
    for later in range(1, len(counts)):
        counts[later] = counts[later]._replace(nodes=max(counts[later].nodes, counts[later - 1].nodes))
    return basis, tuple(counts)


def _largest_error(exact: np.ndarray, weights: np.ndarray, points: np.ndarray, at: np.ndarray, inside: bool) -> float:
    return float(np.abs(_sum_by_v(weights, points, at, inside) - exact).max())


def _sum_by_v(weights: np.ndarray, points: np.ndarray, at: np.ndarray, inside: bool) -> np.ndarray:
    """Return sqrt(v) sum_j w_j / (sqrt(v) + e^{y_j}) for each v, given the logarithms ``at``."""
    exponents = np.exp(np.minimum(points[:, None] - at, 500.0))
    return (weights[:, None] * (1.0 + exponents) ** (-0.5 if inside else -1.0)).sum(axis=0)
