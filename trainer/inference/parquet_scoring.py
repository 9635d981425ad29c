"""Scoring from Parquet to Parquet: rows stream through a model a chunk at a time and keep their order. Torch-free.

The scores of a file are a file, and the scores of a directory a directory with the same structure. Either appears
complete, by one rename, or not at all.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing
from trainer.data.columns.row_encoder import EncodedRows
from trainer.data.errors import DataError
from trainer.data.sources.key_matches import KeyMatches
from trainer.data.sources.source import Chunk, Source, SourceFile
from trainer.data.sources.types import plain_batch

CHUNK_ROWS = 1 << 16


class Scorer(Protocol):
    """A model that scores rows."""

    @property
    def outputs(self) -> dict[str, pa.DataType]:
        """Types of the columns that :meth:`score` returns, keyed by column."""
        ...

    @property
    def text_columns(self) -> Collection[str]:
        """Columns of the rows that are read as text, even if a file without declared types has only numbers in them."""
        ...

    @property
    def id_columns(self) -> Collection[str]:
        """Columns of the rows that the model reads ids from."""
        ...

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """Return the columns that the model needs, from ``there``, the names of the rows' columns.

        ``where``: name of the rows in error messages.

        Raises:
            DataError: a column is missing.
        """
        ...

    def score(self, chunk: Chunk) -> tuple[list[pa.Array], EncodedRows]:
        """Return the outputs for each row, in the order of ``outputs``, and the encoded rows with counts of ids."""
        ...


@dataclass
class Summary:
    """Result of a scoring run: its output, time and counts of rows and files.

    ``unknown``, ``missing``: feature -> numbers of ids that the model does not know, and of null ids. ``matches``: as
    in :class:`EncodedRows`.
    """

    output: str = ""
    rows: int = 0
    files: int = 0
    seconds: float = 0.0
    unknown: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    matches: dict[str, KeyMatches] = field(default_factory=dict)

    def add(self, coded: EncodedRows) -> None:
        self.rows += coded.num_rows
        self.unknown.update(coded.unknown)
        self.missing.update(coded.missing)
        for name, found in coded.matches.items():
            self.matches.setdefault(name, KeyMatches()).add(found)


def score_files(
    scorer: Scorer,
    rows: Path | str,
    output: Path | str,
    *,
    keep: Sequence[str] | None = None,
    told: Callable[[int], Any] = lambda num_rows: None,
) -> Summary:
    """Score a file or a directory of rows. Memory depends on the size of a chunk, not on the number of rows.

    ``rows``: a file or a directory, on this machine or in object storage. ``keep``: columns of the rows that are
    written before the scores; None: all columns. ``told`` is called with the number of rows of each scored chunk.

    Raises:
        DataError: the model cannot read the rows, or ``output`` exists.
    """
    began, output = time.monotonic(), Path(output)
    source = Source(str(rows), text=scorer.text_columns, ids=scorer.id_columns)
    there = source.column_names()
    columns = _kept(source, there, keep, scorer.outputs)
    read = scorer.columns(there, source.uri)
    source.require([*read, *columns])
    summary = Summary(str(output))
    names = _names_below(source)
    with _appearing(output) as temporary:
        for file, name in zip(source.files, names, strict=True):
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _score_file(scorer, source, file, path, read, columns, summary, told)
            summary.files += 1
    summary.seconds = time.monotonic() - began
    return summary


def _names_below(source: Source) -> list[Path]:
    """Return for each file of rows the path of its scores relative to the output; for a single file, ``Path()``."""
    if source.is_file:
        return [Path()]
    names = [Path(*file.parts).with_suffix(".parquet") for file in source.files]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise DataError(f"scores of two files would go to {twice}", where=source.uri, remedy="rename one of them")
    return names


def _score_file(
    scorer: Scorer,
    source: Source,
    file: SourceFile,
    path: Path,
    read: Sequence[str],
    columns: Sequence[str],
    summary: Summary,
    told: Callable[[int], Any],
) -> None:
    # Columns that the names of the file's folders give are not repeated in the file.
    stored = [name for name in columns if name not in dict(file.partitions)]
    schema = pa.schema(
        [*(pa.field(name, source.column_type(name)) for name in stored),
         *(pa.field(name, type_) for name, type_ in scorer.outputs.items())]
    )  # fmt: skip
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in source.stream_file(file, [*read, *stored], CHUNK_ROWS):
            scores, coded = scorer.score(chunk)
            writer.write_batch(
                pa.record_batch([*(_as(chunk, name, schema) for name in stored), *scores], schema=schema)
            )
            summary.add(coded)
            told(len(chunk))


def _as(chunk: Chunk, name: str, schema: pa.Schema) -> pa.Array:
    column, type_ = chunk.column(name), schema.field(name).type
    try:
        return column if column.type == type_ else column.cast(type_)
    except pa.ArrowException as error:
        raise DataError(
            f"is {column.type} here and {type_} in the first file: {str(error).splitlines()[0]}",
            where=chunk.where(name),
            remedy="write the column with one type in every file, or leave it out with --columns",
        ) from None


def _kept(source: Source, there: Sequence[str], keep: Sequence[str] | None, outputs: Any) -> list[str]:
    missing = [name for name in keep or () if name not in there]
    if missing:
        raise DataError(
            f"no column {', '.join(map(repr, missing))} to keep (there are {', '.join(sorted(there))})",
            where=source.uri,
            remedy="correct --columns",
        )
    columns = list(dict.fromkeys(there if keep is None else keep))
    taken = [name for name in columns if name in outputs]
    if taken:
        raise DataError(
            f"already has a column {', '.join(map(repr, taken))}",
            where=source.uri,
            remedy="name the columns to keep with --columns, without it",
        )
    return columns


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``output``; rename it to ``output`` at the end, or remove it on error."""
    if output.exists():
        raise DataError("is there already", where=str(output), remedy="remove it, or give another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot be made: {error.strerror}", where=str(output.parent), remedy="give another --output"
        ) from None
    with appearing(output, durable=False) as temporary:
        yield temporary


def chunk_of(rows: pa.Table | pa.RecordBatch, name: str = "rows") -> Chunk:
    """Return rows in memory as a chunk; ``name`` stands for the file name in error messages."""
    batch = rows.combine_chunks().to_batches() if isinstance(rows, pa.Table) else [rows]
    whole = batch[0] if batch else pa.RecordBatch.from_pylist([], schema=rows.schema)
    return Chunk(SourceFile(Path(name)), np.arange(len(whole)), plain_batch(whole))
