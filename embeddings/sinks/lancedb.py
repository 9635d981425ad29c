"""Tables of LanceDB in a directory: ``lancedb:///DIRECTORY``, one table for each collection.

A load overwrites the table: LanceDB writes the rows to new files, and then one new version of the table. The schema of
that version has the identity of the rows in its metadata, so rows and identity change in one step. A reader that has
the table open keeps reading its version until the load after the next removes it, or until ids are erased.
"""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from embeddings.sinks.base import Content, SinkBusy, SinkError
from embeddings.store.files import StoreBusy, writer_lock
from embeddings.vectors.item_vectors import STATUS_NAMES, arrow_of

_IDENTITY = b"evenkeel.identity"
_WORDS = pa.array(STATUS_NAMES)


class LanceDBSink:
    """A directory of tables with the columns id, status (a word), norm, vector (a list of float32) and version."""

    def __init__(self, url: str):
        try:
            import lancedb
        except ImportError as error:
            raise ImportError(f"LanceDB cannot be imported ({error}): pip install 'evenkeel[lancedb]'") from error
        parts = urlsplit(url)
        if parts.netloc or parts.query or not parts.path.strip("/"):
            raise SinkError("a URL of LanceDB names a directory and nothing else: lancedb:///DIRECTORY")
        self._directory = Path(unquote(parts.path))
        self._connect = lancedb.connect

    def holds(self, table: str) -> str | None:
        opened = self._open(table)
        identity = None if opened is None else (opened.schema.metadata or {}).get(_IDENTITY)
        return None if identity is None else identity.decode()

    def load(self, content: Content) -> None:
        with self._loading(content.table):
            identity = self.holds(content.table)
            if identity == content.identity:
                return
            opened = self._open(content.table)
            if opened is not None and identity is None:
                raise SinkError(
                    f"{self._directory}: table '{content.table}' is not Evenkeel's: rename it, or use another directory"
                )
            if opened is not None:
                _remove_others(opened)
            schema = _schema(content)
            rows = pa.RecordBatchReader.from_batches(schema, _record_batches(content, schema))
            self._connect(self._directory).create_table(content.table, rows, mode="overwrite")

    def purge(self, table: str) -> None:
        with self._loading(table):
            opened = self._open(table)
            if opened is not None:
                _remove_others(opened)

    def drop(self, table: str) -> None:
        with self._loading(table):
            if self.holds(table) is not None:
                self._connect(self._directory).drop_table(table)

    def _open(self, table: str) -> Any:
        """Open the present version of a table; return None if there is no such table."""
        if not (self._directory / f"{table}.lance" / "_versions").is_dir():
            return None
        return self._connect(self._directory).open_table(table)

    @contextlib.contextmanager
    def _loading(self, table: str) -> Iterator[None]:
        """Let no other process change the table while the block runs; raise SinkBusy if one does."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(writer_lock(self._directory / f".{table}.evenkeel.lock", 0.0))
            except StoreBusy as error:
                raise SinkBusy(str(error)) from None
            yield


def _schema(content: Content) -> pa.Schema:
    fields = [
        ("id", pa.int64() if content.id_type == "int64" else pa.string()),
        ("status", pa.string()),
        ("norm", pa.float32()),
        ("vector", pa.list_(pa.float32(), content.dim)),
        ("version", pa.string()),
    ]
    return pa.schema(fields, metadata={_IDENTITY: content.identity})


def _record_batches(content: Content, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in content.batches():
        columns = [
            arrow_of(batch.keys),
            _WORDS.take(pa.array(batch.statuses)),
            pa.array(batch.norms),
            pa.FixedSizeListArray.from_arrays(pa.array(batch.vectors.reshape(-1)), content.dim),
            pa.repeat(content.version, len(batch.keys)),
        ]
        yield pa.record_batch(columns, schema=schema)


def _remove_others(table: Any) -> None:
    """Remove all versions of the table but the present version, and files of killed loads."""
    with warnings.catch_warnings():
        # It warns that readers of other versions will fail.
        warnings.simplefilter("ignore", UserWarning)
        table.optimize(cleanup_older_than=datetime.timedelta(0), delete_unverified=True)
