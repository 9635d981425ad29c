"""Deferred updates: what dense semantics do to a row that no batch touches, in closed form, applied when it is read.

A row was last touched at step s (0 = never) with value theta and moments m, v; K steps are complete; J = K - s steps
have passed without a touch. Dense semantics move it at each of these steps t = s + j by its decay and its momentum.
With lambda_i = min(1, alpha i), the decay of a step keep_j = (1 - lambda_{j-1}) (1 - eta_t w), r = beta1 / sqrt(beta2),
c_t = sqrt(1 - beta2^t) / (1 - beta1^t), and a_j = sqrt(1 - beta2^t) beta2^{-j/2}, its value now is

    theta_read = P_J theta - C(s, J) m / (sqrt(v) + eps E(s, J))
    P_J = keep_1 ... keep_J                       (Li and Lyu, Algorithm 1, line 12, J times; or AdamW's decay)
    C(s, J) = keep_J C(s, J-1) + eta_t r^J c_t,              C(s, 0) = 0
    E = C2 / C,  C2(s, J) = keep_J C2(s, J-1) + eta_t r^J c_t a_J

(E is the effect of eps to first order; with eps inside the root it is sqrt(v + eps E) with a_j^2 for a_j.) eta is known
of every step, past and future, so this is exact under a learning-rate schedule too.

**Stored ahead.** r^J vanishes, so a row that is not touched for J* steps has moved all it will. What is stored at a
touch is therefore theta~ = theta - D m / (sqrt(v) + eps E_D) with D = C(s, J*) / P_{J*} = sum_j eta_t r^j c_t / P_j: a
row that was not touched for J* steps or longer reads P_J theta~ and needs neither m nor v, and a row touched lately
takes back what has not happened yet,

    theta_read = P_J theta~ + P_J D m / (sqrt(v) + eps E_D) - C(s, J) m / (sqrt(v) + eps E).

The two terms are not merged into one with an E of its own: eps is taken to first order in each, and where sqrt(v) is no
larger than eps only what was subtracted may be added again. In one division, with R = sqrt(v) + eps E and R_D likewise,
they are m (C R_D - P_J D R) / (R R_D). What is left out is at most eta r^{J*} / (1 - r). Where alpha is so large that P
vanishes before r^J does, D would be huge and rows are stored as they are (``ahead`` is False); what is then left out
after J* steps has vanished as well. Whether rows are stored ahead is a function of the optimizer's settings alone.

All is float64. The vectors over J belong to one K; one recurrence carries them to K + 1. Numpy only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from embeddings.optim.adam import Adam
from embeddings.optim.base import MAX_LEAD, RowOptimizer

# r^J below this is dropped: the rest of an idle row's movement, in units of the first step's.
VANISHED = {"float64": 1e-13, "float32": 1e-6}
# Where rows are stored as they are: P and r^J below this add nothing to a float64.
VANISHED_PRESENT = 1e-18
MAX_HORIZON = 1 << 16
# R R_D must not vanish in float32, nor may this matter beside the root of the smallest v: floors are no smaller.
SMALLEST_FLOOR = {"float64": 0.0, "float32": 1e-18}
# Steps whose learning rates and bias corrections are computed at a time. Always the same steps together: the last bit
# of exp may depend on an element's place.
_BLOCK = 4096


class Movement(NamedTuple):
    """A deferred movement of some rows: ``drift`` m / (sqrt(v) + ``eps_term``), to be subtracted, each float64 [n].

    It is subtracted from the stored row. With eps inside the root it is ``drift`` m / sqrt(v + ``eps_term``).
    """

    drift: np.ndarray
    eps_term: np.ndarray


class DeferredUpdateCoefficients:
    """Coefficients of the deferred updates of rows of every age, at K completed steps; :meth:`at` moves to a K.

    ``dtype`` (float32 or float64) is that of the arithmetic with rows; it says what has vanished.

    Attributes (for kernels; index J = K - s is the number of steps since the row's last touch, at step s):
        completed_steps: K.
        decay: float64 [n], prod (1 - lambda); its last entry holds for every later J.
        log_sums, log_slope: L[s] = sum_{t <= s} log(1 - eta_t w), float64 [n]; a step beyond the last entry adds
            ``log_slope``. Empty if there is no constant decay; else P_J = decay_J exp(L[K] - L[s]).
        log_now: L[K].
        momentum_drift, eps_term: float64 [J* + 1], what momentum takes (:class:`Movement`) from a row that was not
            touched for J steps: nothing beyond. ``eps_term`` has eps in it and is above 0.
        lookahead_correction, correction_eps: float64 [J* + 1], what such a row, stored ahead, takes back of it: 0 where
            rows are stored as they are, and beyond.
        lookahead, lookahead_eps: what the update of step K + 1 must subtract, with the new m and v, from the row that
            it stores; 0 where rows are stored as they are.
        momentum: whether ``momentum_drift`` and ``lookahead_correction`` are anything but 0.
        from_start: whether a row that was never touched (s = 0) decays like one touched at step 0. If not, it has no
            deferred update.
        eps_inside_root: where ``eps_term`` stands.
        ahead: whether rows are stored ahead.
    """

    def __init__(self, optimizer: RowOptimizer, dtype: str = "float64") -> None:
        self.optimizer = optimizer
        self.momentum, self.from_start = optimizer.idle_momentum, optimizer.decays_from_start
        self.eps_inside_root = bool(getattr(optimizer, "eps_inside_root", False))
        self.eps = float(getattr(optimizer, "eps", 0.0))
        self._smallest_eps_term = SMALLEST_FLOOR[dtype] ** (2 if self.eps_inside_root else 1)
        self._alpha, self._weight_decay = optimizer.read_alpha, optimizer.constant_decay
        self.ahead = self.momentum and self._can_be_ahead()
        self.horizon = self._steps_until(VANISHED[dtype] if self.ahead else VANISHED_PRESENT)
        idle = np.arange(self.horizon + 1, dtype=np.float64)
        self._keep = 1.0 - np.minimum(1.0, self._alpha * idle[:-1])
        self._powers, self._powers_eps = self._movement_powers(idle)
        # 1 / P_j without the constant decay, for j = 1 .. J*.
        self._undo = 1.0 / np.cumprod(self._keep) if self.ahead else np.zeros(0)
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.decay, self._decay_done = np.ones(1), self._alpha == 0.0
        self.log_sums, self.log_slope = np.zeros(1 if self._weight_decay else 0), 0.0
        self._log_done = self._weight_decay == 0.0
        self._c, self._c2 = np.zeros(self.horizon + 1), np.zeros(self.horizon + 1)
        self.momentum_drift, self.eps_term = np.zeros(self.horizon + 1), np.ones(self.horizon + 1)
        self.lookahead_correction, self.correction_eps = np.zeros(self.horizon + 1), np.ones(self.horizon + 1)
        self.lookahead, self.lookahead_eps = 0.0, 1.0
        self._last_lookahead = (-1, 0.0, 0.0)
        self.log_now = 0.0
        self.completed_steps = -1
        self.at(0)

    def _can_be_ahead(self) -> bool:
        """Return whether D stays within MAX_LEAD times its value without decay, in float64 for every dtype alike."""
        horizon = self._steps_until(VANISHED["float64"])
        steps = np.arange(1, horizon + 1, dtype=np.float64)
        powers = self._ratio**steps
        product = np.cumprod(1.0 - np.minimum(1.0, self._alpha * (steps - 1.0)))
        return bool(product[-1] > 0.0 and np.sum(powers / product) <= MAX_LEAD * np.sum(powers))

    @property
    def _ratio(self) -> float:
        optimizer = self.optimizer
        assert isinstance(optimizer, Adam)
        return optimizer.beta1 / math.sqrt(optimizer.beta2)

    def _steps_until(self, vanished: float) -> int:
        """Return after how many steps without a touch the movement by momentum is below ``vanished``.

        Raises:
            ValueError: betas with which momentum lives for too many steps.
        """
        if not self.momentum:
            return 0
        optimizer = self.optimizer
        assert isinstance(optimizer, Adam)
        horizon = math.ceil(math.log(vanished) / math.log(optimizer.idle_ratio))
        if horizon > MAX_HORIZON:
            raise ValueError(
                f"beta1 {optimizer.beta1} beside beta2 {optimizer.beta2}: momentum lives for {horizon} idle steps, "
                f"more than {MAX_HORIZON}; use moments 'lazy' or a smaller beta1"
            )
        return horizon

    def _movement_powers(self, idle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return r^J, and r^J beta2^{-J/2} (eps inside the root: r^J beta2^{-J})."""
        if not self.momentum:
            return np.zeros_like(idle), np.zeros_like(idle)
        assert isinstance(self.optimizer, Adam)
        return self._ratio**idle, self.optimizer.idle_ratio**idle

    def at(self, completed_steps: int) -> DeferredUpdateCoefficients:
        """Move to K = ``completed_steps``: one recurrence if it is the next step, else at most J* of them."""
        if completed_steps == self.completed_steps:
            return self
        self._reach(completed_steps)
        if self._weight_decay:
            self.log_now = float(self._log_sums_at(completed_steps, completed_steps + 1)[0])
        if self.momentum:
            if completed_steps != self.completed_steps + 1:
                self.completed_steps = max(0, completed_steps - self.horizon - 1) - 1
                self._c, self._c2 = np.zeros(self.horizon + 1), np.zeros(self.horizon + 1)
                self.lookahead_correction, self.correction_eps = np.zeros(self.horizon + 1), np.ones(self.horizon + 1)
            for step in range(self.completed_steps + 1, completed_steps + 1):
                self._advance(step)
            self.momentum_drift, self.eps_term = self._c, self._eps_term(self._c2, self._c)
            if self.ahead:
                self.lookahead, self.lookahead_eps = self._lookahead_at(completed_steps + 1)
        self.completed_steps = completed_steps
        return self

    def _advance(self, step: int) -> None:
        """Compute C and C2 at K = ``step``, from those at the step before it."""
        c, c2 = np.zeros_like(self._c), np.zeros_like(self._c)
        term, term_eps = (each[0] for each in self._terms(step, step + 1))
        keep = self._keep * (1.0 - self.optimizer.rate(step) * self._weight_decay if self._weight_decay else 1.0)
        c[1:] = keep * self._c[:-1] + self._powers[1:] * term
        c2[1:] = keep * self._c2[:-1] + self._powers_eps[1:] * term_eps
        if self.ahead:
            lookahead, eps_term = self._lookahead_at(step)
            self.lookahead_correction = np.concatenate([[lookahead], keep * self.lookahead_correction[:-1]])
            self.correction_eps = np.concatenate([[eps_term], self.correction_eps[:-1]])
            # From J* on they are one.
            c[-1] = c2[-1] = self.lookahead_correction[-1] = 0.0
        self._c, self._c2 = c, c2

    def _lookahead_at(self, step: int) -> tuple[float, float]:
        """Return D and eps E_D of a row touched at ``step``."""
        if self._last_lookahead[0] != step:
            first, end = step + 1, step + 1 + self.horizon
            terms, terms_eps = self._terms(first, end)
            undo = self._undo
            if self._weight_decay:
                logs = self._log_sums_at(step, end)
                undo = undo * np.exp(logs[0] - logs[1:])
            lookahead = np.sum(self._powers[1:] * undo * terms, keepdims=True)
            eps_term = self._eps_term(np.sum(self._powers_eps[1:] * undo * terms_eps, keepdims=True), lookahead)
            self._last_lookahead = (step, float(lookahead[0]), float(eps_term[0]))
        return self._last_lookahead[1:]

    def _eps_term(self, with_eps: np.ndarray, without: np.ndarray) -> np.ndarray:
        """Return eps E: E is a mean of the a_j, also where it is a quotient of what rounding left."""
        assert isinstance(self.optimizer, Adam)
        ratio = np.divide(with_eps, without, out=np.ones_like(without), where=without != 0.0)
        beta2, power = self.optimizer.beta2, 1.0 if self.eps_inside_root else 0.5
        eps_term = self.eps * np.clip(ratio, (1.0 - beta2) ** power, beta2 ** (-power * self.horizon))
        return np.maximum(eps_term, self._smallest_eps_term)

    def _terms(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return eta_t c_t for each step t in [first, end), and that times sqrt(1 - beta2^t), or its square.

        The second one is what ``a_j`` of the module's formula is made of.
        """
        blocks = [self._block(number) for number in range(first // _BLOCK, (end - 1) // _BLOCK + 1)]
        start = first - first // _BLOCK * _BLOCK
        pair = blocks[0] if len(blocks) == 1 else tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))
        return pair[0][start : start + end - first], pair[1][start : start + end - first]

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self._blocks:
            assert isinstance(self.optimizer, Adam)
            steps = np.arange(max(1, number * _BLOCK), (number + 1) * _BLOCK)
            root = np.sqrt(-np.expm1(steps * math.log(self.optimizer.beta2)))
            terms = self.optimizer.rates(steps) * root / -np.expm1(steps * math.log(self.optimizer.beta1))
            terms_eps = terms * (root**2 if self.eps_inside_root else root)
            # There is no step 0.
            nothing = np.zeros(_BLOCK - len(steps))
            while len(self._blocks) > 2 + self.horizon // _BLOCK:
                del self._blocks[min(self._blocks)]
            self._blocks[number] = (np.concatenate([nothing, terms]), np.concatenate([nothing, terms_eps]))
        return self._blocks[number]

    def _log_sums_at(self, first: int, end: int) -> np.ndarray:
        """Return L of each step in [first, end)."""
        self._reach_log(end)
        steps, last = np.arange(first, end), len(self.log_sums) - 1
        return self.log_sums[np.minimum(steps, last)] + self.log_slope * np.maximum(steps - last, 0)

    def _reach(self, completed_steps: int) -> None:
        """Make P long enough for every J <= K, and L for every s <= K."""
        while not self._decay_done and len(self.decay) <= completed_steps:
            first = len(self.decay) - 1
            steps = np.arange(first, first + max(_BLOCK, first), dtype=np.float64)
            keep = 1.0 - np.minimum(1.0, self._alpha * steps)
            self.decay = np.concatenate([self.decay, self.decay[-1] * np.cumprod(keep)])
            self._decay_done = self.decay[-1] == 0.0
            if self._decay_done:
                self.decay = self.decay[: int(np.argmax(self.decay == 0.0)) + 1].copy()
        self._reach_log(completed_steps + 1)

    def _reach_log(self, end: int) -> None:
        settled = self.optimizer.schedule.settled
        while not self._log_done and len(self.log_sums) < end:
            first = len(self.log_sums)
            last = first + max(_BLOCK, first) if settled is None else min(settled, first + max(_BLOCK, first))
            decay = self.optimizer.rates(np.arange(first, last + 1)) * self._weight_decay
            self.log_sums = np.concatenate([self.log_sums, self.log_sums[-1] + np.cumsum(np.log1p(-decay[:-1]))])
            if last == settled:
                self._log_done, self.log_slope = True, float(np.log1p(-decay[-1]))

    def for_rows(self, last_update_step: np.ndarray) -> tuple[np.ndarray, list[Movement]]:
        """Return P, and movements, of rows last touched at the given steps, [n]: rows read P theta - all movements."""
        idle, owing = self._idle(last_update_step)
        decay = self.decay[np.minimum(idle, len(self.decay) - 1)]
        if self._weight_decay:
            last = len(self.log_sums) - 1
            then = self.log_sums[np.minimum(last_update_step, last)]
            then = then + self.log_slope * np.maximum(last_update_step - last, 0)
            decay = decay * np.where(owing, np.exp(self.log_now - then), 1.0)
        moving = owing & (idle <= self.horizon)
        age = np.where(moving, idle, 0)
        movements = []
        if self.momentum:
            movements.append(Movement(np.where(moving, self.momentum_drift[age], 0.0), self.eps_term[age]))
        if self.ahead:
            movements.append(Movement(np.where(moving, -self.lookahead_correction[age], 0.0), self.correction_eps[age]))
        return decay, movements

    def without_decay(self, last_update_step: np.ndarray) -> list[Movement]:
        """Return movements as :meth:`for_rows`, had the rows not decayed since: rows read theta - all movements."""
        _, owing = self._idle(last_update_step)
        if not self.momentum:
            return []
        steps, inverse = np.unique(np.where(owing, last_update_step, 0), return_inverse=True)
        movements = [self._movement(steps, 1.0, until=self.completed_steps)]
        if self.ahead:
            ahead = self._movement(steps, self._undo, until=None)
            movements.append(Movement(-ahead.drift, ahead.eps_term))
        return [Movement(np.where(owing, drift[inverse], 0.0), eps_term[inverse]) for drift, eps_term in movements]

    def _movement(self, steps: np.ndarray, undo: np.ndarray | float, until: int | None) -> Movement:
        """Return sum_j eta_t r^j c_t undo_j of rows touched at ``steps`` (in order), over t = s + j up to ``until``.

        Without a bound the constant decay is undone too.
        """
        weights = undo * self._powers[1:], undo * self._powers_eps[1:]
        sums = np.zeros((2, len(steps)))
        for block in np.unique(steps // _BLOCK):
            chosen = steps // _BLOCK == block
            low, high = int(steps[chosen][0]), int(steps[chosen][-1])
            times, scale = np.arange(low + 1, high + self.horizon + 1), np.ones(int(chosen.sum()))
            factor = np.ones(len(times)) if until is None else (times <= until).astype(np.float64)
            if until is None and self._weight_decay:
                logs = self._log_sums_at(low, high + self.horizon + 1)
                factor, scale = np.exp(logs[0] - logs[1:]), np.exp(logs[steps[chosen] - low] - logs[0])
            for part, terms in enumerate(self._terms(low + 1, high + self.horizon + 1)):
                sums[part, chosen] = scale * np.correlate(terms * factor, weights[part], "valid")[steps[chosen] - low]
        return Movement(sums[0], self._eps_term(sums[1], sums[0]))

    def _idle(self, last_update_step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of steps since each row's last touch, and whether it has a deferred update.

        Raises:
            ValueError: a row was last touched after the completed steps.
        """
        owing = np.ones(last_update_step.shape, dtype=bool) if self.from_start else last_update_step > 0
        idle = np.where(owing, self.completed_steps - last_update_step.astype(np.int64), 0)
        if idle.size and idle.min() < 0:
            raise ValueError(
                f"a row was last touched at step {int(last_update_step.max())}, after the {self.completed_steps} "
                "completed steps: restore completed_steps together with the tables"
            )
        return idle, owing


def deferred_update_coefficients(optimizer: RowOptimizer, dtype: str) -> DeferredUpdateCoefficients | None:
    """Return the coefficients of an optimizer; None if it leaves untouched rows alone."""
    if not (optimizer.read_alpha or optimizer.constant_decay or optimizer.idle_momentum):
        return None
    return DeferredUpdateCoefficients(optimizer, dtype)
