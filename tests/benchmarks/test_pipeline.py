"""The log has every id of every feature, and its rows are read."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import pipeline
from trainer.data.prepare.preparation import prepare

ROWS, IDS, FEATURES = 4000, 300, 3


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    pipeline.write_log(folder / "log.parquet", ROWS, FEATURES, IDS)
    dataset, job = pipeline.specs(folder / "log.parquet", FEATURES, 1, 1, 1)
    return folder, prepare(dataset, job, folder / "data"), job


def test_every_id_occurs_and_labels_follow_them(prepared):
    folder, data, _ = prepared
    table = pq.read_table(folder / "log.parquet")
    for feature in range(FEATURES):
        assert len(np.unique(table[f"f{feature}"])) == IDS
    by_id = table.group_by("f0").aggregate([("click", "mean"), ("click", "count")])
    rates, counts = np.asarray(by_id["click_mean"]), np.asarray(by_id["click_count"])
    # Without weights the rates would vary by .25 / count alone.
    assert np.average((rates - rates.mean()) ** 2, weights=counts) > 1.3 * 0.25 * len(counts) / ROWS
    assert data.num_examples["train"] > 0.9 * ROWS


def test_reading_gives_a_rate(prepared):
    assert pipeline.read(prepared[1], 2) > 0
