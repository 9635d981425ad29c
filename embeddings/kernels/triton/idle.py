"""What dense semantics owe an idle row: the tables of :mod:`embeddings.decay` on the device, and reading them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from embeddings.decay import IdleCoefficients


@triton.jit
def owed(last, completed, near, num_near, far, num_far, decay, num_decay, MOMENTUM: tl.constexpr):
    """(P, eta C, eps E) of rows last touched at the int32 steps ``last``; (1, 0, 1) for those never touched.

    Args:
        near: eta C(K - J, J) for J < num_near, then eps E(K - J, J).
        far: eta C(s, J*) for s < num_far, then eps E(s, J*).
        decay: P_J for J < num_decay, then the product from J* on; the last entry of each holds for every later J.
    """
    touched = last > 0
    idle = tl.where(touched, completed - last, 0)
    aged = tl.minimum(idle, num_decay - 1)
    p = tl.load(decay + aged)
    if MOMENTUM:
        is_near = idle < num_near
        age = tl.where(is_near, idle, 0)
        step = tl.minimum(last, num_far - 1)
        c = tl.where(is_near, tl.load(near + age), tl.load(far + step) * tl.load(decay + num_decay + aged))
        e = tl.where(is_near, tl.load(near + num_near + age), tl.load(far + num_far + step))
        c, e = tl.where(touched, c, 0.0), tl.where(touched, e, 1.0)
    else:
        c, e = tl.zeros_like(p), tl.zeros_like(p) + 1.0
    return p, c, e


class IdleTables(NamedTuple):
    """Arguments of :func:`owed`, of the type that rows are computed in."""

    near: torch.Tensor
    num_near: int
    far: torch.Tensor
    num_far: int
    decay: torch.Tensor
    num_decay: int


class IdleSource:
    """Carries IdleCoefficients over to the device: what changes at each step, and, where it has grown, the rest."""

    def __init__(self, rate: float, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.rate, self.eps, self.dtype, self.device = rate, eps, dtype, device
        self._grown: tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor] | None = None
        self._near: tuple[np.ndarray, torch.Tensor] | None = None
        self._nothing = torch.zeros(2, dtype=dtype, device=device)

    def at(self, idle: IdleCoefficients | None) -> IdleTables:
        """The tables as ``idle`` is now."""
        if idle is None:
            return IdleTables(self._nothing, 1, self._nothing, 1, self._nothing, 1)
        if self._grown is None or self._grown[0] is not idle.decay or self._grown[1] is not idle.far_c:
            far = self.carry(np.concatenate([self.rate * idle.far_c, self.eps * idle.far_e]))
            decay = self.carry(np.concatenate([idle.decay, idle.late_decay]))
            self._grown = (idle.decay, idle.far_c, far, decay)
        if self._near is None or self._near[0] is not idle.near_c:
            self._near = (idle.near_c, self.carry(np.concatenate([self.rate * idle.near_c, self.eps * idle.near_e])))
        far, decay = self._grown[2:]
        return IdleTables(self._near[1], len(idle.near_c), far, len(idle.far_c), decay, len(idle.decay))

    def carry(self, values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``values`` on the device, as ``dtype`` or that of the tables, without waiting for what runs there."""
        tensor = torch.from_numpy(values).to(dtype or self.dtype)
        # From pinned memory the copy waits for nothing, and the allocator keeps the memory until it is done.
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
