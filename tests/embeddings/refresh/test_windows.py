"""A refresh on fewer days than the version before it has fewer items, which is no loss; lost rows still are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.refresh.gate import decide
from embeddings.refresh.gate_checks.absent_items import RECENT_PUBLICATIONS
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.gate_checks.comparison import Comparison, Shorter
from embeddings.refresh.gate_metrics import measure
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.refresh.settings import Gate
from embeddings.refresh.windows import shorter_than_before
from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, ItemVectors

D, PER_DAY = 8, 300
SAME = Shorter()
PLACES = np.random.default_rng(0).standard_normal((40 * PER_DAY, D))
"""Of every item that there ever is: PER_DAY are born on each day and have rows on it and the next, then no more."""
OF_ITEMS = {"carried", "newly_carried", "newly_carried_rise", "unreplaced", "unreplaced_traffic"}


def days(first: int, last: int, seed: int = 0, keep: float = 1.0) -> ItemVectors:
    """A training on days ``first`` to ``last``, of a share of the items."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(len(PLACES), dtype=np.int64)
    for day in range(first, last + 1):
        born = np.arange(max(0, day - 1) * PER_DAY, (day + 1) * PER_DAY)
        # A few have most of the rows, many have one or two.
        counts[born] += 1 + rng.geometric(0.5 ** (1 + born % 4), len(born))
    counts[rng.random(len(counts)) >= keep] = 0
    vectors = PLACES + 0.1 * rng.standard_normal(PLACES.shape)
    rows = np.flatnonzero(counts)
    return ItemVectors(rows, vectors[rows].astype(np.float32), counts=counts[rows])


def measured(old: ItemVectors, new: ItemVectors, shorter: Shorter = SAME) -> dict[str, float]:
    return measure(Comparison(old, new, np.ones(len(new), dtype=bool), shorter=shorter))


def shorter_by(first: int, daily: int) -> Shorter:
    """A window of ``daily`` days that ends a day after one of ``first``."""
    return Shorter((daily / first,), 1.0 + first - daily)


def failed(metrics: Metrics) -> set[str]:
    return OF_ITEMS & set(decide(metrics).failed)


