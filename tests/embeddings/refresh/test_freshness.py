"""Never updating would be stable too: what is served follows the data, and honest refreshes are published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embeddings.refresh import probe
from embeddings.refresh.procrustes import procrustes, rotate
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, MovingAverage, RefreshRequest, Settings, publish_candidate
from embeddings.store import Store, open_store
from embeddings.vectors.item_vectors import ItemVectors, unit_rows

# Refreshes by the hundred.
pytestmark = pytest.mark.slow

N, D, CLUSTERS = 800, 16, 8
MOVED = 16


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def cluster_of(item: np.ndarray) -> np.ndarray:
    return item % CLUSTERS


def truth(moved: bool = False) -> np.ndarray:
    """Where items belong: near their cluster's centre. ``moved``: the first ones now belong to the next cluster."""
    rng = np.random.default_rng(0)
    centres, own = 1.2 * rng.standard_normal((CLUSTERS, D)), 0.6 * rng.standard_normal((N, D))
    cluster = cluster_of(np.arange(N))
    if moved:
        cluster[:MOVED] = (cluster[:MOVED] + 1) % CLUSTERS
    return centres[cluster] + own


def trained(seed: int, places: np.ndarray, noise: float = 0.15) -> np.ndarray:
    """A training's result: the places, its own noise, a basis and lengths of its own."""
    rng = np.random.default_rng(100 + seed)
    basis = np.linalg.qr(rng.standard_normal((D, D)))[0]
    return ((places + noise * rng.standard_normal((N, D))) @ basis).astype(np.float32)


def publish(store: Store, vectors: np.ndarray, settings: Settings | None = None, name: str = "items") -> Publication:
    parent = store.collection(name).current()
    items = ItemVectors(np.arange(N), vectors, counts=np.full(N, 50))
    return publish_candidate(
        store, name, RefreshRequest(items, settings or Settings(), parent_version=parent, model="bpr")
    )


def cosines_to(served: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Of served vectors [N, d] to the places, in the served coordinates, which the unmoved items fix."""
    rotation = procrustes(places[MOVED:].astype(np.float32), served[MOVED:])
    turned = rotate(places.astype(np.float32), rotation)
    return np.sum(unit_rows(served)[0] * unit_rows(turned)[0], axis=1)


def days_until_there(store: Store, settings: Settings, num_days: int = 8) -> int:
    """Refreshes until every moved item has cosine .9 to its new place; more than ``num_days`` where it never has."""
    publish(store, trained(0, truth()))
    places = truth(moved=True)
    for day in range(1, num_days + 1):
        assert publish(store, trained(day, places), settings).status == "published"
        if (cosines_to(store.collection("items").open().vectors, places)[:MOVED] >= 0.9).all():
            return day
    return num_days + 1


def test_items_that_move_to_another_cluster_are_there_within_five_refreshes(store: Store) -> None:
    old, new = unit_rows(truth())[0], unit_rows(truth(moved=True))[0]
    distances = np.sum(old * new, axis=1)[:MOVED]
    # Some far, which take their new vector at once, some nearer, which are averaged there.
    assert distances.min() < 0.2
    assert days_until_there(store, Settings()) <= 5


@pytest.mark.parametrize("cosine", [0.66, 0.8])
def test_items_that_move_too_little_for_a_reset_are_there_too(store: Store, cosine: float) -> None:
    before = unit_rows(truth())[0]
    aside = np.random.default_rng(3).standard_normal((N, D))
    aside = unit_rows(aside - np.sum(aside * before, axis=1, keepdims=True) * before)[0]
    after = before.copy()
    after[:MOVED] = cosine * before[:MOVED] + np.sqrt(1 - cosine**2) * aside[:MOVED]
    publish(store, trained(0, before, 0.0))
    for day in range(1, 6):
        end = publish(store, trained(day, after, 0.0))
        assert end.status == "published"
    reached = cosines_to(store.collection("items").open().vectors, after)[:MOVED]
    assert reached.min() >= 0.9


def test_an_average_that_hardly_moves_would_not_get_there(store: Store) -> None:
    """The same measurement sees a setting that is too slow."""
    assert days_until_there(store, Settings(ema=MovingAverage(0.05, reset_below_cosine=-1.0))) > 5


def test_a_consumer_of_published_vectors_is_as_good_as_one_of_raw_ones(store: Store) -> None:
    drift = np.random.default_rng(8).standard_normal((9, N, D))
    places, labels = truth(), cluster_of(np.arange(N))
    publish(store, trained(0, places))
    raw = np.empty(0)
    for day in range(1, 10):
        places = places + 0.05 * drift[day - 1]
        raw = trained(day, places, noise=1.2)
        publish(store, raw, Settings(gate=Gate("report")))
    held_out = np.random.default_rng(1).random(N) < 0.3

    def accuracy(vectors: np.ndarray) -> float:
        features = unit_rows(vectors)[0]
        weights = probe.fit(features[~held_out], labels[~held_out], CLUSTERS)
        scores = features[held_out] @ weights[:-1] + weights[-1]
        return float((scores.argmax(axis=1) == labels[held_out]).mean())

    on_raw = accuracy(raw)
    assert 0.5 < on_raw < 1.0
    assert accuracy(store.collection("items").open().vectors) >= 0.98 * on_raw


def test_honest_refreshes_are_published(store: Store) -> None:
    """Nine days that go on drifting one way, so that the average lags behind, read by a canary."""
    direction = np.random.default_rng(8).standard_normal((N, D))

    def refresh(day: int) -> Publication:
        return publish(store, trained(40 + day, truth() + 0.04 * day * direction))

    refresh(0)
    probe.register(store.collection("items"), "cluster", np.arange(N), cluster_of(np.arange(N)).tolist())
    ends = [refresh(day) for day in range(1, 10)]
    assert [end.status for end in ends] == ["published"] * 9
    # And it holds a table whose rows are somebody else's.
    broken = trained(60, truth() + 0.4 * direction)
    broken[:80] = broken[np.random.default_rng(0).permutation(80)]
    assert publish(store, broken).status == "held"
