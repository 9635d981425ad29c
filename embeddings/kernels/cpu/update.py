"""The compiled update: each touched row is read, moved by its optimizer and written, by one thread."""

from __future__ import annotations

import numpy as np
from numba import prange

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import DIM, ROWS, STEP_BASE, VECTOR_BASE, WEIGHT_BASE
from embeddings.kernels.cpu.idle import idle_coefficients
from embeddings.kernels.cpu.sort import sort_by_row
from embeddings.kernels.cpu.threads import AHEAD
from embeddings.optim import SGD, Adagrad, Adam

RULE_SGD, RULE_ADAGRAD, RULE_ADAM = range(3)
RULES = {Adam: RULE_ADAM, Adagrad: RULE_ADAGRAD, SGD: RULE_SGD}


@compiled(parallel=True)
def apply_updates(  # type: ignore[no-untyped-def]
    weights, vectors, last_steps, grads, geometry, num_vectors, rows, places, shares, order, tasks, rule, step,
    alpha, beta1, beta2, eta, eps, has_idle, decay, momentum, near_c, near_e, far_c, far_e, late_decay,
):  # fmt: skip
    real = weights.dtype.type
    gain1, gain2, small = real(1.0 - beta1), real(1.0 - beta2), real(eps)
    rate, root = real(eta / (1.0 - beta1**step)), real(1.0 / np.sqrt(1.0 - beta2**step))
    for task in prange(tasks.shape[0]):
        t, first, end, shift = tasks[task]
        if first == end:
            continue
        table = geometry[t]
        dim, base, vector_base, step_base = table[DIM], table[WEIGHT_BASE], table[VECTOR_BASE], table[STEP_BASE]
        width = num_vectors * dim
        entries, keys = sort_by_row(order[first:end], rows, table[ROWS], shift)
        n = end - first
        total = np.empty(dim, weights.dtype)
        i = 0
        while i < n:
            row = keys[i]
            last = i + 1
            while last < n and keys[last] == row:
                last += 1
            if i + AHEAD < n:
                ahead = keys[i + AHEAD]
                simd.prefetch_write(weights, base + ahead * dim, dim)
                simd.prefetch_write(vectors, vector_base + ahead * width, width)
                simd.prefetch_write(last_steps, step_base + ahead, 1)
                simd.prefetch_read(grads, places[entries[i + AHEAD]], dim)
            grad, g = grads, places[entries[i]]
            share = real(shares[entries[i]])
            if last > i + 1 or share != 1.0:
                simd.put_scaled(total, 0, grads, g, (share,), dim)
                for j in range(i + 1, last):
                    if j + AHEAD < n:
                        simd.prefetch_read(grads, places[entries[j + AHEAD]], dim)
                    share = real(shares[entries[j]])
                    simd.add_scaled(total, 0, grads, places[entries[j]], (share,), dim)
                grad, g = total, 0
            i = last
            at, vector = base + row * dim, vector_base + row * width
            seen = np.int64(last_steps[step_base + row])
            last_steps[step_base + row] = step
            if rule == RULE_ADAM:
                idle = step - 1 - seen if seen > 0 else 0
                p, c, floor = real(1.0), real(0.0), real(1.0)
                if has_idle:
                    p, c, floor = idle_coefficients(
                        seen, step - 1, decay, momentum, near_c, near_e, far_c, far_e, late_decay
                    )
                keep = real(1.0 - min(1.0, alpha * idle))
                passed = idle if momentum else 0
                moved = keep * c
                scalars = (
                    keep * p, moved, floor, real(beta1 ** (passed + 1)), real(beta2 ** (passed + 1)),
                    gain1, gain2, rate, root, small,
                )  # fmt: skip
                if moved == 0.0:
                    simd.adam_at_rest(weights, at, vectors, vector, grad, g, scalars, dim)
                else:
                    simd.adam(weights, at, vectors, vector, grad, g, scalars, dim)
            elif rule == RULE_ADAGRAD:
                simd.adagrad(weights, at, vectors, vector, grad, g, (real(eta), small), dim)
            else:
                simd.descend(weights, at, grad, g, (real(eta),), dim)
