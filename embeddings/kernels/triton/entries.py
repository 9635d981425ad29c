"""What a backward recorded, to be sorted by row: for each looked-up id its row, its gradient's place, its weight."""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a feature's description: number, output column, whether it is a mean, rows, padding row, first key, table.
ENTRY_WORDS = tl.constexpr(7)
# A place is the number of an element in the gradients, with the table's number above these bits.
PLACE_BITS = tl.constexpr(40)

VARYING = ["num_keys", "batch_size", "first_entry", "first_place"]


@triton.jit(do_not_specialize=VARYING)
def entries(
    keys, places, shares, slots, indices, offsets, scales, num_keys, batch_size, total_dim, first_entry, first_place,
    TILE: tl.constexpr, POSITIONS: tl.constexpr, POOLED: tl.constexpr, SCALED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write row number, gradient place and weight of each looked-up id.

    Grid: features times tiles of bags, as in the lookup. ``keys`` gets for each id the number of its row among the rows
    of all tables, or num_keys where it is not touched. ``places`` gets where its gradient starts, and its table.
    ``shares`` gets what its gradient is multiplied with, written if SHARED: its weight, over the bag's count for a
    mean.
    """
    num_tiles = tl.cdiv(batch_size, TILE)
    slot = slots + (tl.program_id(0) // num_tiles) * ENTRY_WORDS
    feature, column, is_mean = tl.load(slot), tl.load(slot + 1), tl.load(slot + 2)
    num_rows, padding = tl.load(slot + 3), tl.load(slot + 4)
    first_key, table = tl.load(slot + 5), tl.load(slot + 6)
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
            share = tl.zeros_like(position + at).to(shares.dtype.element_ty) + 1.0
            if SCALED:
                share = tl.load(scales + at, mask=live, other=0.0)
                touched = touched & (share != 0.0)
            share = share / tl.maximum(count, 1).to(share.dtype)[:, None]
            tl.store(shares + first_entry + at, share, mask=live)
        tl.store(keys + first_entry + at, tl.where(touched, first_key + ids, num_keys), mask=live)
        place = first_place + (sample.to(tl.int64)[:, None] if POOLED else at) * total_dim + column
        tl.store(places + first_entry + at, place + (table << PLACE_BITS), mask=live)
