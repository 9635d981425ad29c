"""Limits from what the published refreshes of a collection look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.usual import EARLY, MIN_REFRESHES, NUM_REFRESHES, WIDTH, Usual, usual_metrics
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import ItemVectors
from tests.embeddings.refresh.refreshes import publish, retrained

LEAST = 0.01
"""The spread that is assumed of cosine_mean at least."""


def write(collection: Collection, metrics: dict[str, float], parent: Any = "current", **fields: Any) -> str:
    """Publish a version with these metrics onto what is served, or leave it a candidate of another ``parent``."""
    onto = collection.current() if parent == "current" else parent
    number, anchor = fields.pop("generation", 1), fields.pop("anchor", None)
    rows = ItemVectors(np.arange(4), np.eye(4, dtype=np.float32))
    version = collection.write(
        rows, parent=onto, anchor_generation=number, anchor_version=anchor, extra={"metrics": metrics, **fields}
    )
    if parent == "current":
        collection.publish(version, onto)
    return version


def usual(collection: Collection, name: str = "cosine_mean", model: str = "") -> Usual | None:
    return usual_metrics(collection, collection.current(), model).get(name)


# --- which refreshes count -------------------------------------------------------------------------------------------


def test_median_and_spread_against_plain_ones(collection: Collection) -> None:
    values = [0.91, 0.95, 0.93, 0.90, 0.99, 0.94]
    for value in values:
        write(collection, {"cosine_mean": value, "knn_overlap": 0.5, "finite": 1.0})
    found = usual(collection)
    assert found is not None
    median = sorted(values)[2] / 2 + sorted(values)[3] / 2
    spread = 1.4826 * float(np.median(np.abs(np.array(values) - median)))
    assert (found.median, found.spread, found.refreshes) == (pytest.approx(median), pytest.approx(spread), 6)
    # What only informs, and what has a fixed limit, has no usual value.
    assert set(usual_metrics(collection, collection.current(), "")) == {"cosine_mean"}


def test_no_more_than_a_fortnight_is_remembered(collection: Collection) -> None:
    for day in range(NUM_REFRESHES + 3):
        write(collection, {"cosine_mean": 0.1 if day < 3 else 0.9})
    assert usual(collection) == Usual(pytest.approx(0.9), 0.0, NUM_REFRESHES)  # type: ignore[arg-type]


def on(day: int) -> dict[str, Any]:
    """The lineage of a run on a window that ends on a day."""
    return {"lineage": {"window": {"last": f"2026-11-{day:02}", "days": 3}}}


def test_refreshes_of_one_day_count_once_with_their_worst_values(collection: Collection) -> None:
    for day in range(1, 8):
        for hour in range(8):
            metrics = {"cosine_mean": 0.9 + 0.001 * day + 0.01 * hour, "unreplaced": 0.3 if hour == 0 else 0.01}
            write(collection, metrics, **on(day))
    found = usual(collection)
    assert found is not None
    assert (found.median, found.refreshes) == (pytest.approx(0.904), 7)
    replaced = usual(collection, "unreplaced")
    assert replaced is not None
    assert (replaced.median, replaced.refreshes) == (0.3, 7)
    # A fortnight is of days, however many refreshes they have.
    for day in range(8, 20):
        write(collection, {"cosine_mean": 0.5}, **on(day))
    found = usual(collection)
    assert found is not None
    assert (found.median, found.refreshes) == (0.5, NUM_REFRESHES)


def test_rows_and_models_are_known_across_generations_until_other_rows_were_released(collection: Collection) -> None:
    metrics = {"cosine_mean": 0.9, "pairing": 0.8, "model_metric": 0.7}
    for _ in range(3):
        write(collection, metrics)
    write(collection, metrics, generation=2, released={"failed": ["unreplaced"]})
    write(collection, metrics, generation=2, anchor="v000004")
    assert [usual(collection, name).refreshes for name in metrics] == [2, 5, 5]  # type: ignore[union-attr]
    write(collection, metrics, generation=3, released={"failed": ["unreplaced", "pairing"]})
    write(collection, metrics, generation=3, anchor="v000006")
    assert [usual(collection, name).refreshes for name in metrics] == [2, 2, 2]  # type: ignore[union-attr]


def test_what_a_rollback_left_behind_and_what_was_held_do_not_count(collection: Collection) -> None:
    write(collection, {"cosine_mean": 0.9})
    write(collection, {"cosine_mean": 0.1})
    held = write(collection, {"cosine_mean": 0.2}, collection.current())
    collection.hold(held, ["it moved"])
    collection.promote("v000001", "v000002 was a mistake")
    write(collection, {"cosine_mean": 0.92})
    assert usual(collection) == Usual(pytest.approx(0.91), pytest.approx(1.4826 * 0.01), 2)  # type: ignore[arg-type]


def test_another_generation_or_model_does_not_count(collection: Collection) -> None:
    for _ in range(3):
        write(collection, {"cosine_mean": 0.5}, model="bpr")
    write(collection, {"cosine_mean": 0.8}, generation=2, model="bpr")
    write(collection, {"cosine_mean": 0.9}, generation=2, anchor="v000004", model="bpr")
    found = usual(collection, model="bpr")
    assert found is not None
    assert (found.median, found.refreshes) == (pytest.approx(0.85), 2)
    assert usual(collection, model="mf") is None
    write(collection, {"cosine_mean": 0.95}, generation=2, anchor="v000004", model="mf")
    found = usual(collection, model="mf")
    assert found is not None
    assert (found.median, found.refreshes) == (0.95, 1)


def test_versions_that_have_expired_count_and_what_cannot_be_read_ends_the_chain(collection: Collection) -> None:
    write(collection, {"cosine_mean": 0.5})
    for value in (0.7, 0.8, 0.9):
        write(collection, {"cosine_mean": value}, anchor="v000001")
    assert collection.retain(2) == ["v000002"]
    found = usual(collection)
    assert found is not None
    assert (found.median, found.refreshes) == (pytest.approx(0.75), 4)
    (manifest,) = collection.directory.glob("versions/v000002/manifest.json")
    manifest.write_text("{")
    found = usual(open_store(collection.directory.parents[1]).collection("items"))
    assert found is not None
    assert (found.median, found.refreshes) == (pytest.approx(0.85), 2)
    assert usual_metrics(collection, None, "") == usual_metrics(collection, "v000099", "") == {}


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_most", [False, True])
def test_a_limit_is_four_spreads_from_the_median_towards_the_bad_side(at_most: bool) -> None:
    sign = 1 if at_most else -1
    assert Usual(0.9, 0.02, 5).limit(LEAST, 0.0, at_most) == pytest.approx(0.9 + sign * WIDTH * 0.02)
    # Days that happen to be alike do not make the next one a fault.
    assert Usual(0.9, 0.0, 5).limit(LEAST, 0.0, at_most) == pytest.approx(0.9 + sign * WIDTH * LEAST)
    # A figure of few items is no surer than its standard error.
    assert Usual(0.9, 0.02, 5).limit(LEAST, 0.05, at_most) == pytest.approx(0.9 + sign * WIDTH * 0.05)
    early = Usual(0.9, 0.0, MIN_REFRESHES - 1).limit(LEAST, 0.0, at_most)
    assert early == pytest.approx(0.9 + sign * WIDTH * EARLY * LEAST)


@pytest.mark.parametrize("refreshes", [1, MIN_REFRESHES - 1, MIN_REFRESHES])
def test_the_starting_limit_stays_until_five_were_published(refreshes: int) -> None:
    limits = Limits(usual={"cosine_mean": Usual(0.95, 0.0, refreshes), "pairing": Usual(0.8, 0.0, refreshes)})
    known = refreshes >= MIN_REFRESHES
    assert limits.of("cosine_mean", {}) == pytest.approx(0.95 - WIDTH * LEAST if known else 0.75)
    # There is no starting limit of how users and items pair.
    assert limits.of("pairing", {}) == pytest.approx(0.8 - (1.0 if known else EARLY) * WIDTH * 0.0015)
    assert Limits().of("pairing", {}) is None


def test_a_jobs_own_limit_comes_first_and_a_fixed_one_does_not_roll() -> None:
    usual = {name: Usual(0.99, 0.0, 9) for name in ("cosine_mean", "coverage", "anchor_cosine", "canary_drop[genre]")}
    limits = Limits({"cosine_mean": 0.2}, usual)
    assert limits.of("cosine_mean", {}) == 0.2
    assert limits.of("coverage", {}) == 0.95
    assert limits.of("anchor_cosine", {}) == 0.5
    assert limits.of("canary_drop[genre]", {}) == pytest.approx(0.99 + WIDTH * 0.01)
    assert limits.of("canary_drop[year]", {}) == 0.02


def test_the_standard_error_is_that_of_the_same_metric_and_group() -> None:
    usual = {name: Usual(0.0, 0.0, 9) for name in ("canary_drop[genre]", "canary_drop[year]")}
    metrics = {"canary_drop[genre]": 0.1, "canary_drop[year]": 0.1, "canary_drop_se[genre]": 0.03}
    verdict = decide(metrics, Limits(usual=usual))
    assert {check.metric: check.threshold for check in verdict.checks} == {
        "canary_drop[genre]": pytest.approx(WIDTH * 0.03), "canary_drop[year]": pytest.approx(WIDTH * 0.01),
    }  # fmt: skip
    assert verdict.failed == ["canary_drop[year]"]
    assert verdict.checks[0].as_dict()["usual"] == {"median": 0.0, "spread": 0.0, "refreshes": 9}


def test_a_collection_whose_refreshes_hardly_move_asks_more_of_the_next_one(
    store: Store, collection: Collection
) -> None:
    for day in range(MIN_REFRESHES + 1):
        end = publish(store, retrained(day, 0.05))
        assert (end.status, end.reasons) == ("published", [])
    # Within the starting limit of .75, far from what is usual here.
    end = publish(store, retrained(50, 0.6))
    assert end.status == "held"
    (check,) = [check for check in end.gate if check["metric"] == "cosine_mean"]
    assert check["threshold"] > 0.9 > check["value"] > 0.75
    assert check["usual"]["refreshes"] == MIN_REFRESHES
    assert "cosine_mean is" in end.reasons[0]
    assert "(usually 0.99" in end.reasons[0]
    assert publish(store, retrained(7, 0.05)).status == "published"
    # One that moved more than ever is among the usual ones once somebody promotes it, and does not decide them.
    collection.promote(str(end.version), "it is right", override_gate=True)
    found = usual(collection)
    assert found is not None
    assert found.median > 0.98
