"""Movement of rows of every age by momentum, on a few quadrature nodes: tables for successive steps. Numpy only.

The formulas are those of :mod:`embeddings.optim.deferred_update`. The 2 n moments of the sum for age J follow from
those for age J - 1 at the step before: one term is added or dropped, and all decay. Moments are about the first term
after the row's touch, so that both ages belong to the same row. Steps are computed in fixed blocks, so that the tables
of a step do not depend on the step from which the computation began.
"""

from __future__ import annotations

import numpy as np

from embeddings.optim import quadrature
from embeddings.optim.adam import Adam
from embeddings.optim.idle_decay import DecayByEpoch, SteadyDecay
from embeddings.optim.momentum_terms import MomentumTerms

# Largest number of steps of a block, and of its steps times ages.
_STEPS, _AGES = 64, 1 << 18


Tables = tuple[np.ndarray, np.ndarray]
"""Tables of one step: ``movements`` [J* + 1, n, 2] and ``lookahead`` [n, 2], pairs of drift and eps term."""


class IdleMomentum:
    """Tables for an optimizer with beta1 above 0 and dense moments, so that momentum moves idle rows.

    ``momentum_steps`` is the number of terms that matter in a sum, and ``horizon``, J*, no less. With ``ahead`` rows
    are stored ahead of their momentum. ``smallest`` is the smallest eps term.
    """

    def __init__(
        self,
        optimizer: Adam,
        decay: SteadyDecay | DecayByEpoch,
        momentum_steps: int,
        horizon: int,
        ahead: bool,
        smallest: float,
    ) -> None:
        self.horizon, self.momentum_steps, self.ahead = horizon, momentum_steps, ahead
        self._decay = decay
        self._terms = MomentumTerms(optimizer, ahead, decay.strongest, momentum_steps, smallest)
        self._powers = optimizer.momentum_ratio ** np.arange(1.0, horizon + 1.0)
        self._size = max(1, min(_STEPS, _AGES // (horizon + 1)))
        # The number of a block, and the moments after its last step.
        self._after: tuple[int, np.ndarray] = (-2, np.zeros(0))
        self._block: tuple[int, list[Tables]] = (-1, [])

    def at(self, step: int) -> Tables:
        """Return the tables after ``step`` steps."""
        number = step // self._size
        if self._block[0] != number:
            if self._after[0] != number - 1:
                first = max(0, number * self._size - self.horizon - 1) // self._size
                self._after = (first - 1, np.zeros((2 * self._count(first), self.horizon + 1)))
            while self._after[0] < number - 1:
                self._through(self._after[0] + 1)
            self._block = (number, self._tables(number, *self._through(number)))
        return self._block[1][step % self._size]

    def _count(self, number: int) -> int:
        """Return the number of quadrature nodes for the sums of a block."""
        first = number * self._size
        # The sums of rows that are not stored ahead begin at their touch, up to a horizon ago.
        return self._terms.num_nodes(first if self.ahead else max(0, first - self.horizon))[0]

    def _through(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute the sums of one block of steps; return (moments by step and age, moments of the lookahead).

        The first are [steps, 2 n, J* + 1], after each step. The second, [steps, 2 n], belong to the movement by which a
        row touched at the following step is stored ahead.
        """
        size, count = self._size, 2 * self._count(number)
        steps = number * size + np.arange(size)
        weights, _, keeps = self._terms.between(int(steps[0]), int(steps[-1]) + 1)
        kept = keeps[:, None] * self._decay.kept(steps, self.horizon)
        starts = self._starts(number)
        distances = starts[:, 1:2] + self._terms.slope * np.arange(self.horizon) - starts[:, 1:]
        # For rows stored ahead this step's term is dropped, for others it is added.
        term = weights[:, None] * (-self._powers if self.ahead else self._powers)
        found, touched = np.zeros((size, count, self.horizon + 1)), np.zeros((size + 1, count))
        for power, each in enumerate(quadrature.polynomials(distances, self._terms.basis, count)):
            found[:, power, 1:] = term * each
        if self.ahead:
            sums_after = self._sums_after(np.append(steps, steps[-1] + 1), None)
            touched = quadrature.moments(*sums_after, self._terms.basis, count).T
            found[:, :, 0] = touched[:-1]
        # Later blocks need no more nodes than earlier ones.
        sums = self._after[1][:count]
        for k in range(size):
            found[k, :, 1:] += kept[k] * sums[:, :-1]
            if self.ahead:
                found[k, :, -1] = 0.0
            sums = found[k]
        self._after = (number, sums.copy())
        return found, touched[1:]

    def _starts(self, number: int) -> np.ndarray:
        """Return log a_1 of rows last touched at K - J, for each step K of a block and each age J: [steps, J* + 1]."""
        first = number * self._size
        low = max(first - self.horizon + 1, 0)
        points = self._terms.between(low, first + self._size + 1).points
        # Of rows that are older than the run there is nothing.
        points = np.pad(points, (low - (first - self.horizon + 1), 0), mode="edge")
        return np.lib.stride_tricks.sliding_window_view(points, self.horizon + 1)[:, ::-1] + self._terms.slope

    def _tables(self, number: int, sums: np.ndarray, touched: np.ndarray) -> list[Tables]:
        """Return the tables after each step of a block, made from the two results of :meth:`_through`."""
        terms, size, first = self._terms, self._size, number * self._size
        steps, ages = np.arange(first, first + size)[:, None], np.arange(self.horizon + 1)[None, :]
        count = self._count(number)
        many = ages < terms.num_nodes(first)[1] if self.ahead else steps - ages < terms.few_from
        there = ages <= steps
        starts = self._starts(number)
        movements = np.zeros((size, self.horizon + 1, count, 2))
        movements[..., 1] = 1.0
        for chosen, nodes in ((there & many, count), (there & ~many, 2)):
            weights, points = quadrature.gauss_rule(sums.transpose(1, 0, 2)[: 2 * nodes, chosen], terms.basis)
            movements[chosen, :nodes, 0] = -weights if self.ahead else weights
            movements[chosen, :nodes, 1] = terms.eps_terms(starts[chosen][:, None], points)
        lookahead = np.zeros((size, count, 2))
        lookahead[..., 1] = 1.0
        if self.ahead:
            weights, points = quadrature.gauss_rule(touched.T, terms.basis)
            lookahead[..., 0], lookahead[..., 1] = weights, terms.eps_terms(self._first_terms(steps[:, 0] + 1), points)
        return list(zip(movements, lookahead, strict=True))

    def without_decay(self, steps: np.ndarray, completed: int) -> np.ndarray:
        """Return (drift, eps term), without decay, of rows last touched at ascending ``steps``: [len(steps), n, 2]."""
        # A row's bits, and so its number of nodes, must not depend on the other rows of the read.
        blocks, block_of = np.unique(steps // self._size, return_inverse=True)
        counts = np.array([self._terms.num_nodes(int(number) * self._size)[0] for number in blocks])[block_of]
        pairs = np.zeros((len(steps), int(counts.max(initial=2)), 2))
        pairs[..., 1] = 1.0
        size = max(1, _AGES // self.momentum_steps)
        for count in np.unique(counts):
            for part in np.unique(steps[counts == count] // size):
                chosen = (counts == count) & (steps // size == part)
                mine = steps[chosen]
                basis = self._terms.basis
                sums = quadrature.moments(*self._sums_after(mine, completed), basis, 2 * count)
                weights, points = quadrature.gauss_rule(sums, basis)
                pairs[chosen, :count, 0] = -weights if self.ahead else weights
                pairs[chosen, :count, 1] = self._terms.eps_terms(self._first_terms(mine), points)
        return pairs

    def _first_terms(self, steps: np.ndarray) -> np.ndarray:
        """Return log a_1 of rows last touched at ``steps``, which must ascend: [len(steps), 1]."""
        points = self._terms.between(int(steps[0]) + 1, int(steps[-1]) + 2).points
        return points[steps - steps[0]][:, None] + self._terms.slope

    def _sums_after(self, steps: np.ndarray, completed: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and points of the sums over the steps that follow each of ``steps``: two [len(steps), terms].

        A sum is the movement by which a row touched at ``steps[i]`` is stored ahead. With ``completed``, the movement
        up to step ``completed``, without decay, is subtracted; if rows are not stored ahead, the sum is only this
        movement.
        """
        ages = np.arange(1, self.momentum_steps + 1)
        terms = self._terms.between(int(steps[0]) + 1, int(steps[-1]) + self.momentum_steps + 1)
        weights, points, keeps = (
            np.lib.stride_tricks.sliding_window_view(each, self.momentum_steps)[steps - steps[0]] for each in terms
        )
        points = points - points[:, :1] + self._terms.slope * (ages - 1)
        undo = np.zeros((1, 1))
        if self.ahead:
            undo = 1.0 / (self._decay.future(steps, self.momentum_steps) * np.cumprod(keeps, axis=1))
        if completed is not None:
            done = steps[:, None] + ages <= completed
            undo = undo - done if self.ahead else done.astype(np.float64)
        return self._powers[: self.momentum_steps] * undo * weights, points
