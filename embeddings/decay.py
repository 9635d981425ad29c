"""What dense semantics do to an idle row, in closed form, so that it can be applied when the row is read.

A row was last touched at step s (0 = never) with moments m, v; K steps are complete; J = K - s. With
lambda_i = min(1, alpha i), r = beta1 / sqrt(beta2) and c_t = sqrt(1 - beta2^t) / (1 - beta1^t), the row's value now is

    theta_read = P_J theta - eta C(s, J) m / (sqrt(v) + eps E(s, J))
    P_J = prod_{i<J} (1 - lambda_i)                                      (Li and Lyu, Algorithm 1, line 12, J times)
    C(s, J) = (1 - lambda_{J-1}) C(s, J-1) + r^J c_{s+J},                C(s, 0) = 0
    E = C2 / C,  C2(s, J) = (1 - lambda_{J-1}) C2(s, J-1) + r^J c_{s+J} sqrt(1 - beta2^{s+J}) beta2^{-J/2}

(E is the effect of eps to first order.) All is float64. Memory does not grow with the number of steps: at one K only
C(K - J, J) is ever asked for, a vector over J that one recurrence carries from K to K + 1. Beyond J*, where r^J has
vanished, the row only decays: C(s, J) = C(s, J*) prod_{J* <= i < J} (1 - lambda_i), with C(s, J*) a vector over s that
is constant once beta2^s has vanished. P is cut where it reaches 0. Numpy only.
"""

from __future__ import annotations

import math

import numpy as np

# r^J below this adds nothing to a float64.
VANISHED = 1e-18
MAX_HORIZON = 1 << 16
_GROWTH = 4096


