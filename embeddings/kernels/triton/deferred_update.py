"""Deferred updates on a GPU: coefficients of :mod:`embeddings.optim.deferred_update`, and functions that apply them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from embeddings.kernels.triton.staging import Staging
from embeddings.optim.deferred_update import DeferredUpdateCoefficients


@triton.jit
def deferred_decay(
    last, completed, num_near, decay, num_decay, logs, num_logs, now, FROM_START: tl.constexpr, LOGS: tl.constexpr
):  # fmt: skip
    """Return P of rows last touched at steps ``last``, their positions in ``near``, and flags of rows with a position.

    See embeddings.optim.deferred_update.DeferredUpdateCoefficients. ``last`` is int32. ``near`` is its attribute
    ``movements``, for rows untouched for J < num_near steps. ``decay`` is P without the constant decay for J <
    num_decay; the last entry holds for every later J. ``logs`` is float64 L[s] for s < num_logs, read if LOGS; ``now``
    is float64 L[K], and what a later step adds.
    """
    owing = last > 0
    if FROM_START:
        owing = last >= 0
    idle_steps = tl.where(owing, completed - last, 0)
    p = tl.load(decay + tl.minimum(idle_steps, num_decay - 1))
    if LOGS:
        end = num_logs - 1
        later = tl.maximum(last - end, 0).to(tl.float64)
        log = tl.load(now) - tl.load(logs + tl.minimum(last, end)) - tl.load(now + 1) * later
        p = p * tl.where(owing, tl.exp(log.to(p.dtype)), 1.0)
    return p, idle_steps, owing & (idle_steps < num_near)


@triton.jit
def movement(m, v, near, num_pairs, idle_steps, moving, INSIDE: tl.constexpr):
    """Sum drift m / root over the nodes: the amount to subtract from rows [n, BLOCK] with these moments.

    ``near`` has the nodes in pairs. The nodes of rows not touched for J steps start at 4 J num_pairs. The number of
    pairs is no compile-time constant, because it changes in a run's first steps.
    """
    taken = tl.zeros_like(m)
    for pair in range(num_pairs):
        at = near + (idle_steps * num_pairs + pair) * 4
        drift1 = tl.load(at, mask=moving, other=0.0)[:, None]
        drift2 = tl.load(at + 2, mask=moving, other=0.0)[:, None]
        root1 = root(v, tl.load(at + 1, mask=moving, other=1.0)[:, None], INSIDE)
        root2 = root(v, tl.load(at + 3, mask=moving, other=1.0)[:, None], INSIDE)
        taken += (drift1 * root2 + drift2 * root1) / (root1 * root2)
    return taken * m


@triton.jit
def root(square, eps, INSIDE: tl.constexpr):
    """Return the denominator of Adam and Adagrad."""
    if INSIDE:
        return tl.sqrt(square + eps)
    else:
        return tl.sqrt(square) + eps


class DeferredTables(NamedTuple):
    """Arguments of :func:`deferred_decay` and :func:`movement`; ``lookahead`` is ``near`` for the next update."""

    near: torch.Tensor
    num_near: int
    num_pairs: int
    lookahead: torch.Tensor
    decay: torch.Tensor
    num_decay: int
    logs: torch.Tensor
    num_logs: int
    now: torch.Tensor


class DeferredSource:
    """DeferredUpdateCoefficients on the device; tables that change at each step are copied, others when grown."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        # A Staging of its own, whose tensors stay valid for a step however often other settings are copied.
        self._staging = Staging(device)
        self._nothing = torch.zeros(2, dtype=dtype, device=device)
        self._no_logs = torch.zeros(2, dtype=torch.float64, device=device)
        self._decay = self._logs = (np.zeros(0), self._nothing)
        self._near: tuple[np.ndarray | None, torch.Tensor] = (None, self._nothing)
        self._now: tuple[int, torch.Tensor] = (-1, self._no_logs)

    def at(self, deferred: DeferredUpdateCoefficients | None) -> DeferredTables:
        """Return the device's tables with the present coefficients of ``deferred``."""
        if deferred is None:
            return DeferredTables(
                self._nothing, 1, 0, self._nothing, self._nothing, 1, self._no_logs, 1, self._no_logs
            )  # fmt: skip
        if self._decay[0] is not deferred.decay:
            self._decay = (deferred.decay, _kept(deferred.decay, self.dtype, self._nothing.device))
        if self._near[0] is not deferred.movements:
            both = np.concatenate([deferred.lookahead[None], deferred.movements])
            self._near = (deferred.movements, self._staging(both, self.dtype))
        if len(deferred.log_sums) and self._logs[0] is not deferred.log_sums:
            self._logs = (deferred.log_sums, _kept(deferred.log_sums, torch.float64, self._nothing.device))
        if len(deferred.log_sums) and self._now[0] != deferred.completed_steps:
            now = self._staging(np.array([deferred.log_now, deferred.log_slope]), torch.float64)
            self._now = (deferred.completed_steps, now)
        return DeferredTables(
            self._near[1][1:], len(deferred.movements), deferred.lookahead.shape[0] // 2, self._near[1][0],
            self._decay[1], len(deferred.decay),
            self._logs[1] if len(deferred.log_sums) else self._no_logs, len(deferred.log_sums), self._now[1],
        )  # fmt: skip


def _kept(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``values`` on the device, in newly allocated memory, because they seldom change."""
    tensor = torch.from_numpy(values).to(dtype)
    # A copy from pinned memory does not block, and the allocator keeps the memory until the copy is done.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
