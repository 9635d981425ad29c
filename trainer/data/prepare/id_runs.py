"""Sorting of distinct ids that do not fit in memory: runs of ascending ids on disk, and their merge. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import encoded, id_type
from trainer.data.prepare.arrays import CODE, Appender
from trainer.data.prepare.part_cache import PartCache

_SAMPLES = 8
"""Number of sampled ids per run and range, enough that the ranges of a merge have similar numbers of ids."""


class IdFile:
    """File of raw ids without nulls, which can be appended to: integers, or UTF-8 bytes with each id's offset."""

    def __init__(self, kind: Kind, name: str, parts: PartCache):
        self._type = id_type(kind)
        self._file = parts.appender(name, np.int64) if kind == "int" else parts.jagged(name, np.uint8)

    def __len__(self) -> int:
        return self._file.length if isinstance(self._file, Appender) else self._file.offsets.length - 1

    def append(self, ids: pa.Array) -> None:
        if isinstance(self._file, Appender):
            self._file.append(ids.to_numpy(zero_copy_only=False))
        elif len(ids):
            _, offset_bytes, data = ids.buffers()
            offsets = np.frombuffer(offset_bytes, np.int64)[ids.offset : ids.offset + len(ids) + 1]
            text = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
            self._file.append(text[offsets[0] : offsets[-1]], np.diff(offsets))

    def read(self) -> pa.Array:
        """Return the ids, memory-mapped."""
        file = self._file
        buffers = [None]
        for part in (file,) if isinstance(file, Appender) else (file.offsets, file.values):
            part.flush()
            buffers.append(pa.py_buffer(np.ascontiguousarray(part.mapped())))
        return pa.Array.from_buffers(self._type, len(self), buffers)


class IdRun:
    """A run: its distinct ids, ascending, and their positions in it, listed in the ids' order of first appearance."""

    def __init__(self, kind: Kind, name: str, parts: PartCache):
        self.ids = IdFile(kind, f"{name}.ids", parts)
        self.ranks = parts.appender(f"{name}.ranks", CODE)
        self.codes = parts.appender(f"{name}.codes", CODE)
        """For each id of the run, in ascending order, its position among the distinct ids of all runs."""


def merge_runs(runs: Sequence[IdRun], merged: IdFile, piece_bytes: int) -> None:
    """Append the distinct ids of all runs to ``merged``, ascending, and to each run its codes.

    ``merged`` is an empty file; ``piece_bytes``: approximate size of the ids that are in memory at once.
    """
    ids = [run.ids.read() for run in runs]
    num_pieces = -(-sum(one.nbytes for one in ids) // piece_bytes)
    cuts = _cuts(ids, num_pieces)
    for piece in range(num_pieces):
        slices = [one.slice(cut[piece], cut[piece + 1] - cut[piece]) for one, cut in zip(ids, cuts, strict=True)]
        distinct, places = encoded(pa.concat_arrays(slices))
        order = pc.array_sort_indices(distinct)
        codes = np.empty(len(order), dtype=np.int64)
        codes[order.to_numpy(zero_copy_only=False)] = np.arange(len(merged), len(merged) + len(order))
        merged.append(distinct.take(order))
        ends = np.cumsum([0, *map(len, slices)])
        for run, (first, last) in zip(runs, pairwise(ends), strict=True):
            run.codes.append(codes[places[first:last]])
    for run in runs:
        run.ranks.flush()
        run.codes.flush()


def _cuts(ids: Sequence[pa.Array], num_pieces: int) -> list[npt.NDArray[np.int64]]:
    """Cut the runs at the same ids into ``num_pieces`` ranges each; return, for each run, the ranges' bounds."""
    samples = []
    for one in ids:
        places = np.linspace(0, len(one), min(len(one), num_pieces * _SAMPLES), endpoint=False).astype(np.int64)
        samples.append(one.take(pa.array(places)))
    sampled = pa.concat_arrays(samples)
    sampled = sampled.take(pc.array_sort_indices(sampled))
    chosen = np.linspace(0, len(sampled), num_pieces, endpoint=False).astype(np.int64)[1:]
    limits = sampled.take(pa.array(chosen))
    return [np.concatenate([[0], pc.search_sorted(one, limits).to_numpy(), [len(one)]]).astype(np.int64) for one in ids]
