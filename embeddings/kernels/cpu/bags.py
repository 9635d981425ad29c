"""What a bag, the ids of one feature of one sample, is to compiled code."""

from __future__ import annotations

import numpy as np

from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import FIRST, LIVE, MEAN


@compiled(inline="always")
def share_of(indices, first, last, slots, f):  # type: ignore[no-untyped-def]
    """What each id of a bag weighs: 1, or for the mean 1 over the number of ids that add something."""
    if slots[f, MEAN] == 0:
        return 1.0
    count = 0
    for i in range(first, last):
        count += 1 if np.uint64(indices[i] - slots[f, FIRST]) < np.uint64(slots[f, LIVE]) else 0
    return 1.0 / max(count, 1)


@compiled(inline="always")
def one_each(offsets, first_bag, end_bag):  # type: ignore[no-untyped-def]
    """Whether each of the bags [first_bag, end_bag) has exactly one id."""
    start = np.int64(offsets[first_bag]) - first_bag
    off = np.int64(0)
    for bag in range(first_bag + 1, end_bag + 1):
        off |= np.int64(offsets[bag]) - bag - start
    return off == 0
