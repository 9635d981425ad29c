"""Rows that cannot be trained on: counted by reason, left out and written to a file. Torch-free.

``max_bad_rows`` limits their share.

A row is bad in these cases:

- its label is missing, no number, neither 0 nor 1, or less than its loss can learn (one of several labels may be
  missing);
- its weight is missing or negative, or a mask of a label is neither 0 nor 1;
- its time, its day or the time of a feature is missing, cannot be read, or has a zone where others have none;
- a numeric feature is text or infinite, or is missing although the feature has ``missing: error``;
- a vector has another length or a missing or infinite number, or is missing although it has ``missing: error``;
- an id is missing although the feature has ``missing: error``;
- an id, also in a list, is no integer although the ids of its table are integers;
- a list has another number of weights than of ids, or a weight is missing or negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import fsync_path
from trainer.data.columns.base import Mask, Problem
from trainer.data.columns.ids import are_ids
from trainer.data.columns.labels import label_problems
from trainer.data.columns.numeric import as_floats
from trainer.data.columns.values import Kind, is_there
from trainer.data.errors import DataError
from trainer.data.prepare.plan import DataPlan, make_plan, window_of
from trainer.data.sources.source import Chunk, Source
from trainer.data.sources.times import read_days, written
from trainer.data.sources.types import is_text
from trainer.spec import DatasetSpec, JobSpec, Label
from trainer.storage.shared_directory import link_or_copy

NUM_EXAMPLES = 3
_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("row", pa.int64()),
        ("column", pa.string()),
        ("value", pa.string()),
        ("reason", pa.string()),
    ]
)


class BadRows:
    """Collector of bad rows, which :meth:`close` writes to ``path`` if there are any.

    Until then the rows are in files of ``folder``, a new file after each :meth:`state`, so that another process can
    continue after a kill.
    """

    def __init__(self, plan: DataPlan, path: Path, folder: Path):
        self._plan, self.path, self._folder = plan, path, folder
        self.num_rows, self.by_reason = 0, Counter[str]()
        self._examples: dict[str, list[str]] = {}
        self._num_files = 0
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._is_written = False

    @property
    def num_bad(self) -> int:
        return sum(self.by_reason.values())

    def good(self, chunk: Chunk) -> Chunk:
        """Return the chunk's good rows; count its bad rows and write them to a file."""
        bad = np.zeros(len(chunk), dtype=bool)
        for column, reason, mask in bad_values(self._plan, chunk):
            first = mask & ~bad
            if first.any():
                self._record(chunk, column, reason, np.flatnonzero(first))
            bad |= mask
        self.num_rows += len(chunk)
        batch = with_numbers(self._plan, chunk)
        if not bad.any():
            return Chunk(chunk.file, chunk.rows, batch)
        return Chunk(chunk.file, chunk.rows[~bad], batch.filter(pa.array(~bad)))

    def check(self) -> None:
        """Check the number of bad rows.

        Raises:
            DataError: more rows are bad than ``max_bad_rows`` allows; the message has examples.
        """
        limit = self._plan.dataset.max_bad_rows
        assert limit is not None
        if self.num_bad <= limit * self.num_rows:
            return
        raise DataError(
            f"{self.in_words()}, max_bad_rows allows {limit:.2%}: "
            + "; ".join(f"{reason} ({', '.join(shown)})" for reason, shown in self._examples.items()),
            where=self._plan.source.uri,
            remedy=f"correct them, all are in {self.path.name} of the run's directory, or raise max_bad_rows",
        )

    def in_words(self) -> str:
        counts = ", ".join(f"{reason} {count:,}" for reason, count in self.by_reason.most_common())
        share = self.num_bad / max(self.num_rows, 1)
        return f"{self.num_bad:,} of {self.num_rows:,} rows ({share:.2%}) are bad" + (f": {counts}" if counts else "")

    def state(self) -> dict[str, Any]:
        """Write the bad rows found so far to disk, and return their counts and examples, as JSON."""
        self._close_file()
        return {
            "num_rows": self.num_rows,
            "by_reason": dict(self.by_reason),
            "examples": self._examples,
            "num_files": self._num_files,
        }

    def files(self) -> list[Path]:
        """Return the files with the bad rows that were found until the last call of :meth:`state`."""
        return [self._file(number) for number in range(self._num_files)]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from counts that :meth:`state` returned in an earlier process."""
        self.num_rows, self.by_reason = state["num_rows"], Counter(state["by_reason"])
        self._examples, self._num_files = state["examples"], state["num_files"]

    def take_over(self, state: dict[str, Any], files: Sequence[Path]) -> None:
        """Add the bad rows that another collector found in later rows.

        ``state`` and ``files`` are its :meth:`state` and :meth:`files`; the files are linked or copied.
        """
        self.num_rows += state["num_rows"]
        self.by_reason.update(state["by_reason"])
        for reason, examples in state["examples"].items():
            shown = self._examples.setdefault(reason, [])
            shown += examples[: NUM_EXAMPLES - len(shown)]
        for path in files:
            link_or_copy(path, self._file(self._num_files))
            self._num_files += 1

    def close(self) -> None:
        """Write all bad rows to the Parquet file ``path``, if there are any."""
        self._close_file()
        if self._is_written or not self.num_bad:
            return
        with pq.ParquetWriter(self.path, _SCHEMA) as writer:
            for path in self.files():
                with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
                    for batch in batches:
                        writer.write_batch(batch)
        self._is_written = True

    def _file(self, number: int) -> Path:
        return self._folder / f"bad-rows-{number}"

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            fsync_path(self._file(self._num_files))
            self._num_files += 1

    def _record(self, chunk: Chunk, column: str, reason: str, positions: npt.NDArray[np.int64]) -> None:
        self.by_reason[reason] += len(positions)
        shown = self._examples.setdefault(reason, [])
        for position in positions[: NUM_EXAMPLES - len(shown)]:
            where = f"{chunk.file.path.name}, row {chunk.rows[position]}"
            shown.append(f"{where}: {column} = {_value(chunk.column(column), int(position))!r}")
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self._file(self._num_files)), _SCHEMA)
        said = [str(_value(chunk.column(column), int(position))) for position in positions]
        count = len(positions)
        arrays: list[Any] = [
            [str(chunk.file.path)] * count, chunk.rows[positions], [column] * count, said, [reason] * count,
        ]  # fmt: skip
        self._writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))


def with_numbers(plan: DataPlan, chunk: Chunk) -> pa.RecordBatch:
    """Return the chunk's columns, with numbers in label columns that are text because of a bad row."""
    batch = chunk.batch
    for column in plan.label_columns:
        if is_text(chunk.column(column).type):
            numbers, _ = as_floats(chunk.column(column))
            batch = batch.set_column(batch.schema.get_field_index(column), column, pa.array(numbers))
    return batch


