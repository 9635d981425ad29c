"""Deferred updates: the updates of untouched rows under dense semantics, in closed form, applied when a row is read.

A row was last touched at step s (0 = never) with value theta and moments m, v; K steps are complete; J = K - s steps
have passed without a touch. Dense semantics move it at each of these steps t = s + j by its decay and its momentum.
With lambda_i = min(1, alpha i), the decay of a step keep_j = (1 - lambda_{j-1}) (1 - eta_t w), P_j = keep_1 ... keep_j
(Li and Lyu, Algorithm 1, line 12, j times; or AdamW's decay), r = beta1 / sqrt(beta2), c_t = sqrt(1 - beta2^t) / (1 -
beta1^t), and a_j = sqrt(1 - beta2^t) beta2^{-j/2}, its value now is

    theta_read = P_J theta - sum_{j <= J} w_j m / (sqrt(v) + eps a_j),      w_j = (P_J / P_j) eta_t r^j c_t

(with eps inside the root, sqrt(v + eps a_j^2)). eta is known for every step, past and future, so this is exact under a
learning-rate schedule too.

**Stored ahead.** r^j vanishes, so momentum stops moving a row after J* steps without a touch. A touch therefore stores
theta~ = theta - sum_{j <= J*} (1 / P_j) eta_t r^j c_t m / (sqrt(v) + eps a_j), the row after all this movement. A row
that was not touched for J* steps or longer reads P_J theta~ and needs neither m nor v. A row touched lately reads
theta~ without the movement that is still to come,

    theta_read = P_J theta~ + sum_{J < j <= J*} w_j m / (sqrt(v) + eps a_j).

The terms left out sum to at most eta r^{J*} / (1 - r). If alpha is so large that P vanishes before r^J does, the sum
would be huge, and rows are not stored ahead (``ahead`` is False); terms left out after J* steps have then vanished too.
``ahead`` depends only on the optimizer's settings.

**A few nodes for each sum.** All three sums have positive weights and are one function of each element's sqrt(v) / eps,
smooth in log a_j: 1 / (sqrt(v) + eps e^y) is analytic for |Im y| < pi whatever v is. So Gauss quadrature in y = log a_j
(:mod:`embeddings.optim.quadrature`) gives them with few terms: sum_k w_k m / (sqrt(v) + eps e^{y_k}). The
number of terms depends on the completed steps, so that no element errs by more than MAX_ERROR of a step: as a rule two,
and more in the first steps, whose bias corrections differ most, and if beta2 is small. The 2 n moments of each age's
sum, about its first term, follow from those of the step before: one term is added or dropped, and all decay.

**By epoch.** A decay that depends on more than the age (:class:`embeddings.optim.idle_decay.DecayByEpoch`) has F(s, s +
j) instead of P_j, and keep_j is F(s, s + j) / F(s, s + j - 1). The formulas are the same.

All is float64. The vectors over J belong to one K; one recurrence carries them to K + 1. Numpy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embeddings.optim.adam import Adam
from embeddings.optim.base import MAX_HORIZON, MAX_LEAD, VANISHED_PRESENT, RowOptimizer
from embeddings.optim.idle_decay import idle_decay
from embeddings.optim.idle_momentum import IdleMomentum

# r^J below this is dropped: the rest of an idle row's movement, in units of the first step's.
VANISHED = {"float64": 1e-13, "float32": 1e-6}
# Smallest eps term: a product of two roots must not underflow in float32, and the term must be small compared
# with the root of the smallest v.
SMALLEST_FLOOR = {"float64": 0.0, "float32": 1e-18}
# Steps whose logarithms of decay are computed at a time.
_BLOCK = 4096


class Movement(NamedTuple):
    """A deferred movement of n rows, to be subtracted from the stored rows: ``drift`` m / (sqrt(v) + ``eps_term``).

    Both fields are float64 [n]. With eps inside the root the movement is ``drift`` m / sqrt(v + ``eps_term``).
    """

    drift: np.ndarray
    eps_term: np.ndarray


class DeferredUpdateCoefficients:
    """Coefficients of deferred updates at K completed steps, for rows of every age; :meth:`at` moves to a K.

    ``dtype`` (float32 or float64) is the type of arithmetic with rows; it sets the size below which values are dropped.

    Attributes (for kernels; index J = K - s is the number of steps since the row's last touch, at step s):
        completed_steps: K.
        decay: float64 [n], prod (1 - lambda); its last entry holds for every later J.
        log_sums, log_slope: L[s] = sum_{t <= s} log(1 - eta_t w), float64 [n]; a step beyond the last entry adds
            ``log_slope``. Empty if there is no constant decay; else P_J = decay_J exp(L[K] - L[s]).
        log_now: L[K].
        movements: float64 [J* + 1, n, 2], n even: the n pairs (drift, eps_term) of :class:`Movement` of a row that was
            not touched for J steps; 0 beyond J*. eps is in ``eps_term``, which is above 0. If rows are stored ahead,
            drift is below 0, because a read undoes movement.
        lookahead: float64 [n, 2], the pairs that the update of step K + 1 must subtract, with the new m and v, from the
            row that it stores; drift is 0 if rows are not stored ahead.
        momentum: True if any movement is not 0.
        from_start: True if a row that was never touched (s = 0) decays as if it had been touched at step 0. If False,
            such a row has no deferred update.
        eps_inside_root: True if ``eps_term`` is added to v, False if to sqrt(v).
        ahead: True if rows are stored ahead.
    """

    def __init__(self, optimizer: RowOptimizer, dtype: str = "float64") -> None:
        self.optimizer = optimizer
        self.momentum, self.from_start = optimizer.idle_momentum, optimizer.decays_from_start
        self.eps_inside_root = bool(getattr(optimizer, "eps_inside_root", False))
        self._idle_decay, self._weight_decay = idle_decay(*optimizer.read_decay), optimizer.constant_decay
        self.ahead = self.momentum and self._can_be_ahead()
        momentum_steps = self._steps_until(VANISHED[dtype] if self.ahead else VANISHED_PRESENT)
        self.horizon = momentum_steps if self.ahead else self._steps_until_rows_vanish(momentum_steps)
        self.decay = self._idle_decay.left(0)
        self.log_sums, self.log_slope = np.zeros(1 if self._weight_decay else 0), 0.0
        self._log_done = self._weight_decay == 0.0
        self.movements, self.lookahead = np.zeros((1, 2, 2)), np.zeros((2, 2))
        # Without momentum drift is 0, but the kernel still divides it by sqrt(v) + eps_term, and v may be 0.
        self.movements[..., 1] = self.lookahead[..., 1] = 1.0
        if self.momentum:
            assert isinstance(optimizer, Adam)
            smallest = SMALLEST_FLOOR[dtype] ** (2 if self.eps_inside_root else 1)
            self._idle_momentum = IdleMomentum(
                optimizer, self._idle_decay, momentum_steps, self.horizon, self.ahead, smallest
            )
        self.log_now = 0.0
        self.completed_steps = -1
        self.at(0)

    def _can_be_ahead(self) -> bool:
        """Return True if D stays within MAX_LEAD times its value without decay, in float64 for every dtype alike."""
        horizon = self._steps_until(VANISHED["float64"])
        steps = np.arange(1, horizon + 1, dtype=np.float64)
        assert isinstance(self.optimizer, Adam)
        powers = self.optimizer.momentum_ratio**steps
        product = np.cumprod(1.0 - np.minimum(1.0, self._idle_decay.strongest * (steps - 1.0)))
        return bool(product[-1] > 0.0 and np.sum(powers / product) <= MAX_LEAD * np.sum(powers))

    def _steps_until(self, vanished: float) -> int:
        """Return the number of steps without a touch after which movement by momentum is below ``vanished``."""
        if not self.momentum:
            return 0
        assert isinstance(self.optimizer, Adam)
        return self.optimizer.idle_steps_until(vanished)

    def _steps_until_rows_vanish(self, momentum_steps: int) -> int:
        """Return the number of steps after which a row not stored ahead has decayed to nothing, moments included."""
        if not self.momentum:
            return 0
        steps = max(momentum_steps, self._idle_decay.steps_until(VANISHED_PRESENT))
        if steps > MAX_HORIZON:
            raise ValueError(
                f"with this alpha a row must be kept for {steps} steps after its last touch, more than {MAX_HORIZON}: "
                "use a smaller alpha, such as default, or moments 'lazy'"
            )
        return steps

    def at(self, completed_steps: int) -> DeferredUpdateCoefficients:
        """Move to K = ``completed_steps``."""
        if completed_steps == self.completed_steps:
            return self
        self.decay = self._idle_decay.left(completed_steps)
        self._reach_log(completed_steps + 1)
        if self._weight_decay:
            self.log_now = float(self._log_sums_at(np.array([completed_steps]))[0])
        if self.momentum:
            self.movements, self.lookahead = self._idle_momentum.at(completed_steps)
        self.completed_steps = completed_steps
        return self

    def _log_sums_at(self, steps: np.ndarray) -> np.ndarray:
        """Return L of each of ``steps``, none of them after K."""
        last = len(self.log_sums) - 1
        return self.log_sums[np.minimum(steps, last)] + self.log_slope * np.maximum(steps - last, 0)

    def _reach_log(self, end: int) -> None:
        """Make ``log_sums`` long enough for every step before ``end``."""
        settled = self.optimizer.schedule.settled
        while not self._log_done and len(self.log_sums) < end:
            first = len(self.log_sums)
            last = first + max(_BLOCK, first) if settled is None else min(settled, first + max(_BLOCK, first))
            decay = self.optimizer.rates(np.arange(first, last + 1)) * self._weight_decay
            self.log_sums = np.concatenate([self.log_sums, self.log_sums[-1] + np.cumsum(np.log1p(-decay[:-1]))])
            if last == settled:
                self._log_done, self.log_slope = True, float(np.log1p(-decay[-1]))

    def for_rows(self, last_update_step: np.ndarray) -> tuple[np.ndarray, list[Movement]]:
        """Return (P [n], movements) of rows last touched at the given steps: a read gives P theta - all movements."""
        idle, owing = self._idle(last_update_step)
        decay = self.decay[np.minimum(idle, len(self.decay) - 1)]
        if self._weight_decay:
            then = self._log_sums_at(last_update_step)
            decay = decay * np.where(owing, np.exp(self.log_now - then), 1.0)
        if not self.momentum:
            return decay, []
        moving = owing & (idle <= self.horizon)
        pairs = self.movements[np.where(moving, idle, 0)]
        return decay, _movements(np.where(moving[:, None], pairs[:, :, 0], 0.0), pairs[:, :, 1])

    def without_decay(self, last_update_step: np.ndarray) -> list[Movement]:
        """Return the movements of rows if decay is left out: such a read gives theta - all movements."""
        _, owing = self._idle(last_update_step)
        if not self.momentum:
            return []
        steps, inverse = np.unique(np.where(owing, last_update_step, 0), return_inverse=True)
        pairs = self._idle_momentum.without_decay(steps, self.completed_steps)[inverse]
        return _movements(np.where(owing[:, None], pairs[:, :, 0], 0.0), pairs[:, :, 1])

    def _idle(self, last_update_step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps since each row's last touch, int64 [n]; flags of rows with a deferred update, bool [n])."""
        owing = np.ones(last_update_step.shape, dtype=bool) if self.from_start else last_update_step > 0
        idle = np.where(owing, self.completed_steps - last_update_step.astype(np.int64), 0)
        if idle.size and idle.min() < 0:
            raise ValueError(
                f"a row was last touched at step {int(last_update_step.max())}, after the {self.completed_steps} "
                "completed steps: restore completed_steps together with the tables"
            )
        return idle, owing


def deferred_update_coefficients(optimizer: RowOptimizer, dtype: str) -> DeferredUpdateCoefficients | None:
    """Return the coefficients of an optimizer's deferred updates; None if it leaves untouched rows unchanged."""
    if not (optimizer.read_decay[0] or optimizer.constant_decay or optimizer.idle_momentum):
        return None
    return DeferredUpdateCoefficients(optimizer, dtype)


def _movements(drift: np.ndarray, eps_term: np.ndarray) -> list[Movement]:
    """Return one Movement per quadrature node, from ``drift`` and ``eps_term``, each [n, nodes]."""
    return [Movement(*pair) for pair in zip(drift.T, eps_term.T, strict=True)]
