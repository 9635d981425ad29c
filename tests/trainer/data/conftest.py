"""Small datasets and jobs for the tests of the data layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

CLICK_FEATURES = {"user": {"type": "id"}, "item": {"type": "id"}}


def click_table(num_rows: int = 400, seed: int = 0, users: int = 30, items: int = 40) -> pa.Table:
    """user, item, click, ts: repeated pairs, both classes."""
    generator = np.random.default_rng(seed)
    return pa.table(
        {
            "user": generator.integers(0, users, num_rows) * 7 + 3,
            "item": generator.integers(0, items, num_rows) * 11 - 50,
            "click": generator.integers(0, 2, num_rows),
            "ts": generator.permutation(num_rows),
        }
    )


@pytest.fixture
def clicks() -> Callable[..., pa.Table]:
    return click_table


@pytest.fixture
def dataset_spec(tmp_path: Path) -> Callable[..., DatasetSpec]:
    """``dataset_spec(table or path, **fields)``: writes a table as Parquet, and describes it."""

    def make(table: pa.Table | Path | str, **fields: Any) -> DatasetSpec:
        if isinstance(table, pa.Table):
            path = tmp_path / "rows.parquet"
            pq.write_table(table, path, row_group_size=97)
        else:
            path = Path(table)
        document = {"name": "clicks", "uri": str(path), "features": CLICK_FEATURES, "label": {"column": "click"}}
        return parse_dataset({name: value for name, value in {**document, **fields}.items() if value is not None})

    return make


@pytest.fixture
def job_spec() -> Callable[..., JobSpec]:
    def make(**fields: Any) -> JobSpec:
        document: dict[str, Any] = {"name": "job", "dataset": {"name": "clicks"}, "model": {"kind": "dnn"}}
        return parse_job({**document, "batch_size": 64, **fields})

    return make


@pytest.fixture
def read_split() -> Callable[..., pa.Table]:
    """``read_split(data, split)``: the raw ids and labels of a prepared split; unknown ids are null."""

    def read(data: Any, split: str) -> pa.Table:
        columns: dict[str, pa.Array] = {}
        for key in data.keys:
            if key.name.endswith("__negative"):
                continue
            vocabulary = data.vocabulary(key.table)
            column = data.column(split, key)
            rows = np.asarray(column.values if key.is_list else column).astype(np.int64)
            ids = vocabulary.take(pa.array(np.where(rows >= 2, rows - 2, 0), mask=rows < 2))
            if key.is_list:
                ids = pa.LargeListArray.from_arrays(pa.array(np.asarray(column.offsets)), ids)
            columns[key.name] = ids
        columns["label"] = pa.array(np.asarray(data.labels(split)))
        return pa.table(columns)

    return read
