"""A row is read for scoring as preparation reads it, whatever its features are.

Preparation by tasks and in one pass write what one process does: tests/trainer/data/prepare/test_by_tasks.py and
tests/trainer/data/one_pass/test_batches.py. Here the fourth reading of a feature, that of ``predict`` and of exports,
is compared with the first, row by row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.trainer.data.prepare.cases import Case, specs, write_rows
from trainer.data.batches.keys import read_features
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import open_numeric
from trainer.data.columns.row_encoder import EncodedRows, RowEncoder
from trainer.data.prepare.preparation import prepare
from trainer.data.prepare.split import SPLIT_NAMES
from trainer.data.sources.source import Source
from trainer.spec import DatasetSpec, JobSpec

PLAIN = Case(split="column", history=False, num_rows=400)
CASES = {
    "ids, numbers, joins and weighted lists": PLAIN,
    "lists without weights": replace(PLAIN, weighted=False),
    "integers": replace(PLAIN, strings=False),
    "vectors and texts": replace(PLAIN, vectors=True),
    "histories": replace(PLAIN, history=True),
    "a rule's labels and a filter": replace(PLAIN, label="rule", filtered=True),
    "real-valued labels": replace(PLAIN, label="value", vectors=True),
    "Feather": replace(PLAIN, format="feather", vectors=True),
    "CSV": replace(PLAIN, format="csv"),
    "hours and weekdays": replace(PLAIN, calendar=True),
    "hours and weekdays in CSV": replace(PLAIN, calendar=True, format="csv"),
}


def encoder_of(data: PreparedData, dataset: DatasetSpec, job: JobSpec) -> RowEncoder:
    """Make the encoder that ``predict`` makes."""
    return RowEncoder(
        dataset, read_features(dataset, job), {table: data.vocabulary(table) for table in data.tables},
        numeric=() if data.numeric_path is None else open_numeric(data.numeric_path), vectors=data.vectors,
        history_source=lambda: Source(dataset.uri, row_filter=dataset.filter, ids=dataset.id_columns),
    )  # fmt: skip


def as_lists(rows: npt.NDArray[np.integer] | Jagged) -> list[list[int]]:
    lists = rows if isinstance(rows, Jagged) else Jagged(np.asarray(rows), np.arange(len(rows) + 1))
    return [part.tolist() for part in np.split(np.asarray(lists.values), lists.offsets[1:-1])]


@pytest.mark.parametrize("name", CASES)
def test_rows_to_score_are_read_as_those_to_train_on(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    write_rows(case, tmp_path)
    dataset, job = specs(case, tmp_path)
    data = prepare(dataset, job, tmp_path / "data")
    encoder = encoder_of(data, dataset, job)
    source = Source(
        dataset.uri, row_filter=dataset.filter, text=sorted(encoder.text_columns), ids=sorted(encoder.id_columns)
    )
    columns = encoder.columns(source.column_names(), dataset.uri)
    chunks = list(source.stream([*columns, "side"], chunk_rows=64))
    assert len(chunks) > 4
    sides = np.concatenate([chunk.column("side").to_numpy(zero_copy_only=False) for chunk in chunks])
    encoded = [encoder.encode(chunk) for chunk in chunks]
    # An example without a history (min_length: 1) is none.
    lengths = (
        [len(row) for part in encoded for row in as_lists(part.rows["history"])] if case.history else [1] * len(sides)
    )
    for split in SPLIT_NAMES:
        chosen = np.flatnonzero((sides == split) & (np.array(lengths) > 0))
        assert len(chosen) == data.num_examples[split] > 20
        for key in data.keys:
            ours = [row for part in encoded for row in as_lists(part.rows[key.name])]
            assert [ours[row] for row in chosen] == as_lists(data.column(split, key)), key.name
            if key.weighted:
                weights = [weight for part in encoded for weight in _weights(part, key.name)]
                found = np.concatenate([weights[row] for row in chosen])
                np.testing.assert_array_equal(found, data.weights(split, key))
        if data.num_dense or data.vectors:
            dense = np.concatenate([part.dense for part in encoded if part.dense is not None])[chosen]
            expected = [data.numbers(split), *(data.row_vectors(split, one) for one in data.vectors)]
            np.testing.assert_array_equal(dense, np.concatenate(expected, axis=1))


def _weights(part: EncodedRows, name: str) -> list[npt.NDArray[np.float32]]:
    lists = part.rows[name]
    assert isinstance(lists, Jagged)
    return np.split(part.weights[name], lists.offsets[1:-1])
