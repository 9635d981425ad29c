"""Coding of id columns: first each chunk by its own distinct ids, finally all chunks by the table's sorted ids.

Arrow hashes every id once, and then only the distinct ids of chunks. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embeddings.durable_files import appearing
from trainer.data.columns.ids import IdColumn
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import DistinctIds, Int32s
from trainer.data.prepare.arrays import CODE, Appender, map_array
from trainer.data.prepare.id_runs import IdFile, IdRun, merge_runs
from trainer.data.prepare.part_cache import CODED, PartCache, write_checksum

CodedPart = tuple[pa.Array, Int32s, npt.NDArray[np.int64] | None]
"""A column of one chunk: its distinct ids, the position of each id among them (-1: null), and list lengths."""


class TableIds:
    """The distinct ids of one table, in memory or in runs on disk, with the position of every chunk's ids among them.

    ``name`` begins the names of its files in ``parts``; ``runs``: number of runs that an earlier process has written.
    """

    def __init__(self, kind: Kind, name: str, parts: PartCache, runs: int = 0):
        self._kind, self._name, self._parts = kind, name, parts
        self.places = parts.appender(f"{name}.places", CODE)
        self._runs = [self._run(number) for number in range(runs)]
        self._begin()

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def append(self, ids: pa.Array) -> tuple[int, int]:
        """Add the distinct ids of a chunk; return the number of their run and the start of their places."""
        return len(self._runs), self._first_place + self.distinct.append(ids)

    def settle(self) -> None:
        """Write the ids in memory that are not on disk yet, and the places of all ids."""
        self._saved.append(self.distinct.settled().slice(len(self._saved)))

    def spill(self) -> None:
        """Write the ids in memory as an ascending run; later ids belong to the next run."""
        run = self._run(len(self._runs))
        ids, ranks = self.distinct.ranked()
        run.ids.append(ids)
        run.ranks.append(ranks)
        self._runs.append(run)
        self._begin()

    def finish(self, piece_bytes: int) -> pa.Array:
        """Return all ids, ascending; :meth:`codes` may be called afterwards."""
        if not self._runs:
            ids, self._ranks = self.distinct.ranked()
            return ids
        self.spill()
        merged = IdFile(self._kind, f"{self._name}.merged", self._parts)
        merge_runs(self._runs, merged, piece_bytes)
        return merged.read()

    def codes(self, run: int, start: int, stop: int) -> Int32s:
        """Return, for the ids of a run at places ``start`` to ``stop``, their positions among all ids."""
        places: Int32s = self.places.mapped()[start:stop]
        if not self._runs:
            return self._ranks[places]
        return self._runs[run].codes.mapped()[self._runs[run].ranks.mapped()[places]]

    def _run(self, number: int) -> IdRun:
        return IdRun(self._kind, f"{self._name}.run-{number}", self._parts)

    def _begin(self) -> None:
        self._saved = IdFile(self._kind, f"{self._name}.ids-{len(self._runs)}", self._parts)
        self._first_place = self.places.length
        self.distinct = DistinctIds(self._kind, self.places.append, self._saved.read() if len(self._saved) else None)


class CodedColumn:
    """Files of one column of ids.

    ``name`` begins the names of the files in ``parts``. The codes refer to the ids of ``table``. ``chunks``:
    :attr:`chunks` of an earlier process.
    """

    def __init__(
        self, use: IdColumn, name: str, parts: PartCache, table: TableIds, chunks: list[list[int]] | None = None
    ):
        self.chunks = chunks or []
        """Per chunk: its run of ids, the start of their positions, the number of ids, the number of rows or values."""
        self._table = table
        self._lists = parts.jagged(name, CODE) if use.is_list else None
        self._codes: Appender = self._lists.values if self._lists is not None else parts.appender(name, CODE)
        self._coded = Path(f"{self._codes.path}{CODED}")

    def append(self, part: CodedPart) -> None:
        ids, places, lengths = part
        run, start = self._table.append(ids)
        self.chunks.append([run, start, len(ids), len(places)])
        if self._lists is None:
            self._codes.append(places)
        else:
            assert lengths is not None
            self._lists.append(places, lengths)

    def finish(self, durable: bool) -> None:
        """Replace the codes by positions in the finished table's ids, unless an earlier process did."""
        if self._coded.exists():
            return
        codes = map_array(self._codes.path, CODE)
        with appearing(self._coded, durable=durable) as path:
            with open(path, "wb") as file:
                done = 0
                for run, start, num_ids, count in self.chunks:
                    code_of = np.append(self._table.codes(run, start, start + num_ids), CODE.type(-1))
                    file.write(code_of[codes[done : done + count]].astype(CODE, copy=False).data)
                    done += count
            if durable:
                write_checksum(self._coded, path)
        self._codes.path.unlink()

    def mapped(self) -> npt.NDArray[np.int32] | Jagged:
        """Return the codes, memory-mapped; after :meth:`finish`."""
        codes: npt.NDArray[Any] = map_array(self._coded, CODE)
        return codes if self._lists is None else Jagged(codes, self._lists.offsets.mapped())
