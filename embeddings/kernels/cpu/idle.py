"""What idleness owes a row, compiled: see :mod:`embeddings.decay`."""

from __future__ import annotations

from embeddings.kernels.cpu.compiled import compiled


# Inlined as it is called for each id: a call would count references of every array it is given (50 ns).
@compiled(inline="always")
def idle_coefficients(last, completed, decay, momentum, near_c, near_e, far_c, far_e, late_decay):  # type: ignore[no-untyped-def]
    """P, eta C and eps E of a row last touched at step ``last``: see embeddings.decay."""
    real = decay.dtype.type
    if last == 0:
        return real(1.0), real(0.0), real(1.0)
    idle = completed - last
    p = decay[min(idle, decay.size - 1)]
    if not momentum:
        return p, real(0.0), real(1.0)
    if idle < near_c.size:
        return p, near_c[idle], near_e[idle]
    step = min(last, far_c.size - 1)
    return p, far_c[step] * late_decay[min(idle, late_decay.size - 1)], far_e[step]
