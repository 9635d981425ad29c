"""What idleness owes a row, compiled: see :mod:`embeddings.decay`."""

from __future__ import annotations

import math

from embeddings.kernels.cpu.compiled import compiled


# Inlined as it is called for each id: a call would count references of every array it is given (50 ns).
@compiled(inline="always")
def idle_coefficients(last, completed, decay, moved_by, floors, log_sums, log_now, log_slope, from_start):  # type: ignore[no-untyped-def]
    """P, moved and floor of a row last touched at step ``last``: see embeddings.decay.IdleCoefficients."""
    real = decay.dtype.type
    p, moved, floor = real(1.0), real(0.0), real(1.0)
    if last > 0 or from_start:
        idle = completed - last
        p = decay[min(idle, decay.size - 1)]
        if log_sums.size:
            end = log_sums.size - 1
            p *= real(math.exp(log_now - log_sums[min(last, end)] - log_slope * max(last - end, 0)))
        if idle < moved_by.size:
            moved, floor = moved_by[idle], floors[idle]
    return p, moved, floor
