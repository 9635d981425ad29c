"""Consumers of an earlier anchor generation: maps from the new vectors back, and what is served through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.refresh import backward_maps, probe
from embeddings.refresh.model_comparison import ModelComparison, ModelDifference
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Settings, View
from embeddings.store import Collection, Store, UnknownView, vector_files
from tests.embeddings.refresh.refreshes import N, cosines, geometry, publish, retrained

WIDER, NARROWER = 12, 6
"""Dims of later models; the first has 8."""
BASE = geometry()


def columns(seed: int, dim: int) -> np.ndarray:
    """What another model makes of the same items: other numbers of coordinates, the same geometry."""
    return BASE @ np.random.default_rng(seed).standard_normal((BASE.shape[1], dim))


def change(
    store: Store, base: np.ndarray, model: str, settings: Settings | None = None, seed: int = 1, **options: Any
) -> Publication:
    """Publish vectors of another model, as an operator does who means it."""
    end = publish(store, retrained(seed, base=base), settings, model=model, **options)
    collection = store.collection("items")
    assert end.status == "held"
    assert end.version is not None
    collection.promote(end.version, "another model", override_gate=True)
    return end


def lookup(collection: Collection, view: str, version: str = "current", ids: Any = None) -> np.ndarray:
    vectors: np.ndarray = collection.view_lookup(view, np.arange(N) if ids is None else ids, version)[1]
    return vectors


def maps(collection: Collection) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = collection.manifest(collection.manifest()["anchor_version"])["maps"]
    return found


def test_a_frozen_consumer_reads_on_over_a_change_of_model(store: Store, collection: Collection) -> None:
    """A linear probe fitted in generation 1 reads a wider model, its refreshes and items that came later."""
    first = retrained(0, base=BASE)[:-40]
    publish(store, first, Settings(views=(View("wide", dim=64),)), model="bpr")
    old, rest = np.arange(N - 40), np.arange(N - 40, N)
    target = BASE @ np.random.default_rng(3).standard_normal(BASE.shape[1])

    def correlation(weights: np.ndarray, view: str, ids: np.ndarray) -> float:
        return float(np.corrcoef(lookup(collection, view, ids=ids) @ weights, target[ids])[0, 1])

    consumers = {}
    for view in ("items@g1", "items_rff@g1", "wide@g1"):
        weights = np.linalg.lstsq(lookup(collection, view, ids=old), target[old], rcond=1e-3)[0]
        consumers[view] = weights, correlation(weights, view, old)
    assert min(day0 for _, day0 in consumers.values()) > 0.85

    base = columns(1, WIDER)
    change(store, base[:-40], "two_tower")
    for day in range(3):
        published = publish(store, retrained(2 + day, base=base), model="two_tower")
        assert (published.status, published.anchor_generation) == ("published", 2), published.reasons
        for view, (weights, day0) in consumers.items():
            assert correlation(weights, view, old) > 0.95 * day0
            assert correlation(weights, view, rest) > 0.9 * day0
        raw = collection.open().lookup(old)[1][:, : BASE.shape[1]]
        cut = np.corrcoef(raw @ consumers["items@g1"][0], target[old])[0, 1]
        assert abs(cut) < 0.5 * consumers["items@g1"][1]
    assert (
        cosines(lookup(collection, "items@g1", ids=old), lookup(collection, "items@g1", "v000001", old)).mean() > 0.95
    )


def test_the_name_of_a_generation_can_be_used_from_its_first_day(store: Store, collection: Collection) -> None:
    publish(store, retrained(0), Settings(views=(View("stored", materialized=True),)))
    for view in ("items_rff", "stored"):
        np.testing.assert_array_equal(lookup(collection, f"{view}@g1"), lookup(collection, view))
    np.testing.assert_array_equal(lookup(collection, "items@g1"), collection.open().lookup(np.arange(N))[1])
    assert [view["name"] for view in collection.views()] == ["items_raw", "items_rff", "stored"]
    assert "map" not in collection.view("items@g1")
    assert store.view_collection("items_rff@g1") is collection
    assert store.view_collection("items@g1") is collection
    for unknown in ("items@g2", "other@g1", "items@g0", "items@"):
        with pytest.raises(UnknownView):
            collection.view(unknown)


def test_a_map_is_described_listed_and_exported(store: Store, collection: Collection, tmp_path: Path) -> None:
    publish(store, retrained(0, base=BASE), model="bpr")
    change(store, columns(1, WIDER), "two_tower")
    assert [view["name"] for view in collection.views()] == ["items@g1", "items_raw", "items_rff", "items_rff@g1"]
    np.testing.assert_array_equal(lookup(collection, "items_raw@g1"), lookup(collection, "items@g1"))
    (entry,) = maps(collection)
    assert entry["generation"] == 1
    assert entry["dim"] == BASE.shape[1]
    assert entry["kind"] == "ridge"
    assert entry["items"] == N
    assert entry["r2"] > 0.8
    assert entry["cosine"] > 0.9
    view = collection.view("items_rff@g1")
    assert view["map"] == {**entry, "dim_in": WIDER}
    assert (view["dim_in"], view["anchor_generation"]) == (BASE.shape[1], 1)
    # The rows of a missing item stay zero, though the map adds a constant.
    status, vectors = collection.view_lookup("items@g1", [3, 10_000])
    assert status.tolist() == [1, 0]
    assert vectors[0].any()
    assert not vectors[1].any()
    file = vector_files.export_vectors(collection, tmp_path / "old.parquet", view="items@g1")
    assert file.num_rows == N
    exported = np.array(pq.read_table(tmp_path / "old.parquet")["vector"].to_pylist())
    np.testing.assert_allclose(exported, lookup(collection, "items@g1"), atol=1e-6)
    with pytest.raises(ValueError, match="maps vectors to generation 1"):
        collection.frequencies("items_rff@g1")
    # A rollback serves the generation itself.
    collection.promote("v000001", "back")
    assert "map" not in collection.view("items_rff@g1")
    with pytest.raises(UnknownView, match="generation 1 has no map to generation 2"):
        collection.view("items@g2")


def test_a_rotation_between_equal_dims(store: Store, collection: Collection) -> None:
    publish(store, retrained(0, noise=0.4, base=BASE), model="bpr")
    change(store, BASE, "two_tower", seed=5)
    (entry,) = maps(collection)
    assert (entry["kind"], entry["penalty"]) == ("procrustes", None)
    matrix = collection.map_matrix(1)
    np.testing.assert_allclose(matrix[:-1] @ matrix[:-1].T, np.eye(BASE.shape[1]), atol=1e-12)
    np.testing.assert_array_equal(matrix[-1], 0)


@pytest.mark.parametrize("wrong", ["all", "half"])
def test_a_wrong_map_is_held(store: Store, collection: Collection, wrong: str) -> None:
    publish(store, retrained(0, base=BASE), model="bpr")
    base = columns(1, WIDER)
    if wrong == "all":
        base = np.random.default_rng(1).permutation(base)
    else:
        base[: N // 2] = np.random.default_rng(1).permutation(base[: N // 2])
    change(store, base, "two_tower")
    (entry,) = maps(collection)
    assert entry["r2"] < 0.5
    assert "of the variance of the earlier vectors, 0.5 is needed: check that ids" in entry["reasons"][0]
    assert [view["name"] for view in collection.views()] == ["items_raw", "items_rff"]
    for view in ("items@g1", "items_rff@g1"):
        with pytest.raises(UnknownView, match="is held: the map predicts"):
            collection.view_lookup(view, [1])
    assert not list(collection.directory.glob("versions/*/map-*"))


def test_a_map_that_knows_its_items_by_heart_is_held(store: Store, collection: Collection) -> None:
    """Of 400 items with 300 coordinates of chance, ridge regression explains most, but not of those it has not seen."""
    publish(store, retrained(0, base=BASE), model="bpr")
    change(store, np.random.default_rng(1).standard_normal((N, 300)), "two_tower")
    (entry,) = maps(collection)
    assert entry["r2"] < 0.05
    assert entry["reasons"]


def test_probes_of_the_earlier_generation_judge_the_map(
    store: Store, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a direction that the new model has lost no average tells."""
    monkeypatch.setattr(backward_maps, "MIN_R2", 0.0)
    publish(store, retrained(0, base=BASE), model="bpr")
    for column, name in enumerate(("lost", "kept")):
        probe.register(collection, name, np.arange(N), BASE[:, column] > 0)
    base = BASE.copy()
    base[:, 0] = np.random.default_rng(4).standard_normal(N)
    change(store, base @ np.random.default_rng(1).standard_normal((BASE.shape[1], WIDER)), "two_tower")
    (entry,) = maps(collection)
    assert entry["canaries"]["kept"]["accuracy"] > 0.9
    assert entry["canaries"]["lost"]["accuracy"] < 0.7
    assert len(entry["reasons"]) == 1
    assert "canary 'lost' has an accuracy of" in entry["reasons"][0]


