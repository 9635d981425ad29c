"""What idleness owes a row, compiled: see :mod:`embeddings.decay`."""

from __future__ import annotations

import math

from embeddings.kernels.cpu.compiled import compiled


# Inlined as it is called for each id: a call would count references of every array it is given (50 ns).
@compiled(inline="always")
def idle_coefficients(last, completed, decay, near, log_sums, log_now, log_slope, from_start):  # type: ignore[no-untyped-def]
    """P, moved, floor, taken and its floor of a row last touched at step ``last``: embeddings.decay.IdleCoefficients.

    near: [J* + 1, 4], all but P by the number of idle steps.
    """
    real = decay.dtype.type
    p, moved, floor, taken, taken_floor = real(1.0), real(0.0), real(1.0), real(0.0), real(1.0)
    if last > 0 or from_start:
        idle = completed - last
        p = decay[min(idle, decay.size - 1)]
        if log_sums.size:
            end = log_sums.size - 1
            p *= real(math.exp(log_now - log_sums[min(last, end)] - log_slope * max(last - end, 0)))
        if idle < near.shape[0]:
            moved, floor, taken, taken_floor = near[idle, 0], near[idle, 1], near[idle, 2], near[idle, 3]
    return p, moved, floor, taken, taken_floor


@compiled(inline="always")
def share_of_m(v, moved, within, beside, taken, taken_within, taken_beside):  # type: ignore[no-untyped-def]
    """What a row with one v for all its elements loses, in units of its m, as embeddings.kernels.cpu.simd.put_moved."""
    root = math.sqrt(v + within) + beside
    taken_root = math.sqrt(v + taken_within) + taken_beside
    # In one division, as for each element.
    return (moved * taken_root - taken * root) / (root * taken_root)
