"""A column that is written without being in memory is the column that Arrow would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.durable_files import file_sha256
from embeddings.store.arrow_stream import write_streamed
from embeddings.store.files import FileEntry
from embeddings.store.version import read_arrow, write_arrow
from embeddings.vectors.lazy_rows import CHUNK_ROWS, Picked


def columns_of(num_rows: int) -> dict[str, pa.Array]:
    return {"key": pa.array(np.arange(num_rows)), "status": pa.array(np.ones(num_rows, np.uint8))}


@pytest.mark.parametrize("num_rows", [0, 1, 7, CHUNK_ROWS, 2 * CHUNK_ROWS + 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_batch_is_the_one_that_was_described(tmp_path: Path, num_rows: int, dtype: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((num_rows, 5)).astype(np.float32)
    rows = Picked(vectors, np.arange(num_rows))
    entry = write_streamed(tmp_path / "streamed.arrow", columns_of(num_rows), "vector", rows, dtype)
    flat = pa.array(vectors.astype(dtype).reshape(-1))
    whole = pa.record_batch({**columns_of(num_rows), "vector": pa.FixedSizeListArray.from_arrays(flat, 5)})
    write_arrow(tmp_path / "whole.arrow", whole)
    streamed = read_arrow(tmp_path / "streamed.arrow")
    assert streamed.equals(read_arrow(tmp_path / "whole.arrow"))
    streamed.validate(full=True)
    path = tmp_path / "streamed.arrow"
    assert entry == FileEntry("streamed.arrow", file_sha256(path), path.stat().st_size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e5])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("row", [0, CHUNK_ROWS + 1])
def test_rows_that_are_not_finite_in_the_dtype_are_refused(tmp_path: Path, bad: float, dtype: Any, row: int) -> None:
    vectors = np.full((CHUNK_ROWS + 2, 2), 65504.0, dtype=np.float32)
    vectors[row, 1] = bad
    if bad == 1e5 and dtype == "float32":
        write_streamed(tmp_path / "rows.arrow", columns_of(len(vectors)), "vector", vectors, dtype)
        return
    with pytest.raises(ValueError, match="not finite"):
        write_streamed(tmp_path / "rows.arrow", columns_of(len(vectors)), "vector", vectors, dtype)
