"""Parquet files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing


def write_table(table: pa.Table, path: Path, **options: Any) -> None:
    """Write a table; ``options`` of :func:`pyarrow.parquet.write_table`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path, durable=False) as temporary:
        pq.write_table(table, temporary, **options)
