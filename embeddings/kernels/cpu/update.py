"""The compiled update: each touched row is read, moved by its optimizer and written, by one thread."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import DIM, STEP_BASE, VECTOR_BASE, WEIGHT_BASE
from embeddings.kernels.cpu.idle import idle_coefficients, share_of_m
from embeddings.kernels.cpu.philox import lane_of, philox4x32
from embeddings.kernels.cpu.threads import AHEAD
from embeddings.kernels.layout import Layout
from embeddings.optim import SGD, Adagrad, Adam, RMSprop, RowOptimizer, RowwiseAdagrad, RowwiseAdam
from embeddings.philox import table_key
from embeddings.rounding import STREAM

_STREAM, _MASK, _SHIFT = np.uint64(STREAM), np.uint64(0xFFFFFFFF), np.uint64(32)

# What is compiled apart, and for which optimizer: the first that fits.
DESCEND, ADAGRAD, ROWWISE_ADAGRAD, RMSPROP, ADAM, ROWWISE_ADAM = range(6)
KINDS = {
    SGD: DESCEND, Adagrad: ADAGRAD, RowwiseAdagrad: ROWWISE_ADAGRAD, RMSprop: RMSPROP, RowwiseAdam: ROWWISE_ADAM,
    Adam: ADAM,
}  # fmt: skip
NUM_VECTORS = {DESCEND: 0, ADAGRAD: 1, ROWWISE_ADAGRAD: 0, RMSPROP: 1, ADAM: 2, ROWWISE_ADAM: 1}

# Steps whose powers of beta are looked up; two powers take as long as the rest of a row of 16.
TABLED_POWERS = 4096


class Rule(NamedTuple):
    """An optimizer at one step, in numbers: its options are no other code, so nothing is compiled for them."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    alpha: float
    keep: float  # of the constant decay: 1 - eta weight_decay
    clip: float  # of a row's gradient; 0: none
    lead_moved: float
    lead_floor: float
    fading: bool  # moments shrink at each step, also with beta1 = 0, where they move nothing


def kind_of(optimizer: RowOptimizer) -> int:
    """Which of the compiled updates is the optimizer's."""
    return next(kind for one, kind in KINDS.items() if isinstance(optimizer, one))


def rule_of(optimizer: RowOptimizer, step: int, lead: tuple[float, float]) -> Rule:
    """``lead``: lead_moved and lead_floor of embeddings.decay.IdleCoefficients, (0, 1) where nothing is ahead."""
    rate = optimizer.rate(step)
    beta1, beta2 = optimizer.betas or (0.0, 0.0)
    return Rule(
        rate=rate,
        beta1=beta1,
        beta2=beta2,
        eps=float(getattr(optimizer, "eps", 0.0)),
        alpha=optimizer.idle_alpha,
        keep=1.0 - rate * optimizer.constant_decay,
        clip=optimizer.clip_row_norm or 0.0,
        lead_moved=lead[0],
        lead_floor=lead[1],
        fading=optimizer.fading,
    )


def fades_of(optimizer: RowOptimizer, real: np.dtype) -> np.ndarray:
    """beta1^n and beta2^n for n < TABLED_POWERS, [n, 2]: what n steps leave of m and v."""
    return (np.array(optimizer.betas or (0.0, 0.0)) ** np.arange(TABLED_POWERS)[:, None]).astype(real)


def rounding_of(layout: Layout) -> np.ndarray:
    """(first row, first column, two words of the key) of each table, uint64 [T, 4]; no table if rows are no halves."""
    if layout.dtype == layout.compute_dtype:
        return np.empty((0, 4), dtype=np.uint64)
    words = [(t.row_start, t.column_start, *table_key(layout.seed, t.name)) for t in layout.tables]
    return np.array(words, dtype=np.uint64)


@compiled(inline="always")
def sum_gradients(sums, total, grads, direct, places, shares, keys, first, last, low, scale, dim):  # type: ignore[no-untyped-def]
    """Adds up the gradients of the keys [first, last) of a row, in their order, at ``total`` of ``sums``.

    -1: there is one that counts as it is, and it stays where it is; its place is the second number.
    """
    real = sums.dtype.type
    at, share = np.int64(keys[first] & low), real(scale)
    if not direct:
        at, share = places[at], real(shares[at] * scale)
    if last == first + 1 and share == 1.0:
        return -1, at
    simd.put_scaled(sums, total, grads, at, (share,), dim)
    for j in range(first + 1, last):
        at, share = np.int64(keys[j] & low), real(scale)
        if not direct:
            at, share = places[at], real(shares[at] * scale)
        simd.add_scaled(sums, total, grads, at, (share,), dim)
    return total, at


