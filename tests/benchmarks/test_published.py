"""The published tables: every row's settings are valid, and the epoch is chosen by validation rows alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import published
from benchmarks.published import ROWS, Found, main, table
from trainer.spec import parse_dataset, parse_job

GENERATED = {"gowalla_bpr": "gowalla", "ml1m_sasrec": "ml1m"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows under the data sets' names: 60 users of 12 items each, among 30 items."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    item = np.concatenate([rng.permutation(30)[:12] for _ in range(60)])
    rows = {"user": np.repeat(np.arange(60), 12), "item": item, "pos": np.tile(np.arange(12), 60)}
    pq.write_table(pa.table(rows), folder / "ml1m.parquet")
    pq.write_table(pa.table({**rows, "is_test": (rows["pos"] > 9).astype("int8")}), folder / "gowalla.parquet")
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_settings_of_a_row_are_a_valid_job(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    dataset = parse_dataset(row.dataset_document(tmp_path))
    for epochs in (None, 3):
        parse_job(row.job_document(0, epochs)).against(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_a_row_is_trained_and_told(name: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(data), "--rows", name, "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    found = next(json.loads(line) for line in out.splitlines() if line.startswith('{"bench"'))
    assert (found["row"], found["seed"]) == (name, 0)
    assert 0.0 < found["ndcg"] < found["recall"] <= 1.0
    assert 1 <= found["epoch"] <= 2
    assert ROWS[name].published in out.splitlines()[-1]
    # gowalla is trained again with the rows that were for validation.
    trained = [line for line in out.splitlines() if line.startswith("examples: train")]
    assert len(trained) == (2 if name == "gowalla_bpr" else 1)
    assert trained[-1].endswith("validation 0, test 120") == (name == "gowalla_bpr")


def test_the_epoch_is_the_best_of_the_validation_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["ml1m_sasrec"]
    recall, ndcg = row.metrics
    told = [
        {"type": "metric", "split": split, "epoch": epoch, recall: of_recall, ndcg: of_ndcg}
        for epoch, split, of_recall, of_ndcg in (
            (1, "validation", 0.5, 0.2), (1, "test", 0.4, 0.1), (2, "validation", 0.4, 0.3), (2, "test", 0.3, 0.05),
            (3, "validation", 0.6, 0.1), (3, "test", 0.9, 0.9),
        )
    ]  # fmt: skip
    assert published.best(row, told) == (2, 0.3, 0.05)


def test_the_table_has_means_and_sample_deviations() -> None:
    found = {"gowalla_bpr": [Found(3, 0.16, 0.13, 10.0), Found(5, 0.18, 0.15, 20.0)]}
    assert (
        table(found).splitlines()[-1].startswith("| gowalla_bpr | 2 | 0.1700 ± 0.0141 | 0.1400 ± 0.0141 | 3, 5 | 15 |")
    )
