"""Row optimizers in Triton: updates of touched rows, as in :class:`embeddings.kernels.reference.ReferenceKernel`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from embeddings.kernels.triton.deferred_update import deferred_decay, movement, root
from embeddings.kernels.triton.rounding import store

NORM, SGD, ADAGRAD, RMSPROP, ADAM = (tl.constexpr(rule) for rule in range(5))


def rule_number(name: str) -> Any:
    """Return the number of an update rule (``embeddings.optim.base.RowOptimizer.rule``); ROWWISE is a flag beside it.

    Raises:
        ValueError: The Triton kernels have no such rule.
    """
    rules = {"sgd": SGD, "adagrad": ADAGRAD, "rmsprop": RMSPROP, "adam": ADAM}
    plain = name.removeprefix("rowwise_")
    if plain not in rules:
        raise ValueError(f"the triton kernel has no update rule '{name}': add it to rules.py, or use backend reference")
    return rules[plain]


# Words of a table's description: first key, bases, first row and column in the whole table, key of its draws.
TABLE_WORDS = tl.constexpr(8)
# Settings of the optimizer at one step, float64, in this order.
SETTINGS = (
    "scale", "clip", "rate", "eps", "decay_factor", "alpha",
    "gain1", "gain2", "unbias1", "unbias2", "log2_beta1", "log2_beta2", "dense_moments", "moments_decay",
)  # fmt: skip
_SCALE, _CLIP, _RATE, _EPS, _DECAY_FACTOR, _ALPHA = (tl.constexpr(i) for i in range(6))
_GAIN1, _GAIN2, _UNBIAS1, _UNBIAS2 = (tl.constexpr(i) for i in range(6, 10))
_LOG2_BETA1, _LOG2_BETA2, _DENSE_MOMENTS, _MOMENTS_DECAY = (tl.constexpr(i) for i in range(10, 14))


@triton.jit
def power(log2_beta, n):
    """Return beta^n for n of at least 1, in the type of ``n``; ``log2_beta`` is a float64 scalar.

    In float32 the logarithm is split into two parts, so that the exponent n log2(beta) does not lose its low bits.
    """
    if n.dtype == tl.float32:
        high = log2_beta.to(tl.float32)
        low = (log2_beta - high.to(tl.float64)).to(tl.float32)
        exponent = n * high
        rest = tl.fma(n, tl.zeros_like(n) + high, -exponent) + n * low
        return tl.exp2(exponent) * (1.0 + 0.6931471805599453 * rest)
    else:
        return tl.exp2(n * log2_beta)


@triton.jit
def read_rows(
    weights, vectors, row_values, last_steps, table_descriptors, table, key, mask, d,
    DIM: tl.constexpr, ROWWISE: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Return rows ``key`` [TILE] of ``table`` [TILE] where ``mask``, and the addresses of rows and state.

    Call it well before :func:`apply`, so that the gradients are summed while the rows are being loaded.

    Returns:
        theta, first vector or theta, second vector or theta, [TILE, BLOCK]; value and last step [TILE]; the
        addresses of all these; local rows; the addresses of their tables' descriptions.
    """
    writing = mask[:, None] & (d < DIM)
    table_words = table_descriptors + table * TABLE_WORDS
    row = tl.where(mask, key - tl.load(table_words, mask=mask, other=0), 0)
    # Tables start at cache lines: without the hints rows would be moved in pieces of 4 bytes.
    weight_base = tl.multiple_of(tl.load(table_words + 1, mask=mask, other=0), 16)
    vector_base = tl.multiple_of(tl.load(table_words + 2, mask=mask, other=0), 16)
    step_base = tl.load(table_words + 3, mask=mask, other=0)
    theta_at = weights + weight_base[:, None] + row[:, None] * DIM + d
    vector_at = vectors + vector_base[:, None] + row[:, None] * (VECTORS * DIM) + d
    value_at, last_at = row_values + step_base + row, last_steps + step_base + row
    theta = tl.load(theta_at, mask=writing, other=0.0)
    last = tl.load(last_at, mask=mask, other=0)
    first, second = theta, theta
    if VECTORS >= 1:
        first = tl.load(vector_at, mask=writing, other=0.0)
    if VECTORS >= 2:
        second = tl.load(vector_at + DIM, mask=writing, other=0.0)
    value = last
    if ROWWISE:
        value = tl.load(value_at, mask=mask, other=0.0)
    return theta, first, second, value, last, theta_at, vector_at, value_at, last_at, row, table_words


@triton.jit
def squared_norm(grad, mask, d, DIM: tl.constexpr):
    """Return the sum of the squared gradients where ``mask``, float64."""
    square = tl.where(mask[:, None] & (d < DIM), grad, 0.0).to(tl.float64)
    return tl.sum(square * square)