@pytest.mark.parametrize(("first", "daily"), [(8, 2), (8, 1), (30, 1), (30, 7)])
def test_days_that_a_window_does_not_have_are_no_loss_and_half_of_its_items_are(first: int, daily: int) -> None:
    old, shorter = days(0, first - 1), shorter_by(first, daily)
    new = days(first + 1 - daily, first, seed=1)
    assert "unreplaced" in failed(measured(old, new))
    honest = measured(old, new, shorter)
    assert failed(honest) == set()
    assert honest["unreplaced"] < 0.05
    assert "unreplaced" in failed(measured(old, days(first + 1 - daily, first, seed=1, keep=0.4), shorter))
    if daily > 1:
        # The last days of it are missing: nothing new came.
        assert "unreplaced" in failed(measured(old, days(first + 1 - daily, first - daily // 2, seed=1), shorter))
    others = replace(new, ids=new.keys + 1_000_000)
    assert "cosine_mean" in decide(measured(old, others, shorter)).failed


def test_a_window_without_a_day_of_its_own_is_asked_for_its_share_of_the_items() -> None:
    old, shorter = days(0, 7), Shorter((0.25,), None)
    assert failed(measured(old, days(6, 7, seed=1), shorter)) == set()
    assert failed(measured(old, days(6, 7, seed=1, keep=0.2), shorter)) == {"unreplaced"}


def test_where_items_stay_a_shorter_window_lacks_few_and_what_is_lost_shows() -> None:
    def trained(rows_each: float, seed: int, keep: int = 1000) -> ItemVectors:
        counts = 1 + np.random.default_rng(seed).poisson(rows_each, keep)
        return ItemVectors(np.arange(keep), PLACES[:keep].astype(np.float32), counts=counts)

    shorter = shorter_by(8, 2)
    whole = measured(trained(80, 1), trained(20, 2), shorter)
    assert whole["newly_carried"] == whole["unreplaced"] == whole["unreplaced_traffic"] == 0.0
    # Whether the rows of the lost ones are gone too or others have them.
    for rows_each in (20, 50):
        lost = measured(trained(80, 1), trained(rows_each, 2, keep=400), shorter)
        assert lost["newly_carried"] == pytest.approx(0.6, abs=0.01)
        assert failed(lost) == {"unreplaced"}
    # A quiet day of all the items is none.
    assert failed(measured(trained(80, 1), trained(6, 2), shorter)) == set()


def test_what_a_shorter_window_is_measured_by_against_plain_figures() -> None:
    old = ItemVectors(np.arange(100), PLACES[:100].astype(np.float32), counts=np.where(np.arange(100) < 60, 1, 4))
    new = ItemVectors(np.arange(70, 110), PLACES[70:110].astype(np.float32), counts=np.full(40, 2))
    expected = 60 * 0.5 + 40 * (1 - 0.5**4)
    found = measured(old, new, Shorter((0.5,), 3.0))
    assert found["window_share"] == 0.5
    assert found["newly_carried"] == pytest.approx(1 - 30 / expected)
    assert found["unreplaced"] == pytest.approx((70 - 3 * 10) / 100)
    assert measured(old, new, Shorter((0.5,), None))["unreplaced"] == pytest.approx(1 - 40 / 50)
    assert found["newly_carried_traffic"] == pytest.approx(100 / 220)
    assert found["unreplaced_traffic"] == pytest.approx((100 - 3 * (20 + 10 * 100 / 70) / 2) / 220)
    # Without counts a share of the days has that share of the items.
    unknown = measured(replace(old, counts=None), replace(new, counts=None), Shorter((0.5,), 5.0))
    assert unknown["newly_carried"] == pytest.approx(1 - 30 / 50)
    assert unknown["unreplaced"] == pytest.approx((70 - 5 * 10) / 100)
    # An item that a tower knows of without a row is there however short the window.
    tower = replace(old, counts=np.zeros(100, dtype=np.int64))
    assert measured(tower, new, Shorter((0.5,), 3.0))["newly_carried"] == pytest.approx(0.7)
    # The same days, or more of them.
    same = measured(old, new)
    assert same == measured(old, new, Shorter((1.0,), 1.0))
    assert "window_share" not in same
    assert (same["newly_carried"], same["unreplaced"]) == pytest.approx((0.7, 0.6))


def test_what_a_version_of_more_days_has_found_does_not_make_the_next_ones_old() -> None:
    ids, ages = np.arange(1000), np.repeat([0, 1, 2], [100, 400, 500])
    statuses = np.where(ages == 0, FOUND, CARRIED)
    old = ItemVectors(ids, PLACES[:1000].astype(np.float32), statuses=statuses, carried_for=ages)
    new = ItemVectors(ids[:50], PLACES[:50].astype(np.float32))
    assert measured(old, new)["carried"] == pytest.approx(950 / 1000)
    weighed = 50 + 400 + 0.1 * 500
    assert measured(old, new, Shorter((1.0, 1.0, 0.1)))["carried"] == pytest.approx(weighed / (50 + weighed))
    assert measured(old, new, Shorter((1.0,)))["carried"] == pytest.approx(950 / 1000)


# --- through the stage -----------------------------------------------------------------------------------------------


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return open_store(tmp_path).collection("items")


def lineage(last: int, num_days: int | None) -> dict[str, Any]:
    window = None if num_days is None else {"last": f"2026-01-{1 + last:02}", "days": num_days}
    return {"window": window, "drift": None}


def refreshed(root: Path, items: ItemVectors, last: int, num_days: int | None, mode: Any = "enforce") -> Publication:
    store = open_store(root)
    parent = store.collection("items").current()
    return publish_candidate(
        store,
        "items",
        RefreshRequest(items, Settings(gate=Gate(mode)), parent_version=parent, lineage=lineage(last, num_days)),
    )


def test_refreshes_on_two_days_of_a_version_on_eight_are_published(tmp_path: Path) -> None:
    refreshed(tmp_path, days(0, 7), 7, 8)
    ends = [refreshed(tmp_path, days(last - 1, last, seed=last), last, 2) for last in range(8, 16)]
    assert [end.reasons for end in ends] == [[]] * 8
    assert ends[0].metrics["window_share"] == 0.25
    assert not any("window_share" in end.metrics for end in ends[1:])
    assert max(end.metrics["unreplaced"] for end in ends) < 0.1


def test_a_shorter_window_that_no_job_has_told_is_held_and_what_to_do_is_said(tmp_path: Path) -> None:
    refreshed(tmp_path, days(0, 7), 7, None)
    end = refreshed(tmp_path, days(7, 8, seed=1), 8, 2)
    assert (end.status, failed(end.metrics)) == ("held", {"unreplaced"})
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == "items"
    assert "dataset.window" in end.diagnosis["advice"]


def test_windows_are_compared_with_those_before_as_far_as_items_are_recent(
    tmp_path: Path, collection: Collection
) -> None:
    def shorter(parent: str | None, last: int, num_days: int | None) -> Shorter:
        return shorter_than_before(collection, parent, lineage(last, num_days))

    for number, (last, num_days) in enumerate([(7, 30), (8, None), (9, 4), (10, 1), (11, 2)]):
        refreshed(tmp_path, days(0, 7, seed=number), last, num_days, "report")
    assert shorter("v000005", 12, 2) == Shorter((1.0, 1.0, 0.5, 1.0, 2 / 30))
    # One new day, all new ones, none and some that are before it: what is left out is spread over the new ones.
    assert shorter("v000001", 8, 3) == Shorter((0.1,), 28.0)
    assert shorter("v000001", 8 + 3, 3) == shorter("v000001", 29, 3) == Shorter((0.1,), 10.0)
    assert shorter("v000001", 7, 3) == shorter("v000001", 5, 3) == Shorter((0.1,), None)
    assert shorter("v000001", 8, None) == shorter("v000099", 8, 2) == shorter(None, 8, 2) == Shorter()
    assert shorter("v000002", 9, 2) == Shorter((1.0, 2 / 30))
    assert shorter_than_before(collection, "v000001", None) == Shorter()
    # What a held version was trained on counts for the run that goes on from it.
    goes_on = lineage(9, 1) | {"start_version": "v000003"}
    assert shorter_than_before(collection, "v000001", goes_on) == Shorter((4 / 30,), 1 + 26 / 2)
    for number in range(RECENT_PUBLICATIONS):
        refreshed(tmp_path, days(0, 7, seed=number), 12 + number, 2, "report")
    assert shorter(collection.current(), 30, 2) == Shorter((1.0,) * RECENT_PUBLICATIONS)
