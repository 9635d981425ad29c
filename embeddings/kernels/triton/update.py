"""Update in Triton: sums the gradients of each touched row and applies the row optimizer, in one pass over sorted ids.

Entries arrive sorted by row. The entries of one row are a run. Long runs are split into pieces, so that no program
works for long on one run: a piece starts at each entry i that is a multiple of SPLIT if entry i - SPLIT belongs to the
run too. So a run of up to SPLIT entries is never split, a piece has less than 2 SPLIT entries, and all but the first
and last have SPLIT.

:func:`update` has one program for TILE entries. It lists the pieces that start there, and sums ROWS of them at a time
while their rows are being loaded; this keeps all threads busy however long the pieces are. It updates rows whose
entries are in one piece, and writes the sums of other rows' pieces to ``partials``. :func:`finish` adds these sums in
order and updates their rows. The order of all sums depends only on the sorted ids, and there are no atomics, so results
are bitwise the same in every run. No count goes back to the host, so nothing waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.kernels.triton.entries import OFFSET_BITS
from embeddings.kernels.triton.rules import NORM, apply, read_rows, squared_norm

_OFFSET_MASK = tl.constexpr((1 << OFFSET_BITS.value) - 1)
# SPLIT is below 2^_LEVELS.
_LEVELS = tl.constexpr(7)
# Gradients of a run that are loaded ahead of their use.
_AHEAD = tl.constexpr(3)

# These change from batch to batch: see lookup.
VARYING = ["num_entries", "step", "num_near", "num_pairs", "num_decay", "num_logs"]


@triton.jit(do_not_specialize=VARYING)
def update(
    weights, vectors, row_values, last_steps, norms, grads, keys, order, grad_offsets, pooling_weights, partials,
    pieces, table_descriptors, settings,
    near, num_near, num_pairs, lookahead, decay, num_decay, logs, num_logs, now, num_entries, first_key, end_key, step,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    ALIGNMENT: tl.constexpr, SHARED: tl.constexpr, RULE: tl.constexpr, ROWWISE: tl.constexpr, VECTORS: tl.constexpr,
    CLIP: tl.constexpr, INSIDE: tl.constexpr, DECAY: tl.constexpr, AHEAD: tl.constexpr, DEFERRED: tl.constexpr,
    MOMENTUM: tl.constexpr, FROM_START: tl.constexpr, LOGS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Sum gradients and update rows of the tables whose keys lie in [first_key, end_key), all of one dim.

    Grid: tiles of entries. ``keys`` are sorted row numbers over all tables, ``order`` has their indices before sorting.
    ``partials`` is [2 ceil(num_entries / SPLIT), DIM]. A piece that starts with a split at entry i has index 2 i /
    SPLIT, the first piece of a split run index 2 floor(i / SPLIT) + 1: a block of SPLIT entries has at most one of
    each, as a split run is longer than SPLIT. ``pieces``, int32 [num_entries], is memory for each program to list its
    pieces in. ``norms`` is float64 [programs], for RULE NORM: the sum of squares of the rows that the program would
    have updated.
    """
    tile_start = tl.program_id(0) * TILE
    i = tl.arange(0, TILE)
    at = tile_start + i
    present = at < num_entries
    key = tl.load(keys + at, mask=present, other=-1).to(tl.int64)
    mine = present & (key >= first_key) & (key < end_key)
    d = tl.arange(0, BLOCK)[None, :]
    if tl.max(mine.to(tl.int32)) > 0:
        far_back = tl.load(keys + tile_start - SPLIT, mask=tile_start >= SPLIT, other=-1)
        far_on = tl.load(keys + tile_start + TILE - 1, mask=tile_start + TILE <= num_entries, other=-2)
        if far_back == far_on:
            # The whole tile lies within one run, so all gradients of a piece are loaded at once.
            for block in range(TILE // SPLIT):
                inner = tile_start + block * SPLIT + tl.arange(0, SPLIT)
                each = _gradient(
                    grads, order, grad_offsets, pooling_weights, inner, inner >= 0, d, DIM, ALIGNMENT, SHARED
                )
                place = 2 * (tile_start // SPLIT + block).to(tl.int64)
                tl.store(partials + place * DIM + d, tl.sum(each, axis=0)[None, :], mask=d < DIM)
        else:
            before = tl.load(keys + at - 1, mask=mine & (at > 0), other=-1).to(tl.int64)
            back = tl.load(keys + at - SPLIT, mask=mine & (at >= SPLIT), other=-1).to(tl.int64)
            following = tl.load(keys + at + 1, mask=mine & (at + 1 < num_entries), other=-1).to(tl.int64)
            split = mine & (at % SPLIT == 0) & (back == key)
            head = split | (mine & (before != key))
            length = head.to(tl.int32)
            if tl.max((head & (following == key)).to(tl.int32)) > 0:
                # The latest end of the piece; keys are sorted, so bisection finds the last equal one.
                stop = tl.minimum((at + 2 * SPLIT - 1) // SPLIT * SPLIT, num_entries)
                for level in tl.static_range(_LEVELS):
                    if (SPLIT >> level) > 0:
                        further = length + (SPLIT >> level)
                        inside = head & (at + further <= stop)
                        other = tl.load(keys + at + further - 1, mask=inside, other=-1).to(tl.int64)
                        length = tl.where(inside & (other == key), further, length)
                following = tl.load(keys + at + length, mask=head & (at + length < num_entries), other=-1).to(tl.int64)
            whole = head & ~split & (following != key)
            count = tl.sum(head.to(tl.int32))
            word = i | (length << 16) | (split.to(tl.int32) << 24) | (whole.to(tl.int32) << 25)
            tl.store(pieces + tile_start + tl.cumsum(head.to(tl.int32), 0) - 1, word, mask=head)
            # Wait for the program's other threads: what they wrote is read below.
            tl.debug_barrier()
            norm = tl.zeros([], dtype=tl.float64)
            for start in range(0, count, ROWS):
                listed = start + tl.arange(0, ROWS)
                live = listed < count
                piece = tl.load(pieces + tile_start + listed, mask=live, other=0)
                first_at, size = tile_start + (piece & 0xFFFF), (piece >> 16) & 0xFF
                is_split, is_whole = (piece >> 24) & 1, (piece >> 25) > 0
                entry = tl.load(order + first_at, mask=live, other=0)
                place = tl.load(grad_offsets + entry, mask=live, other=0)
                if RULE != NORM:
                    row_key = tl.load(keys + first_at, mask=is_whole, other=0).to(tl.int64)
                    theta, first, second, value, last, theta_at, vector_at, value_at, last_at, row, words = read_rows(
                        weights, vectors, row_values, last_steps, table_descriptors, place >> OFFSET_BITS, row_key,
                        is_whole, d, DIM, ROWWISE, VECTORS,
                    )  # fmt: skip
                total = _gradient_at(grads, pooling_weights, place, entry, live, d, DIM, ALIGNMENT, SHARED)
                for behind in range(1, tl.max(size), _AHEAD):
                    for j in tl.static_range(_AHEAD):
                        total += _gradient(
                            grads, order, grad_offsets, pooling_weights, first_at + behind + j, behind + j < size, d,
                            DIM, ALIGNMENT, SHARED,
                        )  # fmt: skip
                part = (2 * (first_at // SPLIT) + 1 - is_split).to(tl.int64)
                tl.store(partials + part[:, None] * DIM + d, total, mask=(live & ~is_whole)[:, None] & (d < DIM))
                if RULE == NORM:
                    norm += squared_norm(total, is_whole, d, DIM)
                else:
                    apply(
                        weights, vectors, row_values, settings, near, num_near, num_pairs, lookahead, decay, num_decay,
                        logs, num_logs, now, step, theta, first, second, value, last, theta_at, vector_at, value_at,
                        last_at, row, words, total, is_whole, d, DIM, BLOCK, ROWS, RULE, ROWWISE, VECTORS, CLIP, INSIDE,
                        DECAY, AHEAD, DEFERRED, MOMENTUM, FROM_START, LOGS, QUADS,
                    )  # fmt: skip
            if RULE == NORM:
                tl.store(norms + tl.program_id(0), norm)


@triton.jit(do_not_specialize=VARYING)
def finish(
    weights, vectors, row_values, last_steps, norms, keys, order, grad_offsets, partials, table_descriptors, settings,
    near, num_near, num_pairs, lookahead, decay, num_decay, logs, num_logs, now, num_entries, first_key, end_key, step,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, DEPTH: tl.constexpr,
    RULE: tl.constexpr, ROWWISE: tl.constexpr, VECTORS: tl.constexpr, CLIP: tl.constexpr, INSIDE: tl.constexpr,
    DECAY: tl.constexpr, AHEAD: tl.constexpr, DEFERRED: tl.constexpr, MOMENTUM: tl.constexpr, FROM_START: tl.constexpr,
    LOGS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Update the rows whose run was split; grid: windows of WINDOW blocks of SPLIT entries.

    The program whose window has a run's first split updates the row. The sums of the pieces are added DEPTH at a time.
    """
    compute = partials.dtype.element_ty
    d = tl.arange(0, BLOCK)[None, :]
    block = tl.program_id(0) * WINDOW + tl.arange(0, WINDOW)
    at = block * SPLIT
    key = tl.load(keys + at, mask=at < num_entries, other=-1).to(tl.int64)
    mine = (at < num_entries) & (key >= first_key) & (key < end_key)
    one_back = tl.load(keys + at - SPLIT, mask=mine & (at >= SPLIT), other=-1).to(tl.int64)
    two_back = tl.load(keys + at - 2 * SPLIT, mask=mine & (at >= 2 * SPLIT), other=-1).to(tl.int64)
    first = mine & (one_back == key) & (two_back != key)
    norm = tl.zeros([], dtype=tl.float64)
    while tl.max(first.to(tl.int32)) > 0:
        b = tl.min(tl.where(first, block, 0x7FFFFFFF))
        first = first & (block != b)
        wanted = tl.load(keys + b * SPLIT).to(tl.int64)
        one = tl.zeros([1], dtype=tl.int32)
        if RULE != NORM:
            table = tl.load(grad_offsets + tl.load(order + one + b * SPLIT)) >> OFFSET_BITS
            theta, first_vector, second, value, last, theta_at, vector_at, value_at, last_at, row, words = read_rows(
                weights, vectors, row_values, last_steps, table_descriptors, table, one.to(tl.int64) + wanted, one == 0,
                d, DIM, ROWWISE, VECTORS,
            )  # fmt: skip
        # The run starts one block back at its first entry, or in the block before that.
        before = tl.load(keys + (b - 1) * SPLIT - 1, mask=b > 1, other=-1).to(tl.int64)
        place = tl.where(before == wanted, 2 * (b - 2) + 1, 2 * (b - 1) + 1).to(tl.int64)
        total = tl.load(partials + place * DIM + d, mask=d < DIM, other=0.0)
        sums = tl.zeros([DEPTH, BLOCK], dtype=compute)
        piece = b + tl.arange(0, DEPTH)
        going = 1
        while going > 0:
            there = piece * SPLIT < num_entries
            member = there & (tl.load(keys + piece * SPLIT, mask=there, other=-1).to(tl.int64) == wanted)
            part = partials + 2 * piece.to(tl.int64)[:, None] * DIM + d
            sums += tl.load(part, mask=member[:, None] & (d < DIM), other=0.0)
            going = tl.min(member.to(tl.int32))
            piece += DEPTH
        total += tl.sum(sums, axis=0)[None, :]
        if RULE == NORM:
            norm += squared_norm(total, one == 0, d, DIM)
        else:
            apply(
                weights, vectors, row_values, settings, near, num_near, num_pairs, lookahead, decay, num_decay, logs,
                num_logs, now, step, theta, first_vector, second, value, last, theta_at, vector_at, value_at, last_at,
                row, words, total, one == 0, d, DIM, BLOCK, 1, RULE, ROWWISE, VECTORS, CLIP, INSIDE, DECAY, AHEAD,
                DEFERRED, MOMENTUM, FROM_START, LOGS, QUADS,
            )  # fmt: skip
    if RULE == NORM:
        tl.store(norms + tl.program_id(0), norm)


@triton.jit
def _gradient(
    grads, order, grad_offsets, pooling_weights, at, mask, d,
    DIM: tl.constexpr, ALIGNMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Return the loss's gradients with respect to the rows of the sorted entries ``at``, [len(at), BLOCK]."""
    entry = tl.load(order + at, mask=mask, other=0)
    place = tl.load(grad_offsets + entry, mask=mask, other=0)
    return _gradient_at(grads, pooling_weights, place, entry, mask, d, DIM, ALIGNMENT, SHARED)


@triton.jit
def _gradient_at(
    grads, pooling_weights, place, entry, mask, d, DIM: tl.constexpr, ALIGNMENT: tl.constexpr, SHARED: tl.constexpr
):
    """Return the gradients of entries with ``place`` in grad_offsets with respect to their rows."""
    # Output columns are multiples of ALIGNMENT: without the hint rows would be read in pieces of 4 bytes.
    grad_offset = tl.multiple_of(place & _OFFSET_MASK, ALIGNMENT)
    grad = tl.load(grads + grad_offset[:, None] + d, mask=mask[:, None] & (d < DIM), other=0.0)
    if SHARED:
        grad = grad * tl.load(pooling_weights + entry, mask=mask, other=0.0)[:, None]
    return grad
