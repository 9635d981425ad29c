"""Index of sorted int64 ids by buckets: the row of an id without a binary search. Torch-free.

A binary search of a thousand ids in a million costs some twenty dependent memory reads for each, most of them cache
misses. Here the range of the ids is cut into buckets, whose equal width is a power of two with one to two ids on
average. A shift gives the bucket, a table its first row, and a few steps pass the smaller ids. Every step is one pass
over all queries, so that their reads overlap.

One width does not fit all ids if some are far from the others, or if an id combines a shard and a number. So ids are
first cut into NUM_SPANS spans of equally many ids, each with its own width. Ids of buckets that are still crowded are
found by binary search. The table takes 2 to 4 bytes per id. docs/adr/0020-fetch.md has the measurements.
"""

from __future__ import annotations

import numpy as np

from embeddings.vectors.item_vectors import find_rows
from embeddings.vectors.lazy_rows import Array

NUM_SPANS = 64
STEPS = 5
"""Most ids of a bucket to step over before a binary search."""
MAX_CROWDED = 0.02
"""Largest share of a span's ids with more than STEPS ids before them in their bucket."""


class IdIndex:
    """Index of ``keys`` int64 [n], sorted and without duplicates; n is at least 1.

    Building it takes 10 ms for a million.
    """

    def __init__(self, keys: Array):
        self._keys = keys
        if self._build(1) > MAX_CROWDED:
            self._build(NUM_SPANS)

    def _build(self, num_spans: int) -> float:
        """Build the table, and return the share of ids that need a binary search."""
        keys, num_keys, crowded = self._keys, len(self._keys), 0
        size = -(-num_keys // num_spans)
        edges = np.append(np.arange(0, num_keys, size), num_keys)
        self._lows = np.ascontiguousarray(keys[edges[:-1]])
        # As unsigned numbers differences never overflow.
        widths = (keys[edges[1:] - 1] - self._lows).view(np.uint64)
        self._shifts = np.array([_shift(int(width), size) for width in widths], dtype=np.uint64)
        num_buckets = (widths >> self._shifts).astype(np.int64) + 1
        self._firsts = np.cumsum(num_buckets) - num_buckets
        dtype = np.uint32 if num_keys <= np.iinfo(np.uint32).max else np.int64
        self._starts = np.empty(int(num_buckets.sum()), dtype=dtype)
        for span, first in enumerate(self._firsts):
            part = keys[edges[span] : edges[span + 1]]
            buckets = ((part - self._lows[span]).view(np.uint64) >> self._shifts[span]).view(np.int64)
            counts = np.bincount(buckets, minlength=num_buckets[span])
            starts = edges[span] + np.cumsum(counts) - counts
            self._starts[first : first + num_buckets[span]] = starts
            crowded += int(np.maximum(counts - STEPS - 1, 0).sum())
        return crowded / num_keys

    def rows(self, queries: Array) -> Array:
        """Return the row of each query, int64 [len(queries)]; -1 for an id that is not in the index."""
        # A query outside every span is mapped to some bucket, which has no equal id.
        if len(self._lows) == 1:
            offsets = (queries - self._lows[0]).view(np.uint64)
            offsets >>= self._shifts[0]
            offsets = offsets.view(np.int64)
        else:
            spans = np.searchsorted(self._lows, queries, side="right")
            spans -= 1
            buckets = (queries - self._lows.take(spans, mode="clip")).view(np.uint64)
            buckets >>= self._shifts.take(spans, mode="clip")
            offsets = buckets.view(np.int64)
            offsets += self._firsts.take(spans, mode="clip")
        rows = self._starts.take(offsets, mode="clip").astype(np.int64)
        for _ in range(STEPS):
            rows += self._keys.take(rows, mode="clip") < queries
        nearest_keys = self._keys.take(rows, mode="clip")
        is_missing = nearest_keys != queries
        smaller = (nearest_keys < queries).nonzero()[0]
        rows[is_missing] = -1
        if len(smaller):
            rows[smaller] = find_rows(self._keys, queries.take(smaller))
        return rows


def _shift(width: int, num_keys: int) -> int:
    """Return the shift that divides 0 .. ``width`` into at most ``num_keys`` buckets, and at least half of that.

    If ``width`` is smaller than ``num_keys``, each of 0 .. ``width`` has its own bucket.
    """
    return (width // num_keys).bit_length()