@compiled()
def draw_words(words, at, step, row, rounding, dim):  # type: ignore[no-untyped-def]
    """embeddings.rounding.rounding_words of one row, at ``at``; ``rounding``: see :func:`rounding_of`."""
    row, first_column = np.uint64(row) + rounding[0], np.int64(rounding[1])
    upper, step_word = (row >> _SHIFT) << np.uint64(16), np.uint64(step) & _MASK
    column = first_column - first_column % 4
    while column < first_column + dim:
        quad = upper | np.uint64(column >> 2)
        drawn = philox4x32(step_word, row & _MASK, quad & _MASK, _STREAM, rounding[2], rounding[3])
        for lane in range(4):
            d = column + lane - first_column
            if 0 <= d < dim:
                words[at + d] = lane_of(drawn, lane)
        column += 4


@cache
def apply_updates(kind: int, has_idle: bool, momentum: bool, one_dim: int) -> Any:
    """The update of rows by optimizers of this kind (:func:`kind_of`): one step of every touched row.

    has_idle: whether idleness owes rows something; momentum: whether that moves them. one_dim: ``special_dim`` of all
    tables.

    For keys to sums see embeddings.kernels.cpu.sort; then a Rule; then idleness. words: uint32, room for one row of
    each task where ``rounding`` is not empty.
    """

    num_vectors, rowwise = NUM_VECTORS[kind], kind in (ROWWISE_ADAGRAD, ROWWISE_ADAM)
    averaging = kind in (RMSPROP, ADAM, ROWWISE_ADAM)

    @compiled(parallel=True)
    def update(  # type: ignore[no-untyped-def]
        weights, vectors, row_values, last_steps, grads, geometry, keys, runs, place_bits, direct, places, shares,
        tasks, num_tasks, sums, words, rounding, rule, fades, step, scale, decay, near, log_sums, log_now, log_slope,
        from_start, inside,
    ):  # fmt: skip
        real = grads.dtype.type
        one, nothing, within, beside = real(1.0), real(0.0), real(inside), real(1 - inside)
        eta, beta1, beta2, eps, alpha, constant_keep, clip, lead_moved, lead_floor, fading = rule
        gain1, gain2, small = real(1.0 - beta1), real(1.0 - beta2), real(eps)
        unbiased = 1.0 - beta2**step
        rate, root = real(eta / (1.0 - beta1**step)), real(1.0 / math.sqrt(unbiased))
        lead, floor_ahead = real(lead_moved), real(lead_floor)
        bits, low = np.uint64(place_bits), np.uint64((1 << place_bits) - 1)
        for task in prange(num_tasks):
            t, first, end = tasks[task, 0], tasks[task, 1], tasks[task, 2]
            dim, base = one_dim or geometry[t, DIM], geometry[t, WEIGHT_BASE]
            vector_base, step_base = geometry[t, VECTOR_BASE], geometry[t, STEP_BASE]
            width, total = num_vectors * dim, task * (sums.size // tasks.shape[0])
            # Keys before this one have been prefetched.
            fetched = last = first
            for run in range(first, first + tasks[task, 4]):
                i, last = last, runs[run]
                row = np.int64(keys[i] >> bits)
                while fetched < min(last + AHEAD, end):
                    ahead = np.int64(keys[fetched] >> bits)
                    if fetched == first or np.int64(keys[fetched - 1] >> bits) != ahead:
                        simd.prefetch_write(weights, base + ahead * dim, dim)
                        simd.prefetch_write(vectors, vector_base + ahead * width, width)
                        simd.prefetch_write(last_steps, step_base + ahead, 1)
                        if rowwise:
                            simd.prefetch_write(row_values, step_base + ahead, 1)
                    place = np.int64(keys[fetched] & low)
                    simd.prefetch_read(grads, place if direct else places[place], dim)
                    fetched += 1
                summed, g = sum_gradients(sums, total, grads, direct, places, shares, keys, i, last, low, scale, dim)
                grad = grads
                if summed >= 0:
                    grad, g = sums, summed
                if clip > 0.0:
                    norm = math.sqrt(simd.sum_of_squares(grad, g, dim))
                    if norm > clip:
                        simd.put_scaled(sums, total, grad, g, (real(clip / norm),), dim)
                        grad, g = sums, total
                at, vector = base + row * dim, vector_base + row * width
                seen = np.int64(last_steps[step_base + row])
                last_steps[step_base + row] = step
                idle = step - 1 - seen if seen > 0 or from_start else 0
                p, moved, floor, taken, taken_floor = one, nothing, one, nothing, one
                if has_idle:
                    p, moved, floor, taken, taken_floor = idle_coefficients(
                        seen, step - 1, decay, near, log_sums, log_now, log_slope, from_start
                    )
                if rounding.size:
                    draw_words(words, total, step, row, rounding[t], dim)
                keep = real((1.0 - min(1.0, alpha * idle)) * constant_keep)
                factor, moved, taken = keep * p, keep * moved, keep * taken
                keep1, keep2 = one, one
                if averaging:
                    passed = idle + 1 if fading else 1
                    if passed < fades.shape[0]:
                        keep1, keep2 = fades[passed, 0], fades[passed, 1]
                    else:
                        keep1, keep2 = real(beta1**passed), real(beta2**passed)
                square, second = nothing, nothing
                if rowwise:
                    square = real(simd.sum_of_squares(grad, g, dim) / dim)
                    second = simd.load_one(row_values, step_base + row, one)
                if kind == ADAM:
                    scalars = (
                        factor, moved, within * floor, beside * floor,
                        taken, within * taken_floor, beside * taken_floor, keep1, keep2,
                        gain1, gain2, rate, root, within * real(eps * unbiased), beside * small,
                        lead, within * floor_ahead, beside * floor_ahead,
                    )  # fmt: skip
                    if not momentum:
                        simd.adam_lazy(weights, at, vectors, vector, grad, g, words, total, scalars, dim)
                    elif moved == 0.0 and taken == 0.0:
                        simd.adam_cold(weights, at, vectors, vector, grad, g, words, total, scalars, dim)
                    else:
                        simd.adam(weights, at, vectors, vector, grad, g, words, total, scalars, dim)
                elif kind == ROWWISE_ADAM:
                    share = share_of_m(
                        second, moved, within * floor, beside * floor, taken, within * taken_floor, beside * taken_floor
                    )
                    second = keep2 * second + gain2 * square
                    simd.store_one(row_values, step_base + row, second)
                    pace = rate / (root * math.sqrt(second + within * real(eps * unbiased)) + beside * small)
                    pace += lead / (math.sqrt(second + within * floor_ahead) + beside * floor_ahead)
                    scalars_rowwise = (factor, share, keep1, gain1, pace)
                    simd.rowwise_adam(weights, at, vectors, vector, grad, g, words, total, scalars_rowwise, dim)
                elif kind == RMSPROP:
                    scalars_rmsprop = (factor, keep2, gain2, real(eta), within * small, beside * small)
                    simd.rmsprop(weights, at, vectors, vector, grad, g, words, total, scalars_rmsprop, dim)
                elif kind == ADAGRAD:
                    scalars_adagrad = (factor, real(eta), within * small, beside * small)
                    simd.adagrad(weights, at, vectors, vector, grad, g, words, total, scalars_adagrad, dim)
                else:
                    pace = real(eta)
                    if kind == ROWWISE_ADAGRAD:
                        second += square
                        simd.store_one(row_values, step_base + row, second)
                        pace /= math.sqrt(second) + small
                    simd.descend(weights, at, weights, at, grad, g, words, total, (factor, pace), dim)

    return update


@compiled(parallel=True)
def squared_norms(grads, geometry, keys, runs, place_bits, direct, places, shares, tasks, num_tasks, sums, squares):  # type: ignore[no-untyped-def]
    """For each key, in float64 ``squares``, the squared norm of the summed gradient of the row that starts there, or 0.

    Not for each task: how rows are cut into tasks depends on the number of threads.
    """
    low = np.uint64((1 << place_bits) - 1)
    for task in prange(num_tasks):
        t, first, end = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        dim, total = geometry[t, DIM], task * (sums.size // tasks.shape[0])
        last = first
        for run in range(first, first + tasks[task, 4]):
            i, last = last, runs[run]
            if i + AHEAD < end:
                place = np.int64(keys[i + AHEAD] & low)
                simd.prefetch_read(grads, place if direct else places[place], dim)
            summed, g = sum_gradients(sums, total, grads, direct, places, shares, keys, i, last, low, 1.0, dim)
            squares[i] = simd.sum_of_squares(sums, summed, dim) if summed >= 0 else simd.sum_of_squares(grads, g, dim)
            squares[i + 1 : last] = 0.0
