"""The study of the news log on a small planted one: who is covered by what, and what a frozen consumer still knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import news_days
from benchmarks.gate import Rows
from benchmarks.news_days import MS_PER_DAY, Log, Often, auc, fit, study, tables
from embeddings.vectors.item_vectors import CARRIED, FOUND, ItemVectors

NUM_DAYS, BORN, CLICKS, USERS = 6, 120, 4000, 300


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Two kinds of users, who click on articles of their kind; an article is born within its day and lives for two."""
    rng = np.random.default_rng(0)
    parts = []
    for day in range(NUM_DAYS):
        moment = np.sort(rng.random(CLICKS))
        born = (rng.random(CLICKS) * BORN * np.where(rng.random(CLICKS) < 0.5, moment, 1 + moment)).astype(np.int64)
        item = (day + 1) * BORN - born - 1 + (moment * BORN).astype(np.int64)
        user = rng.integers(0, USERS // 2, CLICKS) * 2 + (item + (rng.random(CLICKS) < 0.03)) % 2
        parts.append((user, item, ((day + moment) * MS_PER_DAY).astype(np.int64), np.full(CLICKS, day)))
    user, item, time, day = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"user": user, "item": item, "time": time, "day": day, "other": day, "click_kind": user % 2}


def test_versions_within_the_day_know_the_clicks_until_then(rows: Rows, tmp_path: Path) -> None:
    log = Log(rows)
    known = Often(log.rows, tmp_path).window(3.25)
    assert set(known["day"]) == {1, 2, 3}
    assert known["time"].max() < 3.25 * MS_PER_DAY <= rows["time"][rows["time"] > known["time"].max()].min()
    assert Often(log.rows, tmp_path).window(3)["time"].max() == rows["time"][rows["day"] == 3].max()


def test_answers_are_those_of_the_clicks(rows: Rows) -> None:
    log = Log(rows)
    asked = log.clicks >= news_days.MIN_CLICKS
    few, carried = np.flatnonzero(asked)[[7, 9]]
    counts = np.full(len(log.ids), 5)
    counts[few] = 4
    statuses = np.full(len(log.ids), FOUND, dtype=np.uint8)
    statuses[carried] = CARRIED
    items = ItemVectors(log.ids, np.eye(len(log.ids), dtype=np.float32), counts=counts, statuses=statuses)
    asked[[few, carried]] = False
    vectors, label, fitted_on = log.task(items, 2, 0)
    np.testing.assert_array_equal(vectors.argmax(1), np.flatnonzero(asked))
    # Articles of the more frequent kind of users are above the median, but for those by which one kind has more.
    kinds = log.ids[asked] % 2
    assert abs(label[kinds == 0].mean() - label[kinds == 1].mean()) > 0.8
    assert 0.4 < fitted_on.mean() < 0.6
    vectors, label, _ = log.task(items, 2, None)
    popular = log.ids[vectors.argmax(1)[label]]
    clicks = [(rows["item"][rows["day"] == 3] == item).sum() for item in log.ids]
    assert set(popular) <= set(log.ids[np.argsort(clicks)[-len(popular) - 20 :]])
    assert log.covered(items.keys, 2, 3).all()
    assert log.clicked_before.sum() == len(rows["item"]) - len(log.ids)


def test_a_consumer_is_judged_on_the_other_half() -> None:
    rng = np.random.default_rng(0)
    vectors, label = rng.standard_normal((400, 4)), rng.random(400) < 0.5
    half = rng.random(400) < 0.5
    # The other half's vectors say the contrary.
    vectors[:, 0] += np.where(half, 4, -4) * label
    assert auc(fit(vectors, label, half), vectors, label, half) < 0.05
    vectors[~half, 0] += 8 * label[~half]
    assert auc(fit(vectors, label, half), vectors, label, half) > 0.95
    assert np.isnan(auc(fit(vectors, label, half), vectors, np.ones(400), half))
    assert fit(vectors, np.ones(400), half) is None


@pytest.mark.slow
def test_the_study_tells_the_ways_apart(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ("daily", "often", "retrained")
    monkeypatch.setattr(news_days, "WAYS", {way: news_days.WAYS[way] for way in ways})
    monkeypatch.setattr(news_days, "OFTEN", ("often",))
    monkeypatch.setattr(news_days, "COVERAGES", ("retrained", "daily", "often"))
    lines = list(study(Log(rows), tmp_path, 0, 2))
    assert [line["day"] for line in lines] == [4, 5, 6]
    for line in lines:
        often, daily, old = (line[f"coverage, {name}"] for name in ("often", "daily", "daily, a day old"))
        assert line["coverage, clicked before"] > often > daily + 0.05
        assert line["coverage, retrained"] <= daily + 0.01
        assert line["audience, daily, frozen"] > 0.9
        assert line["audience, retrained, refitted"] > 0.9
    assert old < daily - 0.1
    assert lines[-1]["published, daily"] == lines[-1]["refreshes, daily"] == 2
    assert lines[-1]["refreshes, often"] == 5
    text = tables(lines)
    assert "| 4 to 6 |" not in text
    assert "| 5 to 6 |" in text
    assert text.count("\n| retrained |") == 1