@triton.jit
def apply(
    weights, vectors, row_values, settings, near, num_near, num_pairs, lookahead, decay,
    num_decay, logs, num_logs, now, step,
    theta, first, second, value, last, theta_at, vector_at, value_at, last_at, row, table_words, grad, mask, d,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, RULE: tl.constexpr, ROWWISE: tl.constexpr,
    VECTORS: tl.constexpr, CLIP: tl.constexpr, INSIDE: tl.constexpr, DECAY: tl.constexpr, AHEAD: tl.constexpr,
    DEFERRED: tl.constexpr, MOMENTUM: tl.constexpr, FROM_START: tl.constexpr, LOGS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Update the rows that :func:`read_rows` has read where ``mask``, with the summed gradients [TILE, BLOCK]."""
    compute = grad.dtype
    writing = mask[:, None] & (d < DIM)
    theta = theta.to(compute)
    rate, eps = tl.load(settings + _RATE).to(compute), tl.load(settings + _EPS).to(compute)
    grad = grad * tl.load(settings + _SCALE).to(compute)
    if CLIP:
        limit = tl.load(settings + _CLIP).to(compute)
        length = tl.sqrt(tl.sum(tl.where(writing, grad * grad, 0.0), axis=1))
        grad = grad * (limit / tl.maximum(length, limit))[:, None]
    owing = last > 0
    if FROM_START:
        owing = last >= 0
    idle_steps = tl.where(owing, step - 1 - last, 0).to(compute)
    if DEFERRED:
        p, idle_now, recent = deferred_decay(
            last, step - 1, num_near, decay, num_decay, logs, num_logs, now, FROM_START, LOGS
        )
        theta = theta * p[:, None]
        share = tl.load(settings + _MOMENTS_DECAY).to(compute)
        moment_keep = 1.0 - share + share * p
    passed = 1.0 + idle_steps * tl.load(settings + _DENSE_MOMENTS).to(compute)
    if ROWWISE:
        mean_square = tl.sum(tl.where(writing, grad * grad, 0.0), axis=1) / DIM
        value = value.to(compute)
    if RULE == ADAM:
        m = first.to(compute)
        if ROWWISE:
            v = value[:, None]
        else:
            v = second.to(compute)
        if MOMENTUM:
            theta = theta - movement(m, v, near, num_pairs, idle_now, mask & recent, INSIDE)
        shrink1 = power(tl.load(settings + _LOG2_BETA1), passed)
        shrink2 = power(tl.load(settings + _LOG2_BETA2), passed)
        if DEFERRED:
            shrink1, shrink2 = shrink1 * moment_keep, shrink2 * moment_keep * moment_keep
        m = shrink1[:, None] * m + tl.load(settings + _GAIN1).to(compute) * grad
        tl.store(vector_at, m.to(vectors.dtype.element_ty), mask=writing)
        if ROWWISE:
            value = shrink2 * value + tl.load(settings + _GAIN2).to(compute) * mean_square
            tl.store(value_at, value.to(row_values.dtype.element_ty), mask=mask)
            v = value[:, None]
        else:
            v = shrink2[:, None] * v + tl.load(settings + _GAIN2).to(compute) * grad * grad
            tl.store(vector_at + DIM, v.to(vectors.dtype.element_ty), mask=writing)
    if DECAY:
        keep = 1.0 - tl.minimum(idle_steps * tl.load(settings + _ALPHA).to(compute), 1.0)
        theta = theta * (keep * tl.load(settings + _DECAY_FACTOR).to(compute))[:, None]
    if RULE == ADAM:
        mhat, vhat = m * tl.load(settings + _UNBIAS1).to(compute), v * tl.load(settings + _UNBIAS2).to(compute)
        theta = theta - rate * mhat / root(vhat, eps, INSIDE)
        if AHEAD:
            theta = theta - movement(m, v, lookahead, num_pairs, tl.zeros_like(last), mask, INSIDE)
    elif RULE == RMSPROP:
        shrink = power(tl.load(settings + _LOG2_BETA2), passed)
        if DEFERRED:
            shrink = shrink * moment_keep * moment_keep
        v = shrink[:, None] * first.to(compute) + tl.load(settings + _GAIN2).to(compute) * grad * grad
        tl.store(vector_at, v.to(vectors.dtype.element_ty), mask=writing)
        theta = theta - rate * grad / root(v, eps, INSIDE)
    elif RULE == ADAGRAD:
        if ROWWISE:
            value = value + mean_square
            tl.store(value_at, value.to(row_values.dtype.element_ty), mask=mask)
            total = value[:, None]
        else:
            total = first.to(compute) + grad * grad
            tl.store(vector_at, total.to(vectors.dtype.element_ty), mask=writing)
        theta = theta - rate * grad / root(total, eps, INSIDE)
    elif RULE == SGD:
        theta = theta - rate * grad
    else:
        tl.static_assert(False, "a rule without its branch")
    store(theta_at, theta, writing, row, table_words, mask, step, weights.dtype.element_ty, TILE, BLOCK, QUADS)
    tl.store(last_at, tl.zeros_like(last) + step, mask=mask)
