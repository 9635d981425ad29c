"""Items without evidence keep the vector that is served, for as long as is asked; retired ones leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.procrustes import procrustes
from embeddings.refresh.publish import Expiry, Gate, MovingAverage, Settings
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING, unit_rows
from tests.embeddings.refresh.refreshes import N, cosines, geometry, publish, retrained, served, shuffled_ids

pytestmark = pytest.mark.slow


# --- items without evidence -------------------------------------------------------------------------------------------


def test_an_item_absent_from_day_3_still_serves_day_3s_vector_on_day_10(store: Store, collection: Collection) -> None:
    """Its row decays to nothing while it is idle: sent as a zero row, as an untouched one, and not at all."""
    absent = {5: "zero", 6: "untouched", 7: "left out"}
    day_3 = None
    for day in range(1, 11):
        raw = retrained(day)
        evidence = np.ones(N, dtype=bool)
        ids = np.arange(N)
        if day > 3:
            raw[5] = 0.0
            evidence[6] = False
            ids = np.delete(ids, 7)
        end = publish(store, raw[ids], ids=ids, evidence=evidence[ids])
        assert end.status == "published", end.reasons
        status, vectors = collection.open().lookup([*absent, 8])
        if day == 3:
            day_3 = vectors[:3].copy()
        if day >= 3:
            np.testing.assert_array_equal(vectors[:3], day_3)
        assert status.tolist() == ([CARRIED] * 3 if day > 3 else [FOUND] * 3) + [FOUND]
        assert collection.manifest()["carried"] == (3 if day > 3 else 0)
    # When it comes back it is averaged with what was carried.
    before = vectors[0].copy()
    assert publish(store, retrained(11)).status == "published"
    status, vectors = collection.open().lookup([5])
    assert status[0] == FOUND
    assert 0.65 < cosines(vectors, before[None])[0] < 1


@pytest.mark.parametrize(
    ("expiry", "last_day"),
    [(None, 10), (Expiry(), 10), (Expiry(after_publications=4, after_days=None), 7), (Expiry(after_days=5), 8)],
)
def test_a_carried_item_expires_when_it_should(
    store: Store, collection: Collection, expiry: Expiry | None, last_day: int
) -> None:
    """Found on day 3 for the last time: carried through four publications until day 7; five days old on day 8."""
    for day in range(1, 11):
        raw = retrained(day)
        if day > 3:
            raw[5] = 0.0
        assert publish(store, raw, Settings(expire=expiry), today=20_000 + day).status == "published"
        status, vectors = collection.open().lookup([5, 6])
        if day == 3:
            day_3 = vectors[0].copy()
        manifest = collection.manifest()
        if day > last_day:
            assert status.tolist() == [MISSING, FOUND]
            assert not vectors[0].any()
            assert (manifest["rows"], manifest["carried"], manifest["missing"]) == (N - 1, 0, 1)
            assert manifest["expired"] == (1 if day == last_day + 1 else 0)
        elif day > 3:
            assert status.tolist() == [CARRIED, FOUND]
            np.testing.assert_array_equal(vectors[0], day_3)
            assert (manifest["carried"], manifest["expired"]) == (1, 0)
            assert collection.open().items().carried_for is not None
            assert collection.open().items().carried_for[5] == day - 3
    # It comes back as a new one: nothing is averaged with what it was.
    raw = retrained(11)
    publish(store, raw, Settings(expire=expiry), today=20_011)
    manifest = collection.manifest()
    assert manifest["new"] == (0 if last_day == 10 else 1)
    assert collection.open().lookup([5])[0].tolist() == [FOUND]


def test_what_a_held_version_carried_does_not_count(store: Store, collection: Collection) -> None:
    """The limit is of publications: versions that nobody was served are none."""
    expiry = Expiry(after_publications=1, after_days=None)
    publish(store, retrained(0), Settings(expire=expiry))
    thin = retrained(1)
    thin[5] = 0.0
    for _ in range(3):
        assert publish(store, shuffled_ids(thin), Settings(expire=expiry)).status == "held"
    assert publish(store, thin, Settings(expire=expiry)).status == "published"
    assert collection.open().lookup([5])[0].tolist() == [CARRIED]
    assert publish(store, thin, Settings(expire=expiry)).status == "published"
    assert collection.open().lookup([5])[0].tolist() == [MISSING]


def test_an_item_that_never_had_a_vector_is_missing(store: Store, collection: Collection) -> None:
    raw = retrained(0)
    raw[3] = 0.0
    raw[4] = 1e-20
    evidence = np.ones(N, dtype=bool)
    evidence[5] = False
    assert publish(store, raw, evidence=evidence).status == "published"
    status, vectors = collection.open().lookup([3, 4, 5, 6])
    assert status.tolist() == [MISSING] * 3 + [FOUND]
    assert not vectors[:3].any()
    assert (collection.manifest()["rows"], collection.manifest()["missing"]) == (N - 3, 3)
    again = retrained(1)
    again[3] = 0.0
    publish(store, again)
    assert collection.manifest()["missing"] == 1
    assert collection.open().lookup([3, 4])[0].tolist() == [MISSING, FOUND]


def test_carried_items_do_not_steer_the_rotation_or_the_means(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    raw = retrained(1)
    raw[:100] = geometry(77)[:100]
    evidence = np.ones(N, dtype=bool)
    evidence[:100] = False
    end = publish(store, raw, evidence=evidence)
    assert end.status == "published"
    assert end.metrics["shared"] == N - 100
    assert end.metrics["cosine_p5"] > 0.9
    # The next day the carried hundred come back, moved, and still count for nothing: the rotation is the others'.
    before = served(collection).copy()
    raw = retrained(2)
    raw[:100] *= np.where(np.arange(100) % 2, -1, 1).astype(np.float32)[:, None]
    end = publish(store, raw, Settings(ema=MovingAverage(new_weight=1.0)))
    assert end.status == "published"
    assert end.metrics["shared"] == N - 100
    expected = unit_rows(raw)[0] @ procrustes(raw[100:], before[100:])
    np.testing.assert_allclose(served(collection), expected, atol=1e-6)


def test_tiny_and_huge_rows_have_directions_too(store: Store, collection: Collection) -> None:
    raw = retrained(0).astype(np.float64)
    raw[::2] *= 1e-9
    raw[1::2] *= 1e37
    publish(store, raw.astype(np.float32))
    np.testing.assert_allclose(served(collection), unit_rows(retrained(0))[0], atol=1e-6)


@given(data=st.data(), seed=st.integers(0, 1000))
def test_whatever_comes_what_is_served_is_finite_and_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int
) -> None:
    """Three refreshes of random subsets of ids, with random rows zero, not finite, or without evidence. Two
    coordinates, so that 24 shared items are enough to go on in the same generation, as most do."""
    store = open_store(tmp_path_factory.mktemp("store"))
    collection = store.collection("items")
    rng = np.random.default_rng(seed)
    last: dict[int, np.ndarray] = {}
    for _ in range(3):
        ids = rng.permutation(300)[: data.draw(st.integers(1, 300) | st.just(200))]
        vectors = retrained(int(rng.integers(9)), base=geometry(0, 300, 2)[ids])
        spoilt = rng.random(len(ids)) < data.draw(st.sampled_from([0.2, 0.0, 0.9, 1.0]))
        vectors[spoilt] *= rng.choice([0.0, np.nan, np.inf, 1.0], (int(spoilt.sum()), 1)).astype(np.float32)
        evidence = rng.random(len(ids)) < data.draw(st.sampled_from([0.5, 1.0]))
        usable = evidence & np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        with np.errstate(invalid="ignore"):
            end = publish(store, vectors, Settings(gate=Gate("off")), ids=ids, evidence=evidence)
        if end.version is None:
            assert end.status == "held"
            assert not usable.any()
            continue
        assert end.status == "published"
        if collection.manifest()["alignment"]["kind"] == "none":
            # A new anchor generation: nothing can be carried into other coordinates.
            last = {}
        status, served_now = collection.open().lookup(np.arange(300))
        renewed = set(ids[usable].tolist())
        for item in range(300):
            if item in renewed:
                assert status[item] == FOUND
                assert abs(np.linalg.norm(served_now[item].astype(np.float64)) - 1) < 1e-6
            elif item in last:
                assert status[item] == CARRIED
                np.testing.assert_array_equal(served_now[item], last[item])
            else:
                assert status[item] == MISSING
        last = {item: served_now[item].copy() for item in range(300) if status[item] != MISSING}
        manifest = collection.manifest()
        assert (manifest["rows"], manifest["carried"]) == (len(last), len(last) - len(renewed))
        assert manifest["missing"] == len(set(ids.tolist()) - set(last))


# --- retired items ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_ids", [list, lambda numbers: np.array([f"item {n:03}" for n in numbers])])
def test_retired_items_leave_and_the_others_are_carried(store: Store, collection: Collection, as_ids: Any) -> None:
    base = geometry()
    publish(store, retrained(0, base=base), ids=as_ids(range(N)))
    # 100 items have no row any more, of which 60 are retired. So are one that has a row all the same, and a stranger.
    retired = as_ids([*range(60), 200, 9999])
    end = publish(store, retrained(1, base=base)[100:], ids=as_ids(range(100, N)), retired=retired)
    assert end.status == "published"
    statuses, _ = collection.open().lookup(as_ids(range(N)))
    assert statuses.tolist() == [MISSING] * 60 + [CARRIED] * 40 + [FOUND] * 300
    manifest = collection.manifest()
    assert (manifest["retired"], manifest["carried"], manifest["rows"]) == (60, 40, 340)
    # The gate judges what goes on: of 340 items 40 are carried.
    assert end.metrics["carried"] == pytest.approx(40 / 340)
    again = publish(store, retrained(2, base=base)[100:], ids=as_ids(range(100, N)), retired=retired)
    assert again.status == "published"
    assert collection.manifest()["retired"] == 0
