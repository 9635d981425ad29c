"""The share of an untouched row that remains after adaptive decay, for rows of every age; numpy only.

A row was last touched at step s; K steps are complete; J = K - s. With lambda_i = min(1, alpha i) adaptive
regularization (Li and Lyu, Algorithm 1) leaves P_J = prod_{i<J} (1 - lambda_i) of it, about exp(-alpha J^2 / 2).
"""

from __future__ import annotations

import math

import numpy as np

ACROSS_EPOCHS = 100.0
"""Factor on alpha for a gap in which an epoch began, so that it counts as one ten times as long
(docs/reports/one_epoch.md)."""
_BLOCK = 4096


class Products:
    """The products P_0, P_1, ... for one alpha, computed on demand up to the first product that is 0."""

    def __init__(self, alpha: float) -> None:
        self.alpha, self.values, self._ended = alpha, np.ones(1), alpha == 0.0

    def up_to(self, age: int) -> np.ndarray:
        """Return P_J for J = 0 .. ``age`` at least, or up to the first 0; the last entry holds for every later J."""
        while not self._ended and len(self.values) <= age:
            first = len(self.values) - 1
            steps = np.arange(first, first + max(_BLOCK, first), dtype=np.float64)
            keep = 1.0 - np.minimum(1.0, self.alpha * steps)
            self.values = np.concatenate([self.values, self.values[-1] * np.cumprod(keep)])
            self._ended = bool(self.values[-1] == 0.0)
            if self._ended:
                self.values = self.values[: int(np.argmax(self.values == 0.0)) + 1].copy()
        return self.values

    def of(self, ages: np.ndarray) -> np.ndarray:
        """Return P_J for each J in ``ages``, an integer array of any shape."""
        values = self.up_to(int(ages.max(initial=0)))
        return values[np.clip(ages, 0, len(values) - 1)]


class SteadyDecay:
    """Decay that depends only on a row's age: F(s, K) = P_{K-s}."""

    def __init__(self, alpha: float) -> None:
        self.strongest = alpha
        self._products = Products(alpha)

    def left(self, completed_steps: int) -> np.ndarray:
        """Return F(K - J, K) for J = 0, 1, ... float64; the last entry holds for every later J."""
        return self._products.up_to(completed_steps)

    def kept(self, steps: np.ndarray, horizon: int) -> np.ndarray:
        """Return the factors by which ``steps`` decay rows of age J = 1 .. ``horizon``, [n, horizon]."""
        keep = 1.0 - np.minimum(1.0, self._products.alpha * np.arange(horizon, dtype=np.float64))
        return np.broadcast_to(keep, (len(steps), horizon))

    def future(self, steps: np.ndarray, horizon: int) -> np.ndarray:
        """Return F(s, s + j) of rows touched at each s of ``steps``, for j = 1 .. ``horizon``, float64 [n, horizon]."""
        return np.broadcast_to(self._products.of(np.arange(1, horizon + 1)), (len(steps), horizon))

    def steps_until(self, vanished: float) -> int:
        """Return an age after which less than ``vanished`` of a row is left; here 0, since momentum vanishes first."""
        return 0


class DecayByEpoch:
    """No decay in the first epoch; then P_{K-s}, with ACROSS_EPOCHS times alpha where an epoch began since s.

    The methods are those of :class:`SteadyDecay`. Epochs have ``epoch_steps`` steps and begin after step 0,
    ``epoch_steps``, 2 ``epoch_steps`` and so on. The epoch after b steps has begun if K > b: an evaluation after step b
    reads the rows as the epoch before left them. A touch resets the age of a row, and does not decay it.
    """

    def __init__(self, alpha: float, epoch_steps: int) -> None:
        self.strongest, self.epoch_steps = ACROSS_EPOCHS * alpha, epoch_steps
        self._within, self._across = Products(alpha), Products(self.strongest)
        self._known: dict[int, np.ndarray] = {}

    def left(self, completed_steps: int) -> np.ndarray:
        if completed_steps not in self._known:
            while len(self._known) > 1:
                del self._known[next(iter(self._known))]
            self._known[completed_steps] = self._left(completed_steps)
        return self._known[completed_steps]

    def _left(self, completed_steps: int) -> np.ndarray:
        begin = int(self._begin(np.array(completed_steps)))
        if not begin:
            return np.ones(1)
        age = completed_steps - begin
        across = self._across.up_to(completed_steps)
        return np.concatenate([self._within.of(np.arange(age)), across[age:] if age < len(across) else across[-1:]])

    def kept(self, steps: np.ndarray, horizon: int) -> np.ndarray:
        after = steps[:, None]
        touched = after - np.arange(1, horizon + 1)
        now, before = self._share(touched, after), self._share(touched, after - 1)
        return np.divide(now, before, out=np.zeros_like(now), where=before > 0.0)

    def future(self, steps: np.ndarray, horizon: int) -> np.ndarray:
        return self._share(steps[:, None], steps[:, None] + np.arange(1, horizon + 1))

    def steps_until(self, vanished: float) -> int:
        """Return an age after which less than ``vanished`` of a row is left; at least an epoch."""
        return max(self.epoch_steps, math.ceil(math.sqrt(-2.0 * math.log(vanished) / self.strongest)) + 1)

    def _share(self, touched: np.ndarray, completed: np.ndarray) -> np.ndarray:
        """Return F(s, K) for each s in ``touched`` and K in ``completed``, broadcast."""
        begin, ages = self._begin(completed), completed - touched
        left = np.where(touched <= begin, self._across.of(ages), self._within.of(ages))
        return np.where(begin > 0, left, 1.0)

    def _begin(self, completed: np.ndarray) -> np.ndarray:
        """Return, for each step K in ``completed``, the number of steps before the epoch that it belongs to."""
        return np.maximum(completed - 1, 0) // self.epoch_steps * self.epoch_steps


def idle_decay(alpha: float, epoch_steps: int | None) -> SteadyDecay | DecayByEpoch:
    """Return the decay of idle rows at reads, by epoch if ``epoch_steps`` is given."""
    return SteadyDecay(alpha) if epoch_steps is None else DecayByEpoch(alpha, epoch_steps)
