"""Export of a version to a file for other programs: Parquet, safetensors, or an index of usearch or FAISS.

Rows without a vector are left out. A file is written atomically, and replaces an existing file of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing
from embeddings.store.collection.collection import Collection
from embeddings.store.nearest_neighbors import build_index
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import MISSING, STATUS_NAMES, Array, arrow_of

IDS_SUFFIX = ".ids.parquet"
"""Suffix of the file, written next to an index, that maps the index's keys to ids."""


class Rows(NamedTuple):
    """Rows of an export: ids int64 or text [n], statuses uint8 [n], vectors float32 [n, d], and the file's metadata."""

    ids: Array
    statuses: Array
    vectors: Array
    about: dict[str, str]


class Exported(NamedTuple):
    """The version in an exported file, and the number of its rows."""

    version: str
    num_rows: int


def export_vectors(
    collection: Collection, file: Path | str, *, version: str = "current", view: str | None = None
) -> Exported:
    """Write a version, or its features in a view, to a file; all vectors are held in memory.

    ``file`` ends in .parquet, .safetensors, .usearch or .faiss, which selects the format (FORMATS). Return the version
    and the number of its rows that have a vector.

    Raises:
        ValueError: The suffix is not in FORMATS, or ids were erased during the export: export again.
        ImportError: The library of the format is not installed.
        OSError: The file cannot be written.
        UnknownVersion: There is no such version.
        UnknownView: There is no such view.

    Example:
        >>> import tempfile, numpy as np
        >>> from embeddings.store import open_store
        >>> from embeddings.vectors.item_vectors import ItemVectors
        >>> folder = tempfile.mkdtemp()
        >>> items = open_store(f"{folder}/store").collection("items")
        >>> items.publish(items.write(ItemVectors([7, 9], np.eye(2, dtype=np.float32))), None)
        >>> export_vectors(items, f"{folder}/items.parquet")
        Exported(version='v000001', num_rows=2)
    """
    path = Path(file)
    write = FORMATS.get(path.suffix)
    if write is None:
        raise ValueError(f"{path}: the ending sets the format: use one of {', '.join(FORMATS)}")
    num_erasures = collection.num_erasures()
    reader = collection.open(version)
    present = np.flatnonzero(reader.statuses != MISSING)
    vectors = as_float32(reader.vectors[present])
    if view is not None:
        vectors = collection.view_transform(view, vectors, reader.version)
    about = {"collection": collection.name, "version": reader.version, "view": view or ""}
    rows = Rows(reader.keys[present], reader.statuses[present], np.ascontiguousarray(vectors, np.float32), about)
    write(rows, path)
    if collection.num_erasures() != num_erasures:
        for written in (path, path.with_name(path.name + IDS_SUFFIX)):
            written.unlink(missing_ok=True)
        raise ValueError(f"{path}: ids of {collection.name} were erased while it was written: export it again")
    return Exported(reader.version, len(rows.ids))


def _parquet(rows: Rows, path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.vectors.reshape(-1)), rows.vectors.shape[1])
    _write_table({"id": arrow_of(rows.ids), "status": _words(rows.statuses), "vector": vectors}, rows.about, path)


def _safetensors(rows: Rows, path: Path) -> None:
    """Write tensors ``vectors`` [n, d] and ``ids``: int64 [n], or for text ids a JSON list in UTF-8, uint8 [bytes]."""
    from safetensors.numpy import save_file

    ids = rows.ids
    if ids.dtype != np.int64:
        ids = np.frombuffer(json.dumps(arrow_of(ids).to_pylist(), ensure_ascii=False).encode(), np.uint8)
    with appearing(path, durable=False) as partial:
        # Raises OSError if the file cannot be made; the library would raise an error of its own type.
        partial.touch()
        tensors = {"vectors": rows.vectors, "ids": ids, "statuses": rows.statuses}
        save_file(tensors, str(partial), metadata=rows.about)


def _usearch(rows: Rows, path: Path) -> None:
    _write_ids(rows, path)
    build_index(rows.vectors, rows.statuses, path)


def _faiss(rows: Rows, path: Path) -> None:
    """Write a flat FAISS index by inner product of unit vectors, so scores are cosines; its keys are row numbers."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"{path}: faiss is not installed: pip install 'evenkeel[faiss]'") from error
    norms = np.linalg.norm(rows.vectors, axis=1)
    usable = np.flatnonzero((norms > 0) & np.isfinite(norms))
    index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(rows.vectors.shape[1]))
    index.add_with_ids(rows.vectors[usable] / norms[usable, None], usable.astype(np.int64))
    _write_ids(rows, path)
    with appearing(path, durable=False) as partial:
        faiss.write_index(index, str(partial))


def _write_ids(rows: Rows, path: Path) -> None:
    keys = pa.array(np.arange(len(rows.ids), dtype=np.int64))
    columns = {"key": keys, "id": arrow_of(rows.ids), "status": _words(rows.statuses)}
    _write_table(columns, rows.about, path.with_name(path.name + IDS_SUFFIX))


def _write_table(columns: dict[str, pa.Array], about: dict[str, str], path: Path) -> None:
    with appearing(path, durable=False) as partial:
        pq.write_table(pa.table(columns).replace_schema_metadata(about), partial)


def _words(statuses: Array) -> pa.Array:
    return pa.array(STATUS_NAMES).take(pa.array(statuses))


FORMATS: dict[str, Callable[[Rows, Path], None]] = {
    ".parquet": _parquet,
    ".safetensors": _safetensors,
    ".usearch": _usearch,
    ".faiss": _faiss,
}
"""Functions that write a file, by its suffix."""
