"""How much an item was trained on decides what it counts for: in the gate, and in the rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT, Comparison
from embeddings.refresh.gate_metrics import measure
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.refresh.settings import Evidence, Gate
from embeddings.store import Store, open_store
from embeddings.vectors.item_vectors import STATUS_NAMES, ItemVectors, unit_rows

N, D, TAIL = 900, 16, 700


def geometry(seed: int = 0, num_items: int = N) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_items, D)).astype(np.float32)


COUNTS = np.where(np.arange(N) < TAIL, 1, 50)
"""The first items have one row of training each."""


def day(seed: int, first: int = 0, tail_noise: float = 10.0, noise: float = 0.1) -> ItemVectors:
    """A training: the items' places, all but lost in noise for those of one row."""
    rng = np.random.default_rng(100 + seed)
    scale = np.where(COUNTS == 1, tail_noise, noise)[:, None]
    vectors = geometry() + scale * rng.standard_normal((N, D))
    return ItemVectors(np.arange(first, first + N), vectors.astype(np.float32), counts=COUNTS)


def metrics(previous: ItemVectors, candidate: ItemVectors, min_count: int = 5, **parts: object) -> dict[str, float]:
    return measure(Comparison(previous, candidate, np.ones(N, dtype=bool), min_count=min_count, **parts))  # type: ignore[arg-type]


def test_what_is_measured_of_evident_items_against_plain_figures() -> None:
    old, new = day(0), day(1)
    measured = metrics(old, new)
    cosines = np.sum(unit_rows(old.vectors)[0] * unit_rows(new.vectors)[0], axis=1)
    assert measured["evident"] == N - TAIL
    assert measured["shared"] == N
    assert measured["cosine_mean"] == pytest.approx(cosines[TAIL:].mean())
    assert measured["cosine_p5"] == pytest.approx(np.percentile(cosines[TAIL:], 5))
    assert measured["cosine_low"] == (cosines[TAIL:] < 0.65).mean()
    assert measured["cosine_mean_all"] == pytest.approx(cosines.mean())
    assert measured["cosine_low_all"] == pytest.approx((cosines < 0.65).mean())
    # The neighbours of the evident ones alone are as if there were no others.
    alone = np.arange(TAIL, N)
    of_these = [ItemVectors(alone, items.vectors[TAIL:], counts=COUNTS[TAIL:]) for items in (old, new)]
    expected = measure(Comparison(*of_these, np.ones(len(alone), dtype=bool), min_count=5))
    assert measured["knn_overlap"] == expected["knn_overlap"]
    assert "knn_overlap_all" not in expected
    assert measured["knn_overlap_all"] < 0.5 < measured["knn_overlap"]
    assert decide(measured).passed
    assert {"cosine_mean", "cosine_low"} <= set(decide(metrics(old, new, min_count=0)).failed)


def test_either_version_may_be_the_one_that_knows_little() -> None:
    some = ItemVectors(np.arange(N), geometry(), counts=np.where(np.arange(N) < 100, 3, 50))
    measured = metrics(some, day(1))
    assert measured["evident"] == N - TAIL
    measured = metrics(day(1), some)
    assert measured["evident"] == N - TAIL
    # An item that neither of two versions without counts knows of is as good as any other.
    assert "evident" not in metrics(ItemVectors(np.arange(N), geometry()), ItemVectors(np.arange(N), geometry()))


@pytest.mark.parametrize(("num_evident", "all_of_them"), [(MIN_EVIDENT, False), (MIN_EVIDENT - 1, True)])
def test_a_few_evident_items_say_nothing_of_the_others(num_evident: int, all_of_them: bool) -> None:
    counts = np.where(np.arange(N) < num_evident, 50, 1)
    old, new = (ItemVectors(np.arange(N), geometry(seed), counts=counts) for seed in (0, 1))
    measured = metrics(old, new)
    assert ("evident" not in measured) == all_of_them


