"""Map from rows of a table to raw ids, from one run of a warm-start chain to the next. Torch-free.

A warm start adds new ids and retires ids that have not occurred for too long (docs/adr/0045): every id carries the
number of the run whose training split last had it. The rows of the other ids keep their order and close the gaps, so a
table is never larger than its ids need. A retired id leaves a tombstone, for the number of runs after which an unseen
id is retired, so that publishers stop serving its last vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.columns.hashing import Int64s, UInt64s, id_keys, unmix
from trainer.data.columns.vocabulary import Codes, Int32s

NUM_SPECIAL_ROWS = 2  # row 0 is padding, row 1 the unknown id
UNKNOWN_ROW = 1

_RUN = b"run"


@dataclass(frozen=True)
class IdMap:
    """The ids of a table's rows: row r >= 2 is entry r - 2.

    Attributes:
        ids: distinct raw ids, int64 or large_string; or uint64, hashes of strings, in checkpoints of one-pass jobs
            that do not publish these ids.
        last_seen: int32 [n], for each id the number of the last run whose training split had it.
        run: number of the run that wrote this map, counted along the chain of warm starts from 1; 0: unknown.
        retired, retired_in: tombstones: ids that lost their row, and int32, the run that retired each.
    """

    ids: pa.Array
    last_seen: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    run: int = 0
    retired: pa.Array = None
    retired_in: Int32s = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        if self.retired is None:
            object.__setattr__(self, "retired", pa.array([], self.ids.type))
        if not len(self.last_seen):
            object.__setattr__(self, "last_seen", np.full(len(self.ids), self.run, dtype=np.int32))

    @property
    def is_text(self) -> bool:
        """True if the ids are text or hashes of text, not integers."""
        return not pa.types.is_int64(self.ids.type)

    def hashed(self) -> IdMap:
        """Return the map with hashes instead of strings."""
        if not pa.types.is_large_string(self.ids.type):
            return self
        return replace(self, ids=pa.array(id_keys(self.ids)), retired=pa.array(id_keys(self.retired)))

    def write(self, path: Path) -> None:
        """Write an Arrow file of two batches, rows and tombstones, each of ``id`` and ``run``."""
        schema = pa.schema([("id", self.ids.type), ("run", pa.int32())], metadata={_RUN: str(self.run).encode()})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for ids, runs in ((self.ids, self.last_seen), (self.retired, self.retired_in)):
                writer.write_batch(pa.record_batch([ids, pa.array(runs, pa.int32())], schema=schema))

    @staticmethod
    def read(path: Path) -> IdMap:
        """Open a file of :meth:`write`, memory-mapped."""
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            rows, tombstones = reader.get_batch(0), reader.get_batch(1)
        return IdMap(
            rows.column(0),
            rows.column(1).to_numpy(),
            int(reader.schema.metadata[_RUN]),
            tombstones.column(0),
            tombstones.column(1).to_numpy(),
        )


@dataclass(frozen=True)
class GrownTable:
    """A table after a run's training data was added to its parent's.

    Attributes:
        row_of_code: int32 [n + 1], the table row of each of the data's n distinct ids; the last entry is for a missing
            id.
        parent_rows: int64 [num_rows], the row of the same id in the parent's table; -1 for new ids, which come last.
    """

    ids: IdMap
    row_of_code: Int32s
    parent_rows: Int64s

    @property
    def num_rows(self) -> int:
        return len(self.ids.ids) + NUM_SPECIAL_ROWS


def grow(base: IdMap | None, codes: Codes, counts: Int64s, retire_after_runs: int | None = None) -> GrownTable:
    """Assign rows in a run's table: first to the parent's ids that keep a row, in their order, then to new ids.

    Args:
        base: the parent's map; None without a parent.
        codes: the distinct ids of the data, in ascending order.
        counts: [len(codes.ids)], occurrences of each id in the training split; an id that does not occur gets no row.
        retire_after_runs: an id that occurred in none of this many runs, including this one, loses its row; None: no
            id loses its row.
    """
    if base is None:
        base = IdMap(pa.array([], codes.ids.type))
    run = base.run + 1
    code = codes.encode(base.ids)
    seen = np.zeros(len(code), dtype=np.bool_)
    seen[code >= 0] = counts[code[code >= 0]] > 0
    last_seen = np.where(seen, run, base.last_seen).astype(np.int32)
    stays = np.ones(len(code), dtype=np.bool_) if retire_after_runs is None else run - last_seen < retire_after_runs
    stayed = np.flatnonzero(stays)

    rows = np.full(len(codes.ids) + 1, UNKNOWN_ROW, dtype=np.int32)
    known = stayed[code[stayed] >= 0]
    rows[code[known]] = np.searchsorted(stayed, known) + NUM_SPECIAL_ROWS
    new = np.flatnonzero((counts > 0) & (rows[:-1] == UNKNOWN_ROW))
    rows[new] = np.arange(len(new)) + NUM_SPECIAL_ROWS + len(stayed)

    added = codes.ids.take(pa.array(new))
    stay = base.ids.take(pa.array(stayed)) if len(stayed) < len(base.ids) else base.ids
    ids = pa.concat_arrays([stay, added]) if len(stay) else added
    retired, retired_in = _tombstones(base, np.flatnonzero(~stays), added, run, retire_after_runs)
    return GrownTable(
        IdMap(ids, np.concatenate([last_seen[stayed], np.full(len(new), run, np.int32)]), run, retired, retired_in),
        rows,
        np.concatenate([np.arange(NUM_SPECIAL_ROWS), stayed + NUM_SPECIAL_ROWS, np.full(len(new), -1)]),
    )


def hashes_of(ids: pa.Array) -> UInt64s:
    """Return the hashes of ids of an :class:`IdMap`."""
    return ids.to_numpy(zero_copy_only=False) if pa.types.is_uint64(ids.type) else id_keys(ids)


def of_hashes(whole: IdMap, live: UInt64s, tombstone_runs: int, strings: pa.Array | None = None) -> IdMap:
    """Return the ids that have a row after a one-pass run, and tombstones.

    Tombstones are ids that had a row at the end of an earlier run of the chain. Integers are restored from their
    hashes.

    Args:
        whole: the ids that had a row before the run, int64 or uint64; large_string with ``strings``.
        live: the hashes of the ids that have a row now, in the order of their rows.
        tombstone_runs: number of runs for which the tombstone of a retired id is kept.
        strings: the strings whose hashes are ``live``, if they are kept.
    """
    ids = pa.array(unmix(live).view(np.int64) if pa.types.is_int64(whole.ids.type) else live)
    ids = ids if strings is None else strings
    gone = np.flatnonzero(~np.isin(hashes_of(whole.ids), live))
    stands = (whole.run - whole.retired_in < tombstone_runs) & ~np.isin(hashes_of(whole.retired), live)
    standing = np.flatnonzero(stands)
    return IdMap(
        ids,
        run=whole.run,
        retired=pa.concat_arrays([whole.retired.take(pa.array(standing)), whole.ids.take(pa.array(gone))]),
        retired_in=np.concatenate([whole.retired_in[standing], np.full(len(gone), whole.run, np.int32)]),
    )


def _tombstones(
    base: IdMap, gone: Int64s, added: pa.Array, run: int, retire_after_runs: int | None
) -> tuple[pa.Array, Int32s]:
    """Return the parent's tombstones, without ids that are back or whose tombstone is too old, then this run's."""
    standing = Codes(added).encode(base.retired) < 0
    if retire_after_runs is not None:
        standing &= run - base.retired_in < retire_after_runs
    old = np.flatnonzero(standing)
    retired = pa.concat_arrays([base.retired.take(pa.array(old)), base.ids.take(pa.array(gone))])
    return retired, np.concatenate([base.retired_in[old], np.full(len(gone), run, np.int32)])
