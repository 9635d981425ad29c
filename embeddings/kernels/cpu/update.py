"""The compiled update: each touched row is read, moved by its optimizer and written, by one thread."""

from __future__ import annotations

import numpy as np
from numba import prange

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import DIM, STEP_BASE, VECTOR_BASE, WEIGHT_BASE
from embeddings.kernels.cpu.idle import idle_coefficients
from embeddings.kernels.cpu.threads import AHEAD
from embeddings.optim import SGD, Adagrad, Adam

RULE_SGD, RULE_ADAGRAD, RULE_ADAM = range(3)
RULES = {Adam: RULE_ADAM, Adagrad: RULE_ADAGRAD, SGD: RULE_SGD}


@compiled(parallel=True)
def apply_updates(  # type: ignore[no-untyped-def]
    weights, vectors, last_steps, grads, geometry, num_vectors, keys, place_bits, direct, places, shares, tasks,
    num_tasks, sums, rule, step, alpha, beta1, beta2, eta, eps, has_idle, decay, momentum, near_c, near_e, far_c, far_e,
    late_decay,
):  # fmt: skip
    real = grads.dtype.type
    gain1, gain2, small = real(1.0 - beta1), real(1.0 - beta2), real(eps)
    rate, root = real(eta / (1.0 - beta1**step)), real(1.0 / np.sqrt(1.0 - beta2**step))
    bits, low = np.uint64(place_bits), np.uint64((1 << place_bits) - 1)
    for task in prange(num_tasks):
        t, first, end = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        dim, base = geometry[t, DIM], geometry[t, WEIGHT_BASE]
        vector_base, step_base = geometry[t, VECTOR_BASE], geometry[t, STEP_BASE]
        width, total = num_vectors * dim, task * (sums.size // tasks.shape[0])
        # Keys before this one have been prefetched.
        fetched = first
        i = first
        while i < end:
            row = np.int64(keys[i] >> bits)
            last = i + 1
            while last < end and np.int64(keys[last] >> bits) == row:
                last += 1
            while fetched < min(last + AHEAD, end):
                ahead = np.int64(keys[fetched] >> bits)
                if fetched == first or np.int64(keys[fetched - 1] >> bits) != ahead:
                    simd.prefetch_write(weights, base + ahead * dim, dim)
                    simd.prefetch_write(vectors, vector_base + ahead * width, width)
                    simd.prefetch_write(last_steps, step_base + ahead, 1)
                place = np.int64(keys[fetched] & low)
                simd.prefetch_read(grads, place if direct else places[place], dim)
                fetched += 1
            entry = np.int64(keys[i] & low)
            grad, g, share = grads, entry, real(1.0)
            if not direct:
                g, share = places[entry], shares[entry]
            if last > i + 1 or share != 1.0:
                simd.put_scaled(sums, total, grads, g, (share,), dim)
                for j in range(i + 1, last):
                    entry = np.int64(keys[j] & low)
                    g, share = entry, real(1.0)
                    if not direct:
                        g, share = places[entry], shares[entry]
                    simd.add_scaled(sums, total, grads, g, (share,), dim)
                grad, g = sums, total
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
