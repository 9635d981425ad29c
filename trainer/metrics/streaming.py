"""Scores of a split that is too large for one rank, counted across ranks piece by piece: exact, in bounded memory.

A float32 score becomes a 32-bit key of the same order, and a row becomes its key and label in 33 bits; each rank sorts
its own rows. A histogram over the upper 16 bits of the keys, summed over ranks, cuts the range of scores into pieces of
at most PIECE_ROWS rows. For one piece after another, rank 0 gets all ranks' rows, with equal rows counted, and merges
them. A piece with a single value of the upper bits may have more rows, for example if all scores are alike, but at most
2^17 different scores from each rank. So AUC, logloss and the calibration curve equal those of all rows in one array, to
the last bit or up to rounding.

Memory of a rank: 8 bytes for each of its rows, and 1 MB for the histogram. Rank 0 also
holds one piece: 16 bytes for each of PIECE_ROWS rows, or of 2^17 rows of every rank if these are more, and about four
times as much to merge it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from embeddings.sharding.exchange.collectives import all_gather, all_reduce, all_to_all
from trainer.metrics.counts import Counts, Int64s
from trainer.metrics.pointwise import Rows

PIECE_ROWS = 1 << 20
_UPPER = 1 << 16
_UPPER_SHIFT = 17  # the lower half of the key, and the label


class RankGroup:
    """Collective operations of the ranks that share a split; ``group``: None if there is only one rank."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over all ranks of each of ``numbers``, in float64."""
        if self._group is None:
            return list(numbers)
        return all_reduce("sums over a split", torch.tensor(numbers, dtype=torch.float64), self._group).tolist()

    def pieces(self, rows: Rows) -> Iterator[Counts]:
        """Yield :func:`pieces` of all ranks' rows, ``rows`` being this rank's."""
        return pieces(packed_rows(rows.scores, rows.labels), self._group)

    def rows_by_user(self, rows: Rows) -> Rows:
        """Return the rows, from all ranks, of the users that this rank owns; rows without a user may be missing."""
        if self._group is None:
            return rows
        known = rows.known_users >= 0
        users = rows.known_users[known].astype(np.int64)
        columns = np.stack(
            [rows.scores[known].view(np.int32), rows.labels[known].view(np.int32), users], dtype=np.int64
        )
        received = at_owners("rows of users", columns, users, self._group)
        scores, labels = (received[row].astype(np.int32).view(np.float32) for row in (0, 1))
        return Rows(scores, labels, received[2].astype(np.int32), is_logit=rows.is_logit, is_log=rows.is_log)


def packed_rows(scores: npt.NDArray[np.float32], labels: npt.NDArray[np.floating]) -> Int64s:
    """Return [n] rows packed into integers, 2 * (key of the score) + label, sorted ascending: int64 [n].

    ``scores``: float32, none NaN. ``labels``: 0 or 1.
    """
    keys = np.asarray(scores, np.float32) + np.float32(0.0)  # one zero: -0 has other bits
    bits = keys.view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)
    packed = (ordered << 1) | (np.asarray(labels) > 0.5)
    packed.sort()
    return packed


def unpacked(keys: Int64s) -> npt.NDArray[np.float64]:
    """Return the scores of ``keys``: elements of :func:`packed_rows`, shifted right by one bit to remove the label."""
    ordered = keys.astype(np.uint32)
    bits = np.where(ordered >> 31, ordered ^ np.uint32(1 << 31), ~ordered)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def pieces(packed: Int64s, group: dist.ProcessGroup | None, piece_rows: int = PIECE_ROWS) -> Iterator[Counts]:
    """Yield on rank 0 counts of all ranks' rows, in pieces of ascending score; on others, empty counts. Collective.

    ``packed``: this rank's rows (:func:`packed_rows`). ``group``: None if there is only one rank.
    """
    edges = np.searchsorted(packed, np.arange(_UPPER + 1, dtype=np.int64) << _UPPER_SHIFT)
    everyone = np.diff(edges)
    if group is not None:
        everyone = all_reduce("scores of a split", torch.from_numpy(everyone), group).numpy()
    for first, last in _cuts(everyone, piece_rows):
        local = np.stack(_run_lengths(packed[edges[first] : edges[last]]))
        parts = [local] if group is None else _on_rank_0("rows of a piece", local, group)
        yield _merged(parts)


def _cuts(rows: Int64s, piece_rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of ranges [first, last) of bins that together have at most ``piece_rows`` rows.

    A bin with more rows is in a range without other bins that have rows. ``rows``: number of rows of each bin.
    """
    start, total = 0, 0
    for bin_ in np.flatnonzero(rows).tolist():
        if total and total + int(rows[bin_]) > piece_rows:
            yield start, bin_
            start, total = bin_, 0
        total += int(rows[bin_])
    if total:
        yield start, len(rows)


def _run_lengths(ascending: Int64s) -> tuple[Int64s, Int64s]:
    starts = np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]]) if len(ascending) else np.empty(0, np.int64)
    return ascending[starts], np.diff(np.append(starts, len(ascending)))


def _merged(parts: Sequence[Int64s]) -> Counts:
    """Merge the parts of all ranks into counts; a part [2, m] has packed rows and how often each occurs."""
    rows, times = np.concatenate(parts, axis=1)
    keys, which = np.unique(rows >> 1, return_inverse=True)
    totals = np.bincount(which, times, len(keys)).astype(np.int64)
    positives = np.bincount(which, times * (rows & 1), len(keys)).astype(np.int64)
    return Counts(unpacked(keys), totals, positives)


def _on_rank_0(what: str, local: Int64s, group: dist.ProcessGroup) -> list[Int64s]:
    """Gather ``local`` [2, m] of all ranks on rank 0; m may differ. Other ranks get empty arrays. Collective."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sizes = all_gather(f"number of {what}", torch.tensor([local.shape[1]]), [(1,)] * world_size, group)
    nothing = torch.empty(2, 0, dtype=torch.int64)
    parts = [torch.from_numpy(local) if other == 0 else nothing for other in range(world_size)]
    shapes = [(2, int(size)) if rank == 0 else (2, 0) for size in torch.cat(sizes).tolist()]
    # Copied, because the next collective overwrites these buffers.
    return [np.array(part.numpy()) for part in all_to_all(what, parts, shapes, group)]


def at_owners(what: str, columns: Int64s, keys: Int64s, group: dist.ProcessGroup) -> Int64s:
    """Exchange ``columns`` [c, n] so that each is on the rank ``key % world_size`` of its key. Collective.

    ``keys``: int64 [n], at least 0. Returns the columns, from all ranks, whose keys this rank owns, [c, m]. Memory: two
    copies of the given columns, and the returned columns.
    """
    world_size = dist.get_world_size(group)
    owner = keys % world_size
    order = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner, minlength=world_size)
    everyone = torch.stack(
        all_gather(f"number of {what}", torch.from_numpy(sizes), [(world_size,)] * world_size, group)
    ).numpy()
    cut = np.ascontiguousarray(columns[:, order])
    parts = [torch.from_numpy(np.ascontiguousarray(p)) for p in np.split(cut, np.cumsum(sizes)[:-1], axis=1)]
    shapes = [(len(columns), int(size)) for size in everyone[:, dist.get_rank(group)]]
    received = [part.numpy() for part in all_to_all(what, parts, shapes, group)]
    return np.concatenate(received, axis=1)
