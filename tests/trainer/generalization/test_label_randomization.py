"""Rows with permuted and with changed labels: everything but the label column stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.papers.data import documents
from trainer.generalization.label_randomization import at, changed, label_column, permuted


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    table = {"user": draw.integers(9, size=200), "item": draw.integers(9, size=200), "rating": draw.integers(1, 6, 200)}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_permuted_labels_are_the_same_labels_on_other_rows(rows: Path, tmp_path: Path) -> None:
    of = documents.dataset("d", rows, {"rule": "rating >= 4"})
    permuted(of, tmp_path / "out" / "p.parquet")
    before, after = pq.read_table(rows), pq.read_table(tmp_path / "out" / "p.parquet")
    assert after.drop_columns("rating").equals(before.drop_columns("rating"))
    assert after.schema == before.schema
    assert sorted(after["rating"].to_pylist()) == sorted(before["rating"].to_pylist())
    assert after["rating"] != before["rating"]
    written = (tmp_path / "out" / "p.parquet").stat().st_mtime_ns
    permuted(of, tmp_path / "out" / "p.parquet")
    assert (tmp_path / "out" / "p.parquet").stat().st_mtime_ns == written


@pytest.mark.parametrize("label", [{"rule": "rating >= 4"}, {"value": "rating"}])
def test_changed_labels_are_others_in_as_many_rows(label: dict[str, str], rows: Path, tmp_path: Path) -> None:
    changed(documents.dataset("d", rows, label), tmp_path / "c.parquet", 7)
    before, after = (pq.read_table(path)["rating"].to_numpy() for path in (rows, tmp_path / "c.parquet"))
    if "rule" in label:
        assert int(((before >= 4) != (after >= 4)).sum()) == int((before != after).sum()) == 7
    else:
        assert int((before != after).sum()) == 7


def test_one_label_alone_cannot_be_changed(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every row has the same label"):
        changed(documents.dataset("d", rows, {"rule": "rating >= 1"}), tmp_path / "c.parquet", 1)


def test_drawn_negatives_have_no_label_column() -> None:
    negatives = {"negatives": {"per_positive": 1, "of": "item"}}
    with pytest.raises(ValueError, match="its label is not a column that can be permuted"):
        label_column(documents.dataset("d", Path("x.parquet"), negatives))


def test_joins_and_graphs_stay_where_they_were(rows: Path, tmp_path: Path) -> None:
    graphs = {"near": {"uri": "edges.parquet", "source": "a", "target": "b", "of": "item"}}
    moved = at(documents.dataset("d", rows, {"column": "rating"}, graphs=graphs), tmp_path / "elsewhere" / "r.parquet")
    assert moved.uri == str(tmp_path / "elsewhere" / "r.parquet")
    assert moved.graphs["near"].uri == str(rows.parent / "edges.parquet")
