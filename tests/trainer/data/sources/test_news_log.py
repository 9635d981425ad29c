"""The news-like log: deterministic, with the churn that it promises, and drawn as its truth says."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.prepare.preparation import prepare
from trainer.data.sources.news_log import ITEM_BASE, TRUTH, USER_BASE, NewsLog, generate_news
from trainer.spec import parse_dataset, parse_job

LOG = NewsLog(num_rows=60_000, num_days=6, seed=3)


@pytest.fixture(scope="module")
def days() -> list[pa.Table]:
    return [LOG.day_table(day) for day in range(LOG.num_days)]


def digest(table: pa.Table) -> str:
    columns = (column.combine_chunks().to_numpy().tobytes() for column in table.columns)
    return hashlib.sha256(b"".join(columns)).hexdigest()


def test_same_seed_same_rows_in_any_order_of_days_and_other_seed_others(days):
    assert digest(NewsLog(num_rows=60_000, num_days=6, seed=3).day_table(4)) == digest(days[4])
    assert digest(NewsLog(num_rows=60_000, num_days=6, seed=4).day_table(4)) != digest(days[4])


def test_chunks_change_nothing(days, monkeypatch):
    monkeypatch.setattr("trainer.data.sources.click_log.CHUNK_ROWS", 777)
    assert digest(LOG.day_table(1).combine_chunks()) == digest(days[1])


def test_most_items_are_new_each_day_and_half_of_a_days_have_one_click(days):
    seen = set(days[0]["item"].to_pylist())
    for before, today in itertools.pairwise(days):
        items, counts = np.unique(today["item"].to_numpy(), return_counts=True)
        assert 0.5 < (counts == 1).mean() < 0.65
        assert 0.5 < np.mean([item not in seen for item in items.tolist()]) < 0.75
        assert 0.6 < 1 - np.isin(np.unique(before["item"].to_numpy()), items).mean() < 0.85
        seen |= set(items.tolist())
    alive = LOG.last_days - LOG.first_days + 1
    assert alive.mean() == pytest.approx(LOG.lifetime_days, rel=0.05)


def test_rows_lie_within_their_items_lives_and_their_days(days):
    for day, table in enumerate(days):
        items = table["item"].to_numpy() - ITEM_BASE
        assert ((LOG.first_days[items] <= day) & (day <= LOG.last_days[items])).all()
        seconds = table["timestamp"].to_numpy()
        assert (np.diff(seconds) >= 0).all()
        assert (seconds // 86_400 == seconds[0] // 86_400).all()


def test_clicks_follow_the_true_vectors(days):
    """P(item | user) = sum_t P(t | user) P(item | t): topics, and items of a topic, are clicked as often as that."""
    table, interests = days[2], LOG.interests(2)
    users, topics = table["user"].to_numpy() - USER_BASE, table["topic"].to_numpy()
    expected = interests[users].sum(axis=0)
    found = np.bincount(topics, minlength=LOG.num_topics)
    assert np.abs(found - expected).max() < 5 * np.sqrt(expected.max())
    shares = LOG.item_vectors[table["item"].to_numpy() - ITEM_BASE]
    # An item is drawn for a topic as often as its vector has of it, weighted by the clicks of the topics.
    assert shares[np.arange(len(topics)), topics].min() > 0
    assert (shares.argmax(axis=1) == topics).mean() == pytest.approx(LOG.main_share, abs=0.05)


def test_interests_move_slowly_and_news_moves_all_of_them():
    first, second, last = (LOG.interests(day) for day in (0, 1, 5))
    np.testing.assert_allclose(first.sum(axis=1), 1)

    def stay(before, after):
        return float((before.argmax(axis=1) == after.argmax(axis=1)).mean())

    assert stay(first, second) > 0.6 > stay(first, last)
    still = NewsLog(num_rows=60_000, num_days=6, seed=3, interest_memory=1.0, news_memory=1.0)
    np.testing.assert_array_equal(still.interests(0), still.interests(5))


def test_the_truth_lies_beside_and_readers_of_the_log_pass_over_it(tmp_path):
    log = NewsLog(num_rows=3_000, num_days=2, seed=1)
    paths = generate_news(log, tmp_path / "log")
    again = generate_news(log, tmp_path / "log")
    assert [pq.read_table(path) for path in again] == [log.day_table(day) for day in range(2)]
    assert again == paths
    items = pq.read_table(tmp_path / "log" / TRUTH / "items.parquet")
    assert items.num_rows == log.num_items
    np.testing.assert_array_equal(np.stack(items["vector"].to_numpy()), log.item_vectors)
    users = pq.read_table(tmp_path / "log" / TRUTH / "users" / "date=2026-01-02" / "part-00000.parquet")
    np.testing.assert_array_equal(np.stack(users["vector"].to_numpy()), log.interests(1))
    dataset = parse_dataset({"name": "news", "uri": str(tmp_path / "log"), "partition": "date",
                             "features": {"user": {"type": "id"}, "item": {"type": "id"}},
                             "label": {"column": "click"}})  # fmt: skip
    model = {"kind": "bpr", "loss": "bpr", "embedding_dim": 4}
    job = parse_job({"name": "news", "dataset": {"name": "news"}, "model": model,
                     "evaluation": {"split": {"kind": "random", "validation": 0.0, "test": 0.0}}})  # fmt: skip
    data = prepare(dataset, job, tmp_path / "prepared")
    clicked = np.concatenate([pq.read_table(path)["item"].to_numpy() for path in paths])
    np.testing.assert_array_equal(np.sort(data.vocabulary("item").to_numpy()), np.unique(clicked))


@pytest.mark.parametrize(("settings", "said"), [({"num_rows": 2, "num_days": 3}, "2 rows do not fill 3 days"),
                                                ({"lifetime_days": 0.5}, "lifetime_days is 0.5")])  # fmt: skip
def test_logs_that_cannot_be(settings, said):
    with pytest.raises(ValueError, match=said):
        NewsLog(**settings)


def test_a_life_of_one_day():
    log = NewsLog(num_rows=3_000, num_days=3, lifetime_days=1.0)
    assert (log.last_days == log.first_days).all()
    assert not np.isin(log.day_table(1)["item"].to_numpy(), log.day_table(0)["item"].to_numpy()).any()
