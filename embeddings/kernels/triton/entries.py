"""Entries of a backward pass, to be sorted by row: row, offset of the gradient and weight of each looked-up id."""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a feature's description: number, output column, whether it is a mean, rows, padding row, first key, table.
ENTRY_WORDS = tl.constexpr(7)
# A grad_offset has the index of an element in the gradients in its low OFFSET_BITS, and the table's number above.
OFFSET_BITS = tl.constexpr(40)

VARYING = ["num_keys", "batch_size", "first_entry", "first_offset"]


@triton.jit(do_not_specialize=VARYING)
def entries(
    keys, grad_offsets, pooling_weights, descriptors, indices, offsets, scales, num_keys, batch_size, total_dim,
    first_entry, first_offset,
    TILE: tl.constexpr, POSITIONS: tl.constexpr, POOLED: tl.constexpr, SCALED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write row number, offset of the gradient and weight of each looked-up id.

    Grid: features times tiles of bags, as in the lookup. ``keys`` gets for each id the number of its row among the rows
    of all tables, or num_keys if the row is not touched. ``grad_offsets`` gets the offset of its gradient's first
    element, and its table. If SHARED, ``pooling_weights`` gets the factor of the id's gradient: the id's weight, for a
    mean divided by the bag's count.
    """
    num_tiles = tl.cdiv(batch_size, TILE)
    descriptor = descriptors + (tl.program_id(0) // num_tiles) * ENTRY_WORDS
    feature, column, is_mean = tl.load(descriptor), tl.load(descriptor + 1), tl.load(descriptor + 2)
    num_rows, padding = tl.load(descriptor + 3), tl.load(descriptor + 4)
    first_key, table = tl.load(descriptor + 5), tl.load(descriptor + 6)
    sample = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    bag, present = feature * batch_size + sample, sample < batch_size
    first = tl.load(offsets + bag, mask=present, other=0).to(tl.int64)
    length = tl.load(offsets + bag + 1, mask=present, other=0).to(tl.int64) - first
    longest = tl.max(length)
    count = tl.zeros([TILE], dtype=tl.int32)
    if is_mean != 0:
        for start in range(0, longest, POSITIONS):
            position = start + tl.arange(0, POSITIONS)[None, :]
            ids = tl.load(indices + first[:, None] + position, mask=position < length[:, None], other=-1).to(tl.int64)
            count += tl.sum(((ids >= 0) & (ids < num_rows) & (ids != padding)).to(tl.int32), axis=1)
    for start in range(0, longest, POSITIONS):
        position = start + tl.arange(0, POSITIONS)[None, :]
        at, live = first[:, None] + position, position < length[:, None]
        ids = tl.load(indices + at, mask=live, other=-1).to(tl.int64)
        touched = (ids >= 0) & (ids < num_rows) & (ids != padding)
        if SHARED:
            pooling_weight = tl.zeros_like(position + at).to(pooling_weights.dtype.element_ty) + 1.0
            if SCALED:
                pooling_weight = tl.load(scales + at, mask=live, other=0.0)
                touched = touched & (pooling_weight != 0.0)
            pooling_weight = pooling_weight / tl.maximum(count, 1).to(pooling_weight.dtype)[:, None]
            tl.store(pooling_weights + first_entry + at, pooling_weight, mask=live)
        tl.store(keys + first_entry + at, tl.where(touched, first_key + ids, num_keys), mask=live)
        grad_offset = first_offset + (sample.to(tl.int64)[:, None] if POOLED else at) * total_dim + column
        tl.store(grad_offsets + first_entry + at, grad_offset + (table << OFFSET_BITS), mask=live)