def test_a_fault_of_evident_items_is_held_however_many_others_there_are() -> None:
    new = day(1)
    vectors = np.array(new.vectors)
    vectors[TAIL:] = np.random.default_rng(5).permutation(vectors[TAIL:])
    assert not decide(metrics(day(0), ItemVectors(np.arange(N), vectors, counts=COUNTS))).passed


# --- what is gone ----------------------------------------------------------------------------------------------------


def test_items_that_others_have_replaced_are_no_loss_and_those_that_nobody_has_are() -> None:
    def lost(old: range, new: range, **parts: object) -> dict[str, float]:
        def version(ids: range) -> ItemVectors:
            return ItemVectors(np.array(ids), geometry(0, len(ids)), counts=np.full(len(ids), 10))

        candidate = version(new)
        live = np.ones(len(candidate), dtype=bool)
        return measure(Comparison(version(old), candidate, live, **parts))  # type: ignore[arg-type]

    churn = lost(range(1000), range(750, 1750))
    assert churn["newly_carried"] == churn["newly_carried_traffic"] == 0.75
    assert (churn["unreplaced"], churn["unreplaced_traffic"]) == (0.0, 0.0)
    assert "unreplaced" not in decide(churn).failed
    truncated = lost(range(1000), range(750, 1000))
    assert truncated["unreplaced"] == truncated["unreplaced_traffic"] == 0.75
    assert "unreplaced" in decide(truncated).failed
    half_replaced = lost(range(1000), range(750, 1250))
    assert half_replaced["unreplaced"] == pytest.approx(0.5)
    # Ids that have changed are replaced, too: more than were ever before are gone.
    usual = lost(range(1000), range(750, 1750), metrics_before={"newly_carried": 0.7})
    assert usual["newly_carried_rise"] == pytest.approx(0.05)
    sudden = lost(range(1000), range(750, 1750), metrics_before={"newly_carried": 0.1})
    own = Limits(own={"newly_carried_rise": 0.5, "newly_carried": 0.95})
    assert not {*own.own} & {*decide(usual, own).failed}
    assert {*own.own} & {*decide(sudden, own).failed} == {"newly_carried_rise"}
    replaced = lost(range(1000), range(960, 1960))
    assert {*own.own} & {*decide(replaced, own).failed} == {"newly_carried"}


def test_items_that_nobody_has_found_for_a_week_do_not_make_a_version_old() -> None:
    ids = np.arange(1000)
    statuses = np.where(ids < 100, 1, 2)
    carried_for = np.where(ids < 100, 0, np.where(ids < 200, 6, 7))
    previous = ItemVectors(ids, geometry(0, 1000), statuses=statuses, carried_for=carried_for)
    candidate = ItemVectors(ids[:100], geometry(0, 100))
    measured = measure(Comparison(previous, candidate, np.ones(100, dtype=bool)))
    assert measured["carried"] == pytest.approx(100 / 200)
    assert measured["carried_all"] == pytest.approx(0.9)
    unknown = ItemVectors(ids, geometry(0, 1000), statuses=statuses)
    assert measure(Comparison(unknown, candidate, np.ones(100, dtype=bool)))["carried"] == pytest.approx(0.9)


# --- through the stage ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def publish(store: Store, items: ItemVectors, settings: Settings | None = None, **options: Any) -> Publication:
    parent = store.collection("items").current()
    settings = settings or Settings()
    return publish_candidate(
        store, "items", RefreshRequest(items, settings, parent_version=parent, model="bpr", **options)
    )


def test_an_honest_refresh_of_rarely_clicked_items_is_published(store: Store) -> None:
    publish(store, day(0))
    assert publish(store, day(1)).status == "published"
    everything = Settings(evidence=Evidence(min_count=0))
    held = publish(store, day(2), everything)
    assert held.status == "held"
    assert "cosine_mean" in held.reasons[0]


