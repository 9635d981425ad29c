"""The table of CTR models beside other libraries: the rows of the recipe, ours as a job, a peer that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.published_ctr import MODELS, OURS, Found, best, dataset_document, job_document, main, table, write_rows
from trainer.spec import parse_dataset, parse_job


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MovieLens-1M's files with 40 users, who rated 25 of 30 movies each."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    users, items = np.arange(40), np.arange(30)
    rated = np.concatenate([rng.permutation(30)[:25] for _ in users])
    rows = {"user": np.repeat(users, 25).astype(np.int16), "item": rated, "rating": rng.integers(1, 6, 1000)}
    profiles = {"gender": ["F", "M"] * 20, "age": users % 7, "occupation": users % 5}
    titles = [f"Film {item} (of 7) ({1970 + item})" for item in items]
    genres = ["Comedy|Drama" if item % 2 else "Drama" for item in items]
    pq.write_table(pa.table(rows), folder / "ml1m.parquet")
    pq.write_table(pa.table({"user": users, **profiles}), folder / "ml1m_users.parquet")
    pq.write_table(pa.table({"item": items, "title": titles, "genres": genres}), folder / "ml1m_movies.parquet")
    return folder


def test_rows_are_those_of_the_recipe(data: Path, tmp_path: Path) -> None:
    write_rows(data, tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    rated = {(row["user"], row["item"]): row["rating"] for row in pq.read_table(data / "ml1m.parquet").to_pylist()}
    assert {(row["user"], row["item"]) for row in rows} == {pair for pair, rating in rated.items() if rating != 3}
    for row in rows:
        user, item = row["user"], row["item"]
        assert row["label"] == (rated[user, item] > 3)
        assert (row["gender"], row["age"], row["occupation"]) == ("FM"[user % 2], user % 7, user % 5)
        assert (row["year"], row["genres"]) == (str(1970 + item), ["Comedy", "Drama"] if item % 2 else ["Drama"])
    counts = [sum(row["fold"] == fold for row in rows) for fold in ("train", "validation", "test")]
    assert counts == pytest.approx([0.8 * len(rows), 0.1 * len(rows), 0.1 * len(rows)], abs=2)
    write_rows(data, tmp_path / "again.parquet")
    assert pq.read_table(tmp_path / "again.parquet").to_pylist() == rows


@pytest.mark.parametrize("library", OURS)
@pytest.mark.parametrize("model", MODELS)
def test_settings_of_a_row_are_a_valid_job(model: str, library: str, tmp_path: Path) -> None:
    parse_job(job_document(library, model, 0, 3)).against(parse_dataset(dataset_document(tmp_path / "rows.parquet")))


def test_ours_is_trained_and_a_peer_that_fails_leaves_its_message(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This environment lacks the peers' packages."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "whole").touch()
    options = ["--data", str(data), "--libraries", "ours", "recbole", "--peers", str(tmp_path), "--seeds", "0", "1"]
    assert main(options) == 0
    out = capsys.readouterr().out
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"bench"')]
    assert [(line["model"], line["library"], line["seed"]) for line in found] == [("deepfm", "ours", s) for s in (0, 1)]
    assert all(0.0 < line["auc"] < 1.0 and 1 <= line["epoch"] <= 2 and line["seconds"] > 0 for line in found)
    assert out.splitlines()[-1].startswith("| deepfm | recbole | ModuleNotFoundError: No module named ")


def test_the_epoch_is_the_best_of_the_validation_rows() -> None:
    told = [
        {"type": "metric", "split": split, "epoch": epoch, "auc": auc, "logloss": 1.0 - auc}
        for epoch, split, auc in ((1, "validation", 0.7), (1, "test", 0.9), (2, "validation", 0.8), (2, "test", 0.6))
    ]
    assert best(told, 5.0) == Found(2, 0.8, 0.6, 0.4, 2.5)


def test_the_table_has_means_and_sample_deviations() -> None:
    results = {("deepfm", "ours"): [Found(3, 0.9, 0.89, 0.32, 4.0), Found(5, 0.9, 0.91, 0.3, 6.0)]}
    row = "| deepfm | ours | 0.9000 ± 0.0141 | 0.3100 ± 0.0141 | 3, 5 | 5.0 |"
    assert table(results, {}).splitlines()[-1] == row