class IdleCoefficients:
    """P, C and E for rows of every age, at one number of completed steps.

    ``alpha = 0``: no decay. ``momentum=False`` (lazy moments): C is 0.

    Attributes (for kernels; index J is the number of idle steps, index s the step of the last touch):
        decay: float64 [n], P_J; its last entry holds for every later J.
        late_decay: float64 [n], prod_{J* <= i < J} (1 - lambda_i), 1 up to J*.
        near_c, near_e: float64 [J* + 1], C(K - J, J) and E(K - J, J).
        far_c, far_e: float64 [n], C(s, J*) and E(s, J*); the last entry holds for every later s.
    """

    def __init__(self, *, alpha: float, momentum: bool, beta1: float = 0.9, beta2: float = 0.999) -> None:
        self.alpha, self.momentum, self.beta1, self.beta2 = alpha, momentum, beta1, beta2
        self.ratio = beta1 / math.sqrt(beta2) if momentum and beta2 > 0 else 0.0
        self.horizon = self._horizon()
        steps = np.arange(self.horizon + 1, dtype=np.float64)
        self._keep = 1.0 - np.minimum(1.0, alpha * steps)
        self._powers = self.ratio**steps
        self._powers_eps = (beta1 / beta2) ** steps if self.horizon else self._powers
        self.decay = self.late_decay = np.ones(1)
        self._decay_done = alpha == 0.0
        self.far_c, self.far_e = np.zeros(1), np.ones(1)
        self._far_done = self.horizon == 0
        # c_t is 1 to float64 once beta2^t < 2^-53.
        self._settled = 0 if self.horizon == 0 else 1 + int(53 * math.log(2) / -math.log(beta2))
        self._c = self._c2 = np.zeros(self.horizon + 1)
        self.near_c, self.near_e = np.zeros(self.horizon + 1), np.ones(self.horizon + 1)
        self.completed_steps = 0

    def _horizon(self) -> int:
        if not self.momentum or self.beta1 == 0.0:
            return 0
        slowest = self.beta1 / self.beta2
        if slowest >= 1.0:
            raise ValueError(f"idle momentum needs beta1 < beta2, not {self.beta1} and {self.beta2}")
        horizon = math.ceil(math.log(VANISHED) / math.log(slowest))
        if horizon > MAX_HORIZON:
            raise ValueError(
                f"beta1 {self.beta1} beside beta2 {self.beta2}: momentum lives for {horizon} idle steps, more than "
                f"{MAX_HORIZON}; use moments 'lazy' or a smaller beta1"
            )
        return horizon

    def at(self, completed_steps: int) -> IdleCoefficients:
        """Moves to K = ``completed_steps`` (one recurrence if it is the next step, else at most J* of them)."""
        if completed_steps != self.completed_steps:
            if completed_steps != self.completed_steps + 1:
                self.completed_steps = max(0, completed_steps - self.horizon - 1)
                self._c = self._c2 = np.zeros(self.horizon + 1)
            while self.completed_steps < completed_steps:
                self._advance()
            if self.horizon:
                self.near_c, self.near_e = self._c, _quotient(self._c2, self._c)
        self._reach(completed_steps)
        return self

    def _advance(self) -> None:
        self.completed_steps += 1
        if not self.horizon:
            return
        root, correction = self._bias(np.float64(self.completed_steps))
        c, c2 = np.zeros_like(self._c), np.zeros_like(self._c)
        c[1:] = self._keep[:-1] * self._c[:-1] + self._powers[1:] * correction
        c2[1:] = self._keep[:-1] * self._c2[:-1] + self._powers_eps[1:] * (correction * root)
        self._c, self._c2 = c, c2

    def _bias(self, step: np.ndarray | np.float64) -> tuple[np.ndarray, np.ndarray]:
        """sqrt(1 - beta2^t) and c_t."""
        root = np.sqrt(-np.expm1(step * math.log(self.beta2)))
        return root, root / -np.expm1(step * math.log(self.beta1))

    def _reach(self, completed_steps: int) -> None:
        """Makes P long enough for every J <= K, and C(s, J*) for every s <= K - J*."""
        while not self._decay_done and len(self.decay) <= completed_steps:
            first = len(self.decay) - 1
            steps = np.arange(first, first + max(_GROWTH, first), dtype=np.float64)
            keep = 1.0 - np.minimum(1.0, self.alpha * steps)
            late = np.where(steps < self.horizon, 1.0, keep)
            self.decay = np.concatenate([self.decay, self.decay[-1] * np.cumprod(keep)])
            self.late_decay = np.concatenate([self.late_decay, self.late_decay[-1] * np.cumprod(late)])
            self._decay_done = self.decay[-1] == 0.0 and self.late_decay[-1] == 0.0
            if self._decay_done:
                end = int(np.argmax((self.decay == 0.0) & (self.late_decay == 0.0))) + 1
                self.decay, self.late_decay = self.decay[:end].copy(), self.late_decay[:end].copy()
        while not self._far_done and len(self.far_c) <= completed_steps - self.horizon:
            first = len(self.far_c)
            self._grow_far(first, first + max(_GROWTH, first))

    def _grow_far(self, first: int, end: int) -> None:
        if end > self._settled:
            end, self._far_done = max(first, self._settled) + 1, True
        # C(s, J*) = sum_j r^j c_{s+j} prod_{j <= i < J*} (1 - lambda_i): a correlation of c with fixed weights.
        weights = np.ones(self.horizon)
        weights[:-1] = np.cumprod(self._keep[self.horizon - 1 : 0 : -1])[::-1]
        steps = np.arange(first + 1, end + self.horizon, dtype=np.float64)
        root, correction = self._bias(steps)
        c = np.correlate(correction, weights * self._powers[1:], mode="valid")
        c2 = np.correlate(correction * root, weights * self._powers_eps[1:], mode="valid")
        self.far_c = np.concatenate([self.far_c, c])
        self.far_e = np.concatenate([self.far_e, _quotient(c2, c)])

    def for_rows(self, last_update_step: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """P, C and E of rows last touched at the given steps (0: P = 1, C = 0), each float64 of the same shape."""
        touched = last_update_step > 0
        idle = np.where(touched, self.completed_steps - last_update_step, 0)
        if touched.any() and idle.min() < 0:
            raise ValueError(
                f"a row was last touched at step {int(last_update_step.max())}, after the {self.completed_steps} "
                "completed steps: restore completed_steps together with the tables"
            )
        decay = self.decay[np.minimum(idle, len(self.decay) - 1)]
        if not self.horizon:
            return decay, np.zeros_like(decay), np.ones_like(decay)
        far = idle > self.horizon
        near = np.where(far, 0, idle)
        step = np.minimum(np.where(far, last_update_step, 0), len(self.far_c) - 1)
        late = self.late_decay[np.minimum(idle, len(self.late_decay) - 1)]
        c = np.where(far, self.far_c[step] * late, self.near_c[near])
        return decay, np.where(touched, c, 0.0), np.where(far, self.far_e[step], self.near_e[near])


def _quotient(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.ones_like(numerator), where=denominator > 0.0)
