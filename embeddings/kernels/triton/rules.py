"""Row optimizers in Triton: what :class:`embeddings.kernels.reference.ReferenceKernel` does to a touched row."""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.kernels.triton.idle import owed

NORM, SGD, ADAGRAD, ADAM = (tl.constexpr(rule) for rule in range(4))
# Words of a table's description: first key, bases, first row and column in the whole table, key of its draws.
GEOMETRY_WORDS = tl.constexpr(8)
# Settings: gradient scale, eta, eps; 1 - beta1, 1 - beta2, 1 / (1 - beta1^k), 1 / (1 - beta2^k), log beta1, log beta2,
# alpha.


@triton.jit
def apply(
    weights, vectors, last_steps, geometry, settings, near, num_near, far, num_far, decay, num_decay,
    step, table, key, grad, mask, d,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, RULE: tl.constexpr, VECTORS: tl.constexpr,
    IDLE: tl.constexpr, MOMENTUM: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Updates the rows ``key`` [TILE] of ``table`` [TILE] where ``mask``, with the summed gradients [TILE, BLOCK].

    Returns:
        For RULE NORM, which changes nothing, the sum of the squared gradients, float64; else 0.
    """
    compute = grad.dtype
    writing = mask[:, None] & (d < DIM)
    if RULE == NORM:
        square = tl.where(writing, grad, 0.0).to(tl.float64)
        return tl.sum(square * square)
    table_words = geometry + table * GEOMETRY_WORDS
    row = tl.where(mask, key - tl.load(table_words, mask=mask, other=0), 0)
    # Tables start at cache lines: without the hints rows would be moved in pieces of 4 bytes.
    theta_at = (
        weights + tl.multiple_of(tl.load(table_words + 1, mask=mask, other=0), 16)[:, None] + row[:, None] * DIM + d
    )
    vector_base = tl.multiple_of(tl.load(table_words + 2, mask=mask, other=0), 16)
    vector_at = vectors + vector_base[:, None] + row[:, None] * (VECTORS * DIM) + d
    last_at = last_steps + tl.load(table_words + 3, mask=mask, other=0) + row
    theta = tl.load(theta_at, mask=writing, other=0.0).to(compute)
    grad = grad * tl.load(settings).to(compute)
    rate, eps = tl.load(settings + 1).to(compute), tl.load(settings + 2).to(compute)
    if RULE == ADAM:
        m = tl.load(vector_at, mask=writing, other=0.0).to(compute)
        v = tl.load(vector_at + DIM, mask=writing, other=0.0).to(compute)
        last = tl.load(last_at, mask=mask, other=0)
        idle = tl.where(last > 0, step - 1 - last, 0).to(tl.float64)
        if IDLE:
            p, c, e = owed(last, step - 1, near, num_near, far, num_far, decay, num_decay, MOMENTUM)
            theta = theta * p[:, None]
            if MOMENTUM:
                theta = theta - c[:, None] * m / (tl.sqrt(v) + e[:, None])
            theta = theta * (1.0 - tl.minimum(idle * tl.load(settings + 9), 1.0)).to(compute)[:, None]
        passed = idle * 0.0 + 1.0
        if MOMENTUM:
            passed = idle + 1.0
        m = tl.exp(passed * tl.load(settings + 7)).to(compute)[:, None] * m + tl.load(settings + 3).to(compute) * grad
        v = (
            tl.exp(passed * tl.load(settings + 8)).to(compute)[:, None] * v
            + tl.load(settings + 4).to(compute) * grad * grad
        )
        theta = theta - rate * (m * tl.load(settings + 5).to(compute)) / (
            tl.sqrt(v * tl.load(settings + 6).to(compute)) + eps
        )
        tl.store(vector_at, m, mask=writing)
        tl.store(vector_at + DIM, v, mask=writing)
    elif RULE == ADAGRAD:
        total = tl.load(vector_at, mask=writing, other=0.0).to(compute) + grad * grad
        tl.store(vector_at, total, mask=writing)
        theta = theta - rate * grad / (tl.sqrt(total) + eps)
    else:
        theta = theta - rate * grad
    tl.store(theta_at, theta, mask=writing)
    tl.store(last_at, tl.zeros_like(row).to(tl.int32) + step, mask=mask)
    return tl.zeros([], dtype=tl.float64)
