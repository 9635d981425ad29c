"""Columns of ids coded chunk by chunk: by each chunk's own distinct ids, at last by the sorted ids of the table.

Arrow hashes every id once, and then only the distinct ids of chunks. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.jagged import Jagged
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import DistinctIds, Int32s
from trainer.data.prepare.arrays import CODE, VALUE, Appender, JaggedAppender, map_array
from trainer.data.prepare.plan import ColumnUse


class CodedPart(NamedTuple):
    """A column of one chunk: its distinct ids, the place of each id among them (-1: null), and list lengths."""

    ids: pa.Array
    places: Int32s
    lengths: npt.NDArray[np.int64] | None


class TableIds:
    """The ids of one table: distinct ones in memory; of every chunk's, on disk, the place among these."""

    def __init__(self, kind: Kind, path: Path):
        self.places = Appender(path, CODE)
        self.distinct = DistinctIds(kind, self.places.append)

    def close(self) -> None:
        self.places.close()


class CodedColumn:
    """Files of one column of ids, and of its weights where it has them."""

    def __init__(self, use: ColumnUse, stem: Path, table: TableIds):
        self.weights = Appender(stem.with_name(f"{stem.name}.weights"), VALUE) if use.weights else None
        self._table = table
        self._lists = JaggedAppender(stem, CODE) if use.is_list else None
        self._codes = self._lists.values if self._lists is not None else Appender(stem, CODE)
        self._parts: list[tuple[int, int, int]] = []  # where the places of its ids begin, how many ids, how many rows

    def append(self, part: CodedPart) -> None:
        self._parts.append((self._table.distinct.append(part.ids), len(part.ids), len(part.places)))
        if self._lists is None:
            self._codes.append(part.places)
        else:
            assert part.lengths is not None
            self._lists.append(part.places, part.lengths)

    def close(self) -> None:
        (self._lists or self._codes).close()
        if self.weights is not None:
            self.weights.close()

    def finish(self, ranks: Int32s) -> None:
        """Rewrite the codes, in place: ``ranks`` are the positions of the table's ids in their ascending order."""
        places, codes = self._table.places.mapped(), map_array(self._codes.path, CODE, mode="r+")
        done = 0
        for start, num_ids, count in self._parts:
            code_of = np.append(ranks[places[start : start + num_ids]], CODE.type(-1))
            codes[done : done + count] = code_of[codes[done : done + count]]
            done += count

    def mapped(self) -> npt.NDArray[np.int32] | Jagged:
        """Return the codes, memory-mapped; after :meth:`finish`."""
        return self._codes.mapped() if self._lists is None else self._lists.mapped()
