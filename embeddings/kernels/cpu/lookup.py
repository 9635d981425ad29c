"""The compiled lookup: check, swap, read with decay and pool, block of samples by block of samples."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import prange

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.bags import one_each, share_of
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import (
    COLUMN,
    DIM,
    FIRST,
    LIVE,
    ROWS,
    STEP_BASE,
    VECTOR_BASE,
    WEIGHT_BASE,
)
from embeddings.kernels.cpu.idle import idle_coefficients, share_of_m
from embeddings.kernels.cpu.swap import swap_block
from embeddings.kernels.cpu.threads import AHEAD

FAULT_ID, FAULT_OFFSETS = 1, 2


@compiled()
def fault_of(num_rows, ignore, indices, offsets, first_bag, end_bag):  # type: ignore[no-untyped-def]
    """(0, 0) if the bags can be looked up, or the fault and the id that is no row."""
    first, last = np.int64(offsets[first_bag]), np.int64(offsets[end_bag])
    lowest = min(first, indices.size - last)
    for bag in range(first_bag, end_bag):
        lowest = min(lowest, np.int64(offsets[bag + 1]) - np.int64(offsets[bag]))
    if lowest < 0:
        return FAULT_OFFSETS, 0
    if ignore:
        return 0, 0
    highest = np.uint64(0)
    for i in range(first, last):
        highest = max(highest, np.uint64(np.int64(indices[i])))
    if highest >= np.uint64(num_rows):
        for i in range(first, last):
            if indices[i] < 0 or indices[i] >= num_rows:
                return FAULT_ID, np.int64(indices[i])
    return 0, 0


@cache
def lookup(has_idle: bool, momentum: bool, rowwise: bool, one_dim: int) -> Any:
    """The lookup where idleness owes rows something (``has_idle``), momentum too, with one v for each row (``rowwise``)
    or for each element; ``one_dim``: see ``special_dim``. Without momentum nothing reads v: ``rowwise`` is False there.

    Looks up every feature; block_size samples of one feature are a task.

    output: [B * total_dim], without pooling [n * dim]. used: the ids after swaps; the array ``indices`` itself where
    ``draws`` is empty. faults: int64 [F, 2], zeroed: (FAULT_ID, id) or (FAULT_OFFSETS, 0) of each feature that has one.
    """

    moments = 1 if rowwise else 2

    # The loops stand apart, not one with branches: a lookup of short rows has ten nanoseconds for each id.
    @compiled(parallel=True)
    def look_up(  # type: ignore[no-untyped-def]
        output, weights, vectors, row_values, last_steps, slots, pooled, ignore, block_size, indices, used, offsets,
        scales, draws, graph_offsets, neighbours, thresholds, batch_size, sample_offset, step_word, completed, decay,
        near, log_sums, log_now, log_slope, from_start, inside, faults,
    ):  # fmt: skip
        real = output.dtype.type
        within, beside = real(inside), real(1 - inside)
        num_blocks = (batch_size + block_size - 1) // block_size
        total_dim = output.size // max(batch_size if pooled else indices.size, 1)
        for task in prange(slots.shape[0] * num_blocks):
            f, block = task // num_blocks, task % num_blocks
            dim, base, vector_base, step_base = (
                one_dim or slots[f, DIM],
                slots[f, WEIGHT_BASE],
                slots[f, VECTOR_BASE],
                slots[f, STEP_BASE],
            )
            first_row, live = slots[f, FIRST], np.uint64(slots[f, LIVE])
            start, end = block * block_size, min(block * block_size + block_size, batch_size)
            first_bag, end_bag = f * batch_size + start, f * batch_size + end
            fault, value = fault_of(slots[f, ROWS], ignore, indices, offsets, first_bag, end_bag)
            if fault != 0:
                faults[f, 0], faults[f, 1] = fault, value
                continue
            first_id, end_id = np.int64(offsets[first_bag]), np.int64(offsets[end_bag])
            single = one_each(offsets, first_bag, end_bag)
            if draws.size and draws[f, 0] > 0:
                swap_block(
                    indices, used, offsets, single, f * batch_size, start, end, sample_offset, step_word, draws[f],
                    graph_offsets, neighbours, thresholds,
                )  # fmt: skip
            elif draws.size:
                for i in range(first_id, end_id):
                    used[i] = indices[i]
            for i in range(first_id, min(first_id + AHEAD, end_id)):
                row = np.int64(used[i])
                simd.prefetch_read(weights, base + row * dim, dim)
            if has_idle:
                for i in range(first_id, min(first_id + 2 * AHEAD, end_id)):
                    simd.prefetch_read(last_steps, step_base + np.int64(used[i]), 1)
            out = start * total_dim + slots[f, COLUMN] if pooled else first_id * total_dim
            if not pooled or single:
                for i in range(first_id, end_id):
                    if i + AHEAD < end_id:
                        ahead = np.int64(used[i + AHEAD])
                        simd.prefetch_read(weights, base + ahead * dim, dim)
                        if has_idle:
                            # Only a row touched lately reads its moments: its last step, fetched before, tells.
                            if (
                                momentum
                                and np.uint64(ahead - first_row) < live
                                and completed - last_steps[step_base + ahead] < near.shape[0]
                            ):
                                simd.prefetch_read(vectors, vector_base + ahead * moments * dim, moments * dim)
                                if rowwise:
                                    simd.prefetch_read(row_values, step_base + ahead, 1)
                            if i + 2 * AHEAD < end_id:
                                simd.prefetch_read(last_steps, step_base + np.int64(used[i + 2 * AHEAD]), 1)
                    row = np.int64(used[i])
                    factor = scales[i] if scales.size else real(1.0)
                    if np.uint64(row - first_row) >= live or factor == 0.0:
                        simd.clear(output, out, dim)
                    elif has_idle:
                        p, moved, floor, taken, taken_floor = idle_coefficients(
                            np.int64(last_steps[step_base + row]), completed,
                            decay, near, log_sums, log_now, log_slope, from_start,
                        )  # fmt: skip
                        if not momentum or (moved == 0.0 and taken == 0.0):
                            simd.put_scaled(output, out, weights, base + row * dim, (factor * p,), dim)
                        elif rowwise:
                            lost = share_of_m(
                                simd.load_one(row_values, step_base + row, p),
                                factor * moved, within * floor, beside * floor,
                                factor * taken, within * taken_floor, beside * taken_floor,
                            )  # fmt: skip
                            simd.put_shifted(
                                output, out, weights, base + row * dim, vectors, vector_base + row * dim,
                                (factor * p, lost), dim,
                            )  # fmt: skip
                        else:
                            simd.put_moved(
                                output, out, weights, base + row * dim, vectors, vector_base + row * 2 * dim,
                                (
                                    factor * p, factor * moved, within * floor, beside * floor,
                                    factor * taken, within * taken_floor, beside * taken_floor,
                                ), dim,
                            )  # fmt: skip
                    else:
                        simd.put_scaled(output, out, weights, base + row * dim, (factor,), dim)
                    out += total_dim
                continue
            for b in range(first_bag, end_bag):
                first, last = np.int64(offsets[b]), np.int64(offsets[b + 1])
                share = share_of(used, first, last, slots, f)
                empty = True
                for i in range(first, last):
                    if i + AHEAD < end_id:
                        ahead = np.int64(used[i + AHEAD])
                        simd.prefetch_read(weights, base + ahead * dim, dim)
                        if has_idle:
                            # Only a row touched lately reads its moments: its last step, fetched before, tells.
                            if (
                                momentum
                                and np.uint64(ahead - first_row) < live
                                and completed - last_steps[step_base + ahead] < near.shape[0]
                            ):
                                simd.prefetch_read(vectors, vector_base + ahead * moments * dim, moments * dim)
                                if rowwise:
                                    simd.prefetch_read(row_values, step_base + ahead, 1)
                            if i + 2 * AHEAD < end_id:
                                simd.prefetch_read(last_steps, step_base + np.int64(used[i + 2 * AHEAD]), 1)
                    row = np.int64(used[i])
                    factor = real(share)
                    if scales.size:
                        factor *= scales[i]
                    if np.uint64(row - first_row) >= live or factor == 0.0:
                        continue
                    moved, floor, taken, taken_floor = real(0.0), real(1.0), real(0.0), real(1.0)
                    if has_idle:
                        p, moved, floor, taken, taken_floor = idle_coefficients(
                            np.int64(last_steps[step_base + row]), completed,
                            decay, near, log_sums, log_now, log_slope, from_start,
                        )  # fmt: skip
                        factor, moved, taken = factor * p, factor * moved, factor * taken
                    at = base + row * dim
                    if not momentum or (moved == 0.0 and taken == 0.0):
                        if empty:
                            simd.put_scaled(output, out, weights, at, (factor,), dim)
                        else:
                            simd.add_scaled(output, out, weights, at, (factor,), dim)
                    elif rowwise:
                        lost = share_of_m(
                            simd.load_one(row_values, step_base + row, factor), moved, within * floor, beside * floor,
                            taken, within * taken_floor, beside * taken_floor,
                        )  # fmt: skip
                        vector = vector_base + row * dim
                        if empty:
                            simd.put_shifted(output, out, weights, at, vectors, vector, (factor, lost), dim)
                        else:
                            simd.add_shifted(output, out, weights, at, vectors, vector, (factor, lost), dim)
                    else:
                        vector = vector_base + row * 2 * dim
                        scalars = (
                            factor, moved, floor * within, floor * beside,
                            taken, taken_floor * within, taken_floor * beside,
                        )  # fmt: skip
                        if empty:
                            simd.put_moved(output, out, weights, at, vectors, vector, scalars, dim)
                        else:
                            simd.add_moved(output, out, weights, at, vectors, vector, scalars, dim)
                    empty = False
                if empty:
                    simd.clear(output, out, dim)
                out += total_dim

    return look_up
