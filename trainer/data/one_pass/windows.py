"""Windows of rows for one-pass training, in the order of the files, each row with its split. Torch-free."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.batches.keys import Key
from trainer.data.columns import values
from trainer.data.columns.hashing import Int64s, UInt64s, combine, random_words
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.publishable import require_publishable
from trainer.data.columns.weights import as_factors, require_weighted
from trainer.data.errors import DataError
from trainer.data.one_pass.position import Place
from trainer.data.one_pass.rows import MISSING, RawIds, Rows, hashed_with_strings
from trainer.data.prepare.examples import NO_ID_KEY
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import SPLIT_NAMES, random_split
from trainer.data.sources.locations import as_it_is, is_still
from trainer.data.sources.source import Chunk, SourceFile, no_rows_in_window

WINDOW_ROWS = 1 << 18
"""Number of rows at which a window is full; it ends with the chunk that reaches this number.

A window is held in memory, and its training rows are shuffled among each other.
"""
CHANGED_REMEDY = "restore it unchanged, with its modification time, or start a new job"
"""Remedy for a file that changed after its reading began."""


@dataclass(frozen=True)
class Window:
    """Consecutive rows in the order of their files.

    It begins at ``place``, the next one at ``after``. ``sides``: uint8 [rows], the split of each row as its number in
    ``SPLIT_NAMES``.
    """

    place: Place
    after: Place
    rows: Rows
    sides: npt.NDArray[np.uint8]


class RowReader(ABC):
    """Base class of readers of a dataset's rows for a one-pass job.

    ``plan`` is of a job that :mod:`trainer.spec.checks.one_pass` accepts. Each of ``numeric`` has the number that
    replaces a missing value.
    """

    def __init__(self, plan: DataPlan, keys: Sequence[Key], numeric: Sequence[Numeric]):
        self.name = plan.dataset.name
        self._plan, self._numeric = plan, tuple(numeric)
        self._features = [feature for key in keys if (feature := plan.feature(key.name)) is not None]

    @abstractmethod
    def windows(self, start: Place, stopped: threading.Event) -> Iterator[Window]:
        """Yield the windows from ``start``, the beginning of a window, until the end or until ``stopped`` is set.

        Raises:
            DataError: a file cannot be read, or a value cannot be used.
        """

    def _read(self, chunk: Chunk, first_row: int) -> tuple[Rows, npt.NDArray[np.uint8]]:
        """Return a chunk's rows and the split of each, uint8 [rows]; ``first_row``: number of rows read before it."""
        plan = self._plan
        for column in plan.required:
            values.require_ids(chunk, column)
        columns: dict[str, Int64s | Jagged] = {}
        weights: list[npt.NDArray[np.float32] | None] = []
        raw_ids: list[RawIds] = []
        for feature in self._features:
            use = feature.use
            assert use is not None
            ids, lengths = use.read(chunk, plan.kinds[use.domain])
            offsets = None if lengths is None else np.append(0, np.cumsum(lengths))
            keys, strings = hashed_with_strings(ids)
            columns[feature.name] = keys if offsets is None else Jagged(keys, offsets)
            if feature.table == plan.raw_table and strings is not None:
                owners = np.repeat(np.arange(len(chunk)), 1 if lengths is None else lengths)
                require_publishable(ids, functools.partial(_where_of, chunk, use.column, owners))
                raw_ids.append(RawIds.of(strings))
            weights.append(None)
            if use.weights is not None:
                assert offsets is not None
                weights[-1] = as_factors(Jagged(require_weighted(chunk, use).weights, offsets), feature.pooling)
        numbers = [one.apply(one.read(chunk)) for one in self._numeric]
        assert plan.labels is not None
        rows = Rows(
            tuple(columns.values()), tuple(weights), plan.labels.read(chunk),
            np.stack(numbers, axis=1) if numbers else None,
            None if plan.row_weights is None else plan.row_weights.read(chunk),
            RawIds.joined(raw_ids) if raw_ids else None,
        )  # fmt: skip
        return rows, self._sides(chunk, columns, first_row)

    def _sides(self, chunk: Chunk, columns: dict[str, Int64s | Jagged], first_row: int) -> npt.NDArray[np.uint8]:
        """Return the split of each row, uint8 [rows], by the same rules as :mod:`trainer.data.prepare.examples`."""
        split, plan = self._plan.job.evaluation.split, self._plan
        if plan.sides is not None:
            return plan.sides.read(chunk)
        if plan.direct("user") is None or plan.direct("item") is None:
            return random_split(split, combine(random_words(0, first_row + np.arange(len(chunk)))))
        return random_split(split, combine(_pair_keys(columns["user"]), _pair_keys(columns["item"])))


