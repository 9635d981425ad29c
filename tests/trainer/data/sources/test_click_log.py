"""The click log: deterministic, calibrated to its own probabilities, with the structure that it promises."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.prepare.preparation import prepare
from trainer.data.sources.click_log import FIRST_DAY, ITEM_BASE, QUERY_BASE, USER_BASE, ClickLog, generate
from trainer.spec import load_documents

SMALL = ClickLog(num_rows=20_000, num_days=4, seed=3)
EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "clicklog.yaml"


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return pa.concat_tables([SMALL.day_table(day) for day in range(SMALL.num_days)])


def digest(table: pa.Table) -> str:
    hashes = [hashlib.sha256(column.combine_chunks().to_numpy().tobytes()) for column in table.columns]
    return hashlib.sha256(b"".join(one.digest() for one in hashes)).hexdigest()


def test_same_seed_same_rows_and_other_seed_others(table):
    again = ClickLog(num_rows=20_000, num_days=4, seed=3)
    assert digest(again.day_table(2)) == digest(SMALL.day_table(2))
    other = ClickLog(num_rows=20_000, num_days=4, seed=4).day_table(2)
    assert digest(other.select(["user"])) != digest(SMALL.day_table(2).select(["user"]))


def test_chunks_change_nothing(table, monkeypatch):
    monkeypatch.setattr("trainer.data.sources.click_log.CHUNK_ROWS", 777)
    chunked = pa.concat_tables([SMALL.day_table(day) for day in range(SMALL.num_days)])
    assert chunked.equals(table.cast(chunked.schema))


def test_ids_and_clicks_never_change_between_versions():
    """The draws are counters, pinned by the repository: a few of them by value."""
    first = SMALL.day_table(0).slice(0, 4)
    assert {name: first[name].to_pylist() for name in ("user", "item", "query", "context", "click")} == KNOWN_ROWS


KNOWN_ROWS = {
    "user": [1000063, 1000169, 1000003, 1000094],
    "item": [5000007, 5000057, 5000064, 5000007],
    "query": [10003318, 10005297, 10000981, 10002850],
    "context": [15, 17, 12, 14],
    "click": [1, 0, 0, 1],
}


def test_clicks_follow_the_true_probabilities(table):
    """Calibration in ten bins of the probability: each within 4 standard errors."""
    probability, click = table["probability"].to_numpy(), table["click"].to_numpy()
    order = np.argsort(probability)
    for bin_ in np.array_split(order, 10):
        expected = probability[bin_].mean()
        standard_error = np.sqrt((probability[bin_] * (1 - probability[bin_])).sum()) / len(bin_)
        assert abs(click[bin_].mean() - expected) < 4 * standard_error
    assert 0.2 < click.mean() < 0.8


def test_probability_is_the_published_formula(table):
    users, items = table["user"].to_numpy() - USER_BASE, table["item"].to_numpy() - ITEM_BASE
    logits = SMALL.logits(users, items, table["query"].to_numpy() - QUERY_BASE, table["context"].to_numpy())
    assert np.allclose(table["probability"].to_numpy(), 1 / (1 + np.exp(-logits)), rtol=1e-12)
    assert np.array_equal(SMALL.item_clusters[items], table["cluster"].to_numpy())


def test_users_see_and_click_what_they_like(table):
    likes = (SMALL._tastes[table["user"].to_numpy() - USER_BASE] == table["cluster"].to_numpy()[:, None]).any(axis=1)
    click = table["click"].to_numpy()
    assert likes.mean() > SMALL.targeted
    assert click[likes].mean() > click[~likes].mean() + 0.3


def test_tails_and_new_items(table):
    queries = np.unique(table["query"].to_numpy(), return_counts=True)[1]
    assert (queries <= 3).mean() > 0.5
    items = table["item"].to_numpy()
    first_day = set(items[: SMALL.num_rows // 4].tolist())
    late = set(items.tolist()) - first_day
    assert len(late) > 0
    assert {ITEM_BASE + item for item in np.flatnonzero(SMALL._birth_days > 0)} >= {
        item for item in late if SMALL._birth_days[item - ITEM_BASE] > 0
    }
    for day in range(SMALL.num_days):
        present = np.unique(SMALL.day_table(day)["item"].to_numpy()) - ITEM_BASE
        assert (SMALL._birth_days[present] <= day).all()


def test_days_are_folders_in_order(tmp_path):
    paths = generate(SMALL, tmp_path)
    assert [path.parent.name for path in paths] == [f"date=2026-01-0{day}" for day in range(1, 5)]
    assert sum(pq.read_metadata(path).num_rows for path in paths) == 20_000
    midnight = np.datetime64(FIRST_DAY, "s").astype(np.int64)
    for day, path in enumerate(paths):
        times = pq.ParquetFile(path).read(["timestamp"])["timestamp"].to_numpy()
        assert (np.diff(times) >= 0).all()
        assert times[0] >= midnight + 86_400 * day
        assert times[-1] < midnight + 86_400 * (day + 1)
    before = [path.read_bytes() for path in paths]
    generate(SMALL, tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.parent.name for path in paths]


def test_example_manifest(tmp_path):
    generate(ClickLog(num_rows=3000, num_days=3), tmp_path / "log")
    dataset, job = load_documents(EXAMPLE)
    data = prepare(dataset.model_copy(update={"uri": str(tmp_path / "log")}), job, tmp_path / "data")
    assert sum(data.num_examples.values()) == 3000
    with pytest.raises(ValueError, match="3000 rows do not fill 5000 days"):
        ClickLog(num_rows=3000, num_days=5000)
