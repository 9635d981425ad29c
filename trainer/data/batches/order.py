"""The global order of training rows, which all ranks share: a pure function of (seed, epoch, position). Torch-free.

First blocks of consecutive rows are shuffled, then the rows inside windows of many blocks, so that a step reads a
bounded part of the files. Data that fit in one window are shuffled uniformly. The rows at any position are found
without the rows before it, so resuming in the middle of an epoch costs nothing.
"""

from __future__ import annotations

import numpy as np

from trainer.data.columns.hashing import Int64s, derive_key, random_words

BLOCK_ROWS = 16_384
WINDOW_BLOCKS = 64
_BLOCKS, _WINDOW = 1, 2


class GlobalOrder:
    """Order of rows [0, ``num_rows``) for every epoch of one seed."""

    def __init__(self, num_rows: int, seed: int, block_rows: int = BLOCK_ROWS, window_blocks: int = WINDOW_BLOCKS):
        self.num_rows = num_rows
        self.seed = seed
        self.block_rows = block_rows
        self.window_blocks = window_blocks
        self._epoch = -1
        self._blocks: Int64s = np.empty(0, dtype=np.int64)
        self._window_starts: Int64s = np.zeros(1, dtype=np.int64)
        self._window: tuple[int, int, Int64s] = (-1, -1, np.empty(0, dtype=np.int64))

    def rows(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the row numbers, int64, at positions ``start`` to ``stop`` (excluded) of ``epoch`` (from 0)."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"positions [{start}, {stop}) of {self.num_rows} rows")
        self._enter(epoch)
        parts = []
        window = int(np.searchsorted(self._window_starts, start, side="right")) - 1
        while start < stop:
            first = int(self._window_starts[window])
            end = min(stop, int(self._window_starts[window + 1]))
            parts.append(self._rows_of_window(epoch, window)[start - first : end - first])
            start = end
            window += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        num_blocks = -(-self.num_rows // self.block_rows)
        words = random_words(derive_key(self.seed, epoch, _BLOCKS), np.arange(num_blocks))
        self._blocks = np.argsort(words)  # words are distinct: the result does not depend on the sorting algorithm
        lengths = np.minimum(self.num_rows - self._blocks * self.block_rows, self.block_rows)
        ends = np.cumsum(lengths)[self.window_blocks - 1 :: self.window_blocks]
        starts = np.concatenate([[0], ends]).astype(np.int64)
        if starts[-1] < self.num_rows:
            starts = np.append(starts, self.num_rows)
        self._window_starts = starts
        self._epoch = epoch

    def _rows_of_window(self, epoch: int, window: int) -> Int64s:
        if self._window[:2] != (epoch, window):
            blocks = self._blocks[window * self.window_blocks : (window + 1) * self.window_blocks]
            spans = [np.arange(b * self.block_rows, min((b + 1) * self.block_rows, self.num_rows)) for b in blocks]
            rows = np.concatenate(spans)
            self._window = (epoch, window, rows[shuffled(self.seed, epoch, window, len(rows))])
        return self._window[2]


def shuffled(seed: int, epoch: int, window: int, count: int) -> Int64s:
    """Return a permutation of 0 to ``count`` - 1, int64: the order in which a window's rows are trained on."""
    return np.argsort(random_words(derive_key(seed, epoch, _WINDOW, window), np.arange(count)))


def rank_slice(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the bounds, first and last (excluded), of the contiguous slice of ``size`` samples that ``rank`` holds.

    The slice is empty if there are fewer samples than ranks and this rank gets none.
    """
    return rank * size // world_size, (rank + 1) * size // world_size