def test_drift_is_held_until_somebody_promotes_it_and_is_counted_from_there(store: Store) -> None:
    """Steps that each refresh may take, all in one direction."""
    collection = store.collection("items")
    aim = geometry(7)

    def step(part: float, noise_seed: int) -> ItemVectors:
        noise = 0.05 * np.random.default_rng(noise_seed).standard_normal((N, D))
        vectors = np.cos(part) * geometry() + np.sin(part) * aim + noise
        return ItemVectors(np.arange(N), vectors.astype(np.float32), counts=np.full(N, 50))

    settings = Settings(ema=None, align=False)
    assert publish(store, step(0.0, 0), settings).status == "published"
    parts = np.arange(1, 12) * 0.15
    end = None
    for number, part in enumerate(parts):
        end = publish(store, step(float(part), number + 1), settings)
        if end.status == "held":
            break
    assert end is not None
    failed = [check for check in end.gate if check["verdict"] == "fail"]
    assert [check["metric"] for check in failed] == ["anchor_cosine"]
    first = store.collection("items").open("v000001").vectors
    drifted = np.sum(unit_rows(first)[0] * unit_rows(step(float(part), number + 1).vectors)[0], axis=1)
    assert failed[0]["value"] == pytest.approx(drifted.mean(), abs=1e-6)
    assert "retrain the consumers" in end.reasons[0]
    assert end.version is not None
    assert collection.manifest(end.version)["drift_from"] == "v000001"
    collection.promote(end.version, "the consumers are trained anew", override_gate=True)
    for later in (1, 2):
        following = publish(store, step(float(part) + 0.15 * later, 50 + later), settings, keep_last=1)
        assert following.status == "published", following.reasons
        assert following.version is not None
        assert collection.manifest(following.version)["drift_from"] == end.version
    # Retention leaves it, as it leaves the first of the generation.
    assert collection.manifest(end.version)["state"] == "superseded"
    assert following.metrics["anchor_cosine"] > 0.9


# --- what is served ---------------------------------------------------------------------------------------------------


MARKED = Settings(evidence=Evidence(mark_uncertain=True), gate=Gate("report"), ema=None)


def statuses(store: Store, ids: object) -> list[str]:
    return [STATUS_NAMES[status] for status in store.collection("items").open().lookup(np.array(ids))[0]]


def test_items_of_few_rows_are_uncertain_until_a_version_knows_them_better(store: Store) -> None:
    def version(counts: dict[int, int]) -> ItemVectors:
        """Items 0 to 399 of 50 rows each, but for some; those of 0 rows are not in it."""
        all_counts = np.full(400, 50)
        all_counts[list(counts)] = list(counts.values())
        ids = np.flatnonzero(all_counts)
        return ItemVectors(ids, geometry()[ids], counts=all_counts[ids])

    publish(store, version({0: 1, 1: 4, 2: 5}), MARKED)
    assert statuses(store, [0, 1, 2, 3, 999]) == ["uncertain", "uncertain", "found", "found", "missing"]
    manifest = store.collection("items").manifest()
    assert (manifest["uncertain"], manifest["carried"]) == (2, 0)
    # Known better before: two rows more tell no less. Not seen: as it was. Of few rows again, and of enough at last.
    publish(store, version({0: 0, 1: 9, 2: 1, 3: 0}), MARKED)
    assert statuses(store, [0, 1, 2, 3]) == ["uncertain", "found", "found", "carried"]
    assert store.collection("items").manifest()["carried"] == 2
    reader = store.collection("items").open()
    assert reader.items().renewed[[0, 1, 2, 3]].tolist() == [False, True, True, False]
    publish(store, version({0: 2, 3: 1}), MARKED)
    assert statuses(store, [0, 3]) == ["uncertain", "found"]


def test_uncertain_items_count_in_the_gate_as_found_ones_do_where_nothing_else_is_asked(tmp_path: Path) -> None:
    ends = []
    for name, mark in (("plain", False), ("marked", True)):
        own = open_store(tmp_path / name)
        settings = Settings(evidence=Evidence(mark_uncertain=mark), gate=Gate("report"))
        publish(own, day(0), settings)
        ends.append(publish(own, day(1), settings))
        ends[-1] = (ends[-1].metrics, own.collection("items").open().vectors.copy())
    assert ends[0][0] == ends[1][0]
    np.testing.assert_array_equal(ends[0][1], ends[1][1])