def test_too_few_items_for_a_map(store: Store, collection: Collection) -> None:
    publish(store, retrained(0, base=BASE), model="bpr")
    ids = np.arange(N - 60, 2 * N - 60)
    change(store, columns(1, WIDER), "two_tower", ids=ids)
    (entry,) = maps(collection)
    assert entry["reasons"] == [
        "60 items have a vector in both generations, 100 are needed for a map: retrain the consumers"
    ]


def test_maps_compose_over_generations(store: Store, collection: Collection) -> None:
    publish(store, retrained(0, base=BASE), model="bpr")
    first = lookup(collection, "items@g1").copy()
    change(store, columns(1, WIDER), "two_tower")
    second = lookup(collection, "items@g2").copy()
    change(store, columns(2, 16), "sasrec")
    assert [(entry["generation"], entry["dim"], entry["reasons"]) for entry in maps(collection)] == [
        (2, WIDER, []), (1, BASE.shape[1], []),
    ]  # fmt: skip
    assert cosines(lookup(collection, "items@g1"), first).mean() > 0.9
    assert cosines(lookup(collection, "items@g2"), second).mean() > 0.9
    # A third change retires generation 1.
    change(store, columns(3, NARROWER), "hstu")
    assert [entry["generation"] for entry in maps(collection)] == [3, 2]
    with pytest.raises(UnknownView, match=r"no map to generation 1 \(it has: g3, g2"):
        collection.view("items@g1")