def _where_of(chunk: Chunk, column: str, owners: Int64s, place: int) -> str:
    return chunk.where(column, int(owners[place]))


class WindowReader(RowReader):
    """Reader of a fixed set of files, all of which exist when the run begins.

    ``files``: [path, size, time of change in ns] of each file when the run began; files added later are not read.
    """

    def __init__(self, plan: DataPlan, files: Sequence[Sequence[Any]], keys: Sequence[Key], numeric: Sequence[Numeric]):
        super().__init__(plan, keys, numeric)
        self._files = {str(file[0]): list(file) for file in files}
        plan.source.files = tuple(file for file in plan.source.files if str(file.path) in self._files)
        if len(plan.source.files) < len(self._files):
            gone = sorted(self._files.keys() - {str(file.path) for file in plan.source.files})
            raise DataError("is gone", where=gone[0], remedy=CHANGED_REMEDY)

    def windows(self, start: Place, stopped: threading.Event) -> Iterator[Window]:
        source = self._plan.source
        place, held = start, Held()
        for chunk in source.stream(self._plan.columns(), start=(start.file, start.row)):
            self._check_file(chunk.file)
            held.add(*self._read(chunk, place.rows + held.number))
            end = source.files.index(chunk.file, place.file), chunk.end
            if held.number >= WINDOW_ROWS:
                # Hold no reference to the window while the caller works on it, so that its memory is freed early.
                place, windows = window_of(place, held, *end)
                held = Held()
                yield windows.pop()
        if held.number:
            yield window_of(place, held, *end)[1].pop()
        elif place.rows == 0 and source.window is not None:
            raise no_rows_in_window(source.uri, source.window)

    def _check_file(self, file: SourceFile) -> None:
        # Each rank reads the file on its own, and all must read the same.
        _, size, changed_ns = self._files[str(file.path)]
        try:
            path = as_it_is(file.path)
        except FileNotFoundError:
            raise DataError("is gone", where=str(file.path), remedy=CHANGED_REMEDY) from None
        if not is_still(path, size, changed_ns):
            raise DataError("has changed since the run began", where=str(file.path), remedy=CHANGED_REMEDY)


def _pair_keys(column: Int64s | Jagged) -> UInt64s:
    assert not isinstance(column, Jagged)
    return np.where(column == MISSING, np.uint64(NO_ID_KEY), column.view(np.uint64))


class Held:
    """Rows, and their splits, of a window that is still being filled."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.sides: list[npt.NDArray[np.uint8]] = []
        self.number = 0

    def add(self, rows: Rows, sides: npt.NDArray[np.uint8]) -> None:
        self.rows.append(rows)
        self.sides.append(sides)
        self.number += len(sides)


def window_of(
    place: Place, held: Held, file: int, row: int, bad: tuple[int, int] = (0, 0)
) -> tuple[Place, list[Window]]:
    """Return the next window's position, and a list with only this window.

    The window begins at ``place``; the next one begins at row ``row`` of file ``file``, after ``bad`` bad rows in all
    and in its block.
    """
    sides = np.concatenate(held.sides)
    counts = np.bincount(sides, minlength=len(SPLIT_NAMES))
    train, validation, test = (int(before + count) for before, count in zip(place.examples, counts, strict=False))
    after = replace(
        place, file=file, row=row, window=place.window + 1, rows=place.rows + len(sides),
        examples=(train, validation, test), bad=bad[0], bad_of_block=bad[1],
    )  # fmt: skip
    return after, [Window(place, after, Rows.joined(held.rows), sides)]
