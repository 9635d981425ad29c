"""Lookup in Triton: gather, apply deferred updates and pool in one kernel.

A program takes TILE bags of one feature and walks their positions in step, gathering TILE rows at a time. A row is read
in accesses of 16 bytes. SSE swaps ids in a separate kernel with one thread for each id: in the lookup a whole warp
would repeat each draw's hundred or so instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.kernels.triton.deferred_update import deferred_decay, movement

# Columns of a feature's description: number, output column, whether it is a mean, rows, padding row, bases.
DESCRIPTOR_WORDS = tl.constexpr(8)


# Arguments that change from batch to batch. Triton must not specialize on them: it would compile during training.
VARYING = [
    "num_ids", "num_bags", "batch_size", "completed", "num_near", "num_pairs", "num_decay",
    "num_logs",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def lookup(
    output, weights, vectors, row_values, last_steps, descriptors, indices, offsets, scales, fault,
    near, num_near, num_pairs, lookahead, decay, num_decay, logs,
    num_logs, now,
    num_ids, num_bags, batch_size, total_dim, completed,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
    VECTORS: tl.constexpr, ROWWISE: tl.constexpr, POOLED: tl.constexpr, SCALED: tl.constexpr,
    DEFERRED: tl.constexpr, MOMENTUM: tl.constexpr, FROM_START: tl.constexpr, LOGS: tl.constexpr,
    INSIDE: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    """Look up and pool; grid: features times tiles.

    ``fault`` gets a 1 where an id or an offset is bad; such an id adds nothing.
    """
    compute = output.dtype.element_ty
    num_tiles = tl.cdiv(batch_size, TILE)
    descriptor = descriptors + (tl.program_id(0) // num_tiles) * DESCRIPTOR_WORDS
    feature, is_mean = tl.load(descriptor), tl.load(descriptor + 2)
    num_rows, padding = tl.load(descriptor + 3), tl.load(descriptor + 4)
    # Tables start at cache lines: without the hints rows would be moved in pieces of 4 bytes.
    column = tl.multiple_of(tl.load(descriptor + 1), ALIGNMENT)
    weight_base = tl.multiple_of(tl.load(descriptor + 5), 16)
    vector_base = tl.multiple_of(tl.load(descriptor + 6), 16)
    step_base = tl.load(descriptor + 7)

    sample = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    bag = feature * batch_size + sample
    present = sample < batch_size
    first = tl.load(offsets + bag, mask=present, other=0).to(tl.int64)
    last = tl.load(offsets + bag + 1, mask=present, other=0).to(tl.int64)
    sound = (first >= 0) & (first <= last) & (last <= num_ids)
    sound = sound & ((bag > 0) | (first == 0)) & ((bag + 1 < num_bags) | (last == num_ids))
    length = tl.where(present & sound, last - first, 0).to(tl.int32)
    bad = present & ~sound
    longest = tl.max(length)

    d = tl.arange(0, BLOCK)[None, :]
    pooled = tl.zeros([TILE, BLOCK], dtype=compute)
    count = tl.zeros([TILE], dtype=tl.int32)
    following = tl.load(indices + first, mask=length > 0, other=0).to(tl.int64)
    for position in range(longest):
        ids, live = following, position < length
        # Load the next ids while this position's rows are read.
        following = tl.load(indices + first + position + 1, mask=position + 1 < length, other=0).to(tl.int64)
        inside = (ids >= 0) & (ids < num_rows)
        if not IGNORE:
            bad = bad | (live & ~inside)
        keep = live & inside & (ids != padding)
        count += keep.to(tl.int32)
        factor = tl.zeros([TILE], dtype=compute) + 1.0
        if SCALED:
            factor = tl.load(scales + first + position, mask=keep, other=0.0)
            keep = keep & (factor != 0.0)
        reading = keep[:, None] & (d < DIM)
        theta = tl.load(weights + weight_base + ids[:, None] * DIM + d, mask=reading, other=0.0).to(compute)
        if DEFERRED:
            last_step = tl.load(last_steps + step_base + ids, mask=keep, other=0)
            p, idle_steps, recent = deferred_decay(
                last_step, completed, num_near, decay, num_decay, logs, num_logs, now, FROM_START, LOGS
            )
            theta = theta * p[:, None]
            if MOMENTUM:
                # Most rows were touched so long ago that momentum no longer moves them: do not read their m and v.
                hot = keep & recent
                moving = reading & hot[:, None]
                vector = vectors + vector_base + ids[:, None] * (VECTORS * DIM) + d
                m = tl.load(vector, mask=moving, other=0.0).to(compute)
                if ROWWISE:
                    v = tl.load(row_values + step_base + ids, mask=hot, other=0.0).to(compute)[:, None]
                else:
                    v = tl.load(vector + DIM, mask=moving, other=0.0).to(compute)
                theta = theta - movement(m, v, near, num_pairs, idle_steps, hot, INSIDE)
        if POOLED:
            pooled += theta * factor[:, None]
        else:
            at = (first + position)[:, None] * total_dim + d
            tl.store(output + at, theta * factor[:, None], mask=live[:, None] & (d < DIM))
    if POOLED:
        if is_mean != 0:
            pooled = pooled / tl.maximum(count, 1).to(compute)[:, None]
        at = sample.to(tl.int64)[:, None] * total_dim + column + d
        tl.store(output + at, pooled, mask=present[:, None] & (d < DIM))
    tl.store(fault + tl.zeros_like(sample), 1, mask=bad)