@pytest.mark.parametrize("keep", [0, 1])
def test_generations_that_are_kept(store: Store, collection: Collection, keep: int) -> None:
    settings = Settings(keep_generations=keep)
    publish(store, retrained(0, base=BASE), settings, model="bpr")
    change(store, columns(1, WIDER), "two_tower", settings)
    manifest = collection.manifest()
    assert [entry["generation"] for entry in manifest.get("maps", [])] == [1][:keep]
    change(store, columns(2, 16), "sasrec", settings)
    assert [entry["generation"] for entry in collection.manifest().get("maps", [])] == [2][:keep]


def test_a_generation_that_a_refresh_opens_by_itself_serves_the_one_before(
    store: Store, collection: Collection
) -> None:
    """It has the same coordinates, so neither that generation nor those before it need another map."""
    publish(store, retrained(0, base=BASE), model="bpr")
    change(store, columns(1, WIDER), "two_tower")
    base = columns(1, WIDER)
    base[: N // 2] = np.random.default_rng(77).standard_normal((N // 2, WIDER))
    models = ModelComparison(collection.current(), (ModelDifference("auc", "all", 1000, 0.7, 0.71, 0.0, 0.02),))
    ends = [publish(store, retrained(10 + day, base=base), model="two_tower", models=models) for day in range(3)]
    assert [end.status for end in ends] == ["held", "held", "published"], ends[-1].reasons
    assert ends[-1].released is not None
    assert [(entry["generation"], entry["kind"]) for entry in maps(collection)] == [(2, "same"), (1, "same")]
    served = collection.open().lookup(np.arange(N))[1]
    np.testing.assert_allclose(lookup(collection, "items@g2"), served, atol=1e-6)
    still = np.arange(N // 2, N)
    then = lookup(collection, "items@g1", "v000002", still)
    assert cosines(lookup(collection, "items@g1", ids=still), then).mean() > 0.9
    # The generation has views of its own, not those of its maps.
    assert [view["name"] for view in collection.views()] == [
        "items@g1", "items@g2", "items_raw", "items_rff", "items_rff@g1", "items_rff@g2",
    ]  # fmt: skip


def test_a_sample_of_many_items_is_enough(
    store: Store, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_maps, "MAX_ITEMS", 150)
    publish(store, retrained(0, base=BASE), model="bpr")
    first = lookup(collection, "items@g1").copy()
    change(store, columns(1, WIDER), "two_tower")
    assert [entry["items"] for entry in maps(collection)] == [150]
    assert cosines(lookup(collection, "items@g1"), first).mean() > 0.9
