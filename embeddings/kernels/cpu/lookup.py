"""The compiled lookup: check, swap, read with decay and pool, block of samples by block of samples."""

from __future__ import annotations

import numpy as np
from numba import prange

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import COLUMN, DIM, MEAN, PADDING, ROWS, STEP_BASE, VECTOR_BASE, WEIGHT_BASE
from embeddings.kernels.cpu.idle import idle_coefficients
from embeddings.kernels.cpu.swap import swap_block
from embeddings.kernels.cpu.threads import AHEAD, BLOCK


@compiled(inline="always")
def share_of(indices, first, last, slot):  # type: ignore[no-untyped-def]
    """What each id of a bag weighs: 1, or for the mean 1 over the number of ids that are not padding."""
    if slot[MEAN] == 0:
        return 1.0
    count = 0
    for i in range(first, last):
        count += 1 if indices[i] != slot[PADDING] else 0
    return 1.0 / max(count, 1)


@compiled()
def fault_of(slot, indices, offsets, first_bag, end_bag):  # type: ignore[no-untyped-def]
    """(0, 0) if the bags can be looked up, (1, id) for an id that is no row, (2, 0) for offsets that decrease."""
    first, last = offsets[first_bag], offsets[end_bag]
    ordered = (first >= 0) & (last <= indices.size)
    for bag in range(first_bag, end_bag):
        ordered &= offsets[bag] <= offsets[bag + 1]
    if not ordered:
        return 2, 0
    inside = True
    for i in range(first, last):
        inside &= (indices[i] >= 0) & (indices[i] < slot[ROWS])
    if not inside:
        for i in range(first, last):
            if indices[i] < 0 or indices[i] >= slot[ROWS]:
                return 1, indices[i]
    return 0, 0


@compiled(parallel=True)
def lookup(  # type: ignore[no-untyped-def]
    output, weights, vectors, last_steps, slots, indices, used, offsets, scales, draws, graph_offsets, neighbours,
    thresholds, batch_size, sample_offset, step_word, completed, has_idle, decay, momentum, near_c, near_e, far_c,
    far_e, late_decay, faults,
):  # fmt: skip
    real = output.dtype.type
    num_blocks = (batch_size + BLOCK - 1) // BLOCK
    total_dim = output.size // max(batch_size, 1)
    for task in prange(slots.shape[0] * num_blocks):
        f, block = task // num_blocks, task % num_blocks
        slot = slots[f]
        dim, base, vector_base, padding = slot[DIM], slot[WEIGHT_BASE], slot[VECTOR_BASE], slot[PADDING]
        step_base = slot[STEP_BASE]
        start, end = block * BLOCK, min(block * BLOCK + BLOCK, batch_size)
        fault, value = fault_of(slot, indices, offsets, f * batch_size + start, f * batch_size + end)
        if fault != 0:
            faults[f, 0], faults[f, 1] = fault, value
            continue
        first_id, end_id = offsets[f * batch_size + start], offsets[f * batch_size + end]
        if draws.size and draws[f, 0] > 0:
            swap_block(
                indices, used, offsets, f * batch_size, start, end, sample_offset, step_word, draws[f], graph_offsets,
                neighbours, thresholds,
            )  # fmt: skip
        elif draws.size:
            used[first_id:end_id] = indices[first_id:end_id]
        for i in range(first_id, min(first_id + AHEAD, end_id)):
            simd.prefetch_read(weights, base + used[i] * dim, dim)
        for b in range(start, end):
            out = b * total_dim + slot[COLUMN]
            first, last = offsets[f * batch_size + b], offsets[f * batch_size + b + 1]
            share = share_of(used, first, last, slot)
            empty = True
            for i in range(first, last):
                if i + AHEAD < end_id:
                    ahead = used[i + AHEAD]
                    simd.prefetch_read(weights, base + ahead * dim, dim)
                    if has_idle:
                        simd.prefetch_read(last_steps, step_base + ahead, 1)
                    if momentum:
                        simd.prefetch_read(vectors, vector_base + ahead * 2 * dim, 2 * dim)
                row = used[i]
                scale = real(share)
                if scales.size:
                    scale *= scales[i]
                if row == padding or scale == 0.0:
                    continue
                factor, moved, floor = scale, real(0.0), real(1.0)
                if has_idle:
                    p, c, floor = idle_coefficients(
                        np.int64(last_steps[step_base + row]), completed,
                        decay, momentum, near_c, near_e, far_c, far_e, late_decay,
                    )  # fmt: skip
                    factor, moved = scale * p, scale * c
                at = base + row * dim
                if moved == 0.0:
                    if empty:
                        simd.put_scaled(output, out, weights, at, (factor,), dim)
                    else:
                        simd.add_scaled(output, out, weights, at, (factor,), dim)
                else:
                    vector = vector_base + row * 2 * dim
                    if empty:
                        simd.put_moved(output, out, weights, at, vectors, vector, (factor, moved, floor), dim)
                    else:
                        simd.add_moved(output, out, weights, at, vectors, vector, (factor, moved, floor), dim)
                empty = False
            if empty:
                for d in range(out, out + dim):
                    output[d] = 0.0