def bad_values(plan: DataPlan, chunk: Chunk) -> Iterator[Problem]:
    """Yield (column, reason, mask of rows) for each kind of bad value in a chunk."""
    for column in filter(None, (plan.labels, plan.row_weights)):
        yield from column.problems(chunk)
    window = plan.bad_window
    if window is not None:
        yield window.column, "no date", ~read_days(chunk.column(window.column), window.zone)[1]
    for name, order in plan.orders.items():
        for reason, rows in order.problems(chunk.column(name)):
            yield name, reason, rows
    for name in plan.join_times:
        join, on = plan.joins[name], plan.join_on(name)
        positions = join.positions(chunk.column(on), chunk.where(on))
        yield on, f"no time of '{name}' in {join.source.uri}", (positions >= 0) & join.times[1][positions]
    for values_ in (*plan.numeric, *plan.row_vectors):
        yield from values_.problems(chunk)
    for use in plan.uses:
        yield from use.problems(chunk, plan.kinds[use.domain])
    for required in plan.required:
        yield required, "missing", ~is_there(chunk.column(required))


def bad_events(chunk: Chunk, ids: Mapping[str, Kind], label: Label | None) -> Mask:
    """Return a mask of the rows with a bad id, or with a bad label if ``label`` is given."""
    bad = np.zeros(len(chunk), dtype=bool)
    for column, kind in ids.items():
        bad |= (kind == "int") & ~are_ids(chunk.column(column))
    for _, _, mask in () if label is None else label_problems(chunk, label, None):
        bad |= mask
    return bad


class GoodRows(Source):
    """Source of a dataset's good rows, which are the rows that training reads if bad rows are allowed.

    ``uri`` names other rows to read instead of the dataset's, without its window. ``text`` is as in :class:`Source`.
    """

    def __init__(self, dataset: DatasetSpec, job: JobSpec, uri: str | None = None, text: Collection[str] = ()):
        window = window_of(dataset, job) if uri is None else None
        super().__init__(uri or dataset.uri, window, dataset.filter, text=text, ids=dataset.id_columns)
        self._plan = make_plan(dataset, job, self)

    def stream(self, columns: Sequence[str], *arguments: Any, **options: Any) -> Generator[Chunk]:
        """Yield good rows as :meth:`Source.stream` does, with the named columns and all columns of the plan."""
        for chunk in super().stream([*columns, *self._plan.columns()], *arguments, **options):
            bad = np.zeros(len(chunk), dtype=bool)
            for _, _, mask in bad_values(self._plan, chunk):
                bad |= mask
            yield replace(chunk, rows=chunk.rows[~bad], batch=chunk.batch.filter(pa.array(~bad)))


def _value(array: pa.Array, position: int) -> Any:
    """Return a value for messages; times are text, because Python cannot represent all of Arrow's times."""
    is_time = pa.types.is_temporal(array.type) and array[position].is_valid
    return written(array, position) if is_time else array[position].as_py()
