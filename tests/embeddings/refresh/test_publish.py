"""What is served after a first version, a good refresh, and one with another dimension or other ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.procrustes import procrustes
from embeddings.refresh.publish import Gate, MovingAverage, RefreshRequest, Settings, View, publish_candidate
from embeddings.store import Collection, Store, UnknownView, open_store
from embeddings.vectors.item_vectors import CARRIED, CHUNK_ROWS, FOUND, ItemVectors, unit_rows
from tests.embeddings.refresh.refreshes import D, N, basis, cosines, geometry, publish, retrained, served

pytestmark = pytest.mark.slow


# --- the first version ------------------------------------------------------------------------------------------------


def test_the_first_version_needs_no_parent(store: Store, collection: Collection) -> None:
    raw = retrained(0)
    end = publish(store, raw, counts=np.arange(N), job_id="job-1", model="bpr")
    assert (end.status, end.version, end.reasons, end.anchor_generation) == ("published", "v000001", [], 1)
    assert {check["metric"] for check in end.gate} == {"finite", "coverage", "effective_rank"}
    reader = collection.open()
    # float32 of unit vectors computed in float64.
    np.testing.assert_allclose(reader.vectors, unit_rows(raw)[0], atol=1e-7)
    np.testing.assert_allclose(reader.norms, np.linalg.norm(raw, axis=1), rtol=1e-6)
    assert reader.counts is not None
    assert reader.counts.tolist() == list(range(N))
    manifest = collection.manifest()
    assert manifest["anchor_version"] == "v000001"
    assert manifest["model"] == "bpr"
    assert manifest["job"] == "job-1"
    assert manifest["alignment"]["kind"] == "none"


def test_the_default_view_is_published_all_the_same(store: Store, collection: Collection) -> None:
    publish(store, retrained(0), Settings(views=(View("wide", dim=64, sigma=1.0, frequencies="gaussian"),)))
    views = {view["name"]: view for view in collection.manifest()["views"]}
    assert set(views) == {"items_raw", "items_rff", "wide"}
    default = views["items_rff"]
    assert (default["dim"], default["sigma"], default["frequencies"]) == (2 * D, 0.4, "orthogonal")
    assert len(default["sha256"]) == 64
    h = served(collection)
    phi = collection.view_transform("items_rff", h)
    u = collection.frequencies("items_rff").astype(np.float64)
    angles = h.astype(np.float64) @ u.T
    np.testing.assert_allclose(phi, np.hstack([np.cos(angles), np.sin(angles)]) / np.sqrt(D), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(phi, axis=1), 1, atol=1e-6)
    assert collection.view_transform("wide", h).shape == (N, 64)
    np.testing.assert_array_equal(collection.view_transform("items_raw", h), h)


def test_a_collection_goes_without_a_raw_view_whose_name_is_taken(store: Store, collection: Collection) -> None:
    publish(store, retrained(0), Settings(views=(View("songs_raw", sigma=0.9),)))
    songs = publish_candidate(store, "songs", RefreshRequest(ItemVectors(np.arange(N), retrained(1)), Settings()))
    assert songs.status == "published"
    assert [view["name"] for view in store.collection("songs").views()] == ["songs_rff"]
    assert collection.view("songs_raw")["sigma"] == 0.9


def test_views_of_the_settings_are_created_once(store: Store, collection: Collection) -> None:
    settings = Settings(views=(View("v", sigma=0.5),))
    assert publish(store, retrained(0), settings).status == "published"
    assert publish(store, retrained(1), settings).status == "published"
    assert {view["name"] for view in collection.views()} == {"items_raw", "items_rff", "v"}


# --- a good refresh ---------------------------------------------------------------------------------------------------


@given(seed=st.integers(1, 1000), reflect=st.booleans())
def test_a_change_of_basis_and_length_alone_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, reflect: bool
) -> None:
    store = open_store(tmp_path_factory.mktemp("store"))
    raw = retrained(0)
    publish(store, raw)
    before = served(store.collection("items")).copy()
    rotation = basis(seed) * (-1 if reflect else 1)
    end = publish(store, (raw @ rotation * 1.7).astype(np.float32))
    assert end.status == "published"
    assert end.metrics["cosine_p5"] > 0.999999
    np.testing.assert_allclose(served(store.collection("items")), before, atol=2e-6)


def test_the_average_against_a_plain_one(store: Store, collection: Collection) -> None:
    num_items = 2 * CHUNK_ROWS + 100
    base = geometry(0, num_items)
    publish(store, retrained(0, base=base))
    before = served(collection, np.arange(num_items)).astype(np.float64)
    # Eight items elsewhere, in the first chunk and in the last.
    base[:4], base[-4:] = geometry(9, 4), geometry(10, 4)
    raw = retrained(1, base=base)
    end = publish(store, raw, Settings(ema=MovingAverage(new_weight=0.3, reset_below_cosine=0.65)))
    assert end.status == "published"

    directions = raw.astype(np.float64) / np.linalg.norm(raw.astype(np.float64), axis=1, keepdims=True)
    u, _, vt = np.linalg.svd(directions.T @ before)
    aligned = directions @ u @ vt
    expected, num_reset = [], 0
    for old, new in zip(before, aligned, strict=True):
        if old @ new < 0.65:
            expected.append(new)
            num_reset += 1
        else:
            mixed = 0.7 * old + 0.3 * new
            expected.append(mixed / np.linalg.norm(mixed))
    after = served(collection, np.arange(num_items))
    np.testing.assert_allclose(after, expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(after.astype(np.float64), axis=1), 1, atol=1e-6)
    assert 0 < num_reset < 20
    assert collection.manifest()["alignment"]["reset"] == num_reset
    assert collection.manifest()["alignment"]["anchor_cosine_mean"] == pytest.approx(cosines(after, before).mean())


def test_new_items_come_in_aligned(store: Store, collection: Collection) -> None:
    base = geometry(0, N + 50)
    publish(store, retrained(0, base=base)[:N])
    before = served(collection).astype(np.float64)
    raw = retrained(1, noise=0.0, base=base)
    end = publish(store, raw)
    assert end.status == "published"
    rotation = procrustes(raw[:N], before)
    new = np.arange(N, N + 50)
    np.testing.assert_allclose(served(collection, new), unit_rows(raw[new])[0] @ rotation, atol=1e-6)
    assert collection.manifest()["rows"] == N + 50


def test_without_average_versions_do_not_drift(store: Store, collection: Collection) -> None:
    settings = Settings(ema=None)
    publish(store, retrained(0), settings)
    anchor = served(collection).copy()
    for day in range(1, 8):
        raw = retrained(day)
        assert publish(store, raw, settings).status == "published"
        manifest = collection.manifest()
        assert manifest["alignment"]["onto"] == "v000001"
        expected = unit_rows(raw)[0] @ procrustes(raw, anchor)
        np.testing.assert_allclose(served(collection), expected, atol=1e-6)


def test_without_average_a_thin_anchor_is_left_for_the_parent(store: Store, collection: Collection) -> None:
    """All but 50 of the anchor's items are gone by and by: too few to align 8 coordinates on."""
    settings = Settings(ema=None, gate=Gate("report"))
    base = geometry(0, 2 * N)
    publish(store, retrained(0, base=base)[:N], settings)
    publish(store, retrained(1, base=base)[50:], settings, ids=np.arange(50, 2 * N))
    end = publish(store, retrained(2, base=base)[N - 50 :], settings, ids=np.arange(N - 50, 2 * N))
    assert end.status == "published"
    alignment = collection.manifest()["alignment"]
    assert alignment["onto"] == "v000002"
    assert "50 shared items, 96 are needed" in alignment["note"]
    assert end.metrics["cosine_mean"] > 0.9


def test_a_frozen_consumer_keeps_working(store: Store, tmp_path: Path) -> None:
    """A linear probe fitted on day 0 and never again, over 10 retrains in bases of their own."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, N)
    base = geometry() * 0.7 + 2 * rng.standard_normal((4, D))[labels]

    def accuracy(weights: np.ndarray, vectors: np.ndarray) -> float:
        return float(np.mean(np.argmax(vectors @ weights, axis=1) == labels))

    unaligned = open_store(tmp_path / "unaligned")
    results: dict[str, list[float]] = {"stage": [], "unaligned": []}
    for name, where, settings in (
        ("stage", store, Settings()),
        ("unaligned", unaligned, Settings(align=False, ema=None, gate=Gate("off"))),
    ):
        for day in range(11):
            assert publish(where, retrained(day, base=base), settings).status == "published"
            vectors = served(where.collection("items"))
            if day == 0:
                weights = np.linalg.lstsq(vectors, np.eye(4)[labels], rcond=None)[0]
            results[name].append(accuracy(weights, vectors))
    assert results["stage"][0] > 0.8
    assert min(results["stage"]) > 0.95 * results["stage"][0]
    assert np.mean(results["unaligned"][1:]) < 0.5 * results["unaligned"][0]


# --- generations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "metric"), [("dim", "same_dim"), ("model", "same_model"), ("items", "shared")]
)  # fmt: skip
def test_a_silent_change_of_coordinates_is_held(store: Store, collection: Collection, change: str, metric: str) -> None:
    publish(store, retrained(0), model="bpr")
    before = collection.view("items_rff")
    vectors = retrained(1, base=geometry(0, N, 12)) if change == "dim" else retrained(1)
    model = "two_tower" if change == "model" else "bpr"
    ids = np.arange(N - 95, 2 * N - 95) if change == "items" else np.arange(N)
    end = publish(store, vectors, ids=ids, model=model)
    assert (end.status, end.anchor_generation) == ("held", 2)
    assert metric in end.reasons[0]
    assert "begins a new anchor generation" in end.reasons[0]
    assert "override_gate" in end.reasons[0]
    assert collection.current() == "v000001"
    assert collection.view("items_rff") == before

    collection.promote("v000002", "we changed the model", override_gate=True)
    manifest = collection.manifest()
    assert (manifest["anchor_generation"], manifest["anchor_version"]) == (2, "v000002")
    assert manifest["carried"] == 0
    assert collection.view("items_rff")["anchor_generation"] == 2
    assert collection.view_transform("items_rff", collection.open().vectors).shape == (N, 2 * vectors.shape[1])
    again = publish(store, retrained(2, base=geometry(0, N, vectors.shape[1])), ids=ids, model=model)
    assert (again.status, again.anchor_generation) == ("published", 2)


def test_views_that_only_the_old_generation_has(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    collection.create_view("mine", sigma=0.7)
    end = publish(store, retrained(1, base=geometry(0, N, 12)), Settings(gate=Gate("report")))
    assert (end.status, end.anchor_generation) == ("published", 2)
    assert [view["name"] for view in collection.views()] == ["items_raw", "items_rff"]
    with pytest.raises(UnknownView, match="retrain its consumers"):
        collection.view("mine")
    assert collection.view("mine", "v000001")["sigma"] == 0.7


def test_a_consumer_of_exponential_vectors_needs_neither_alignment_nor_map(
    store: Store, collection: Collection
) -> None:
    settings = Settings(
        align=False, ema=None, gate=Gate("report"), views=(View("near", kind="exponential", dim=32),)
    )  # fmt: skip
    counts = np.random.default_rng(5).permutation(N)
    # The most frequent item has no vector, so it is no anchor.
    first = {"counts": counts, "evidence": counts < N - 1}
    assert publish(store, retrained(0), settings, **first).status == "published"
    assert collection.settings("anchors")["near"]["ids"] == np.argsort(-counts)[1:33].tolist()
    labels = geometry() @ np.random.default_rng(4).standard_normal(D)
    weights = None
    wider = geometry() @ np.linalg.qr(np.random.default_rng(1).standard_normal((12, D)))[0].T
    for base in (None, None, wider):
        features = collection.view_lookup("near", np.arange(N))[1]
        if weights is None:
            weights = np.linalg.lstsq(features, labels, rcond=1e-3)[0]
        assert np.corrcoef(features @ weights, labels)[0, 1] > 0.8
        end = publish(store, retrained(1, base=base), settings, counts=counts, model="bpr" if base is None else "mf")
        assert end.status == "published"
    assert end.anchor_generation == 3
    features = collection.view_lookup("near", np.arange(N))[1]
    assert np.corrcoef(features @ weights, labels)[0, 1] > 0.8
    too_many = Settings(views=(View("all", kind="exponential", dim=N + 2),))
    held = publish(store, retrained(2, base=wider), too_many, model="mf")
    assert held.status == "held"
    assert f"{N + 2} anchors of {N} items" in held.reasons[0]


def test_a_view_that_changes_under_its_consumers_holds_the_refresh(store: Store, collection: Collection) -> None:
    publish(store, retrained(0), Settings(views=(View("v", sigma=0.5),)))
    end = publish(store, retrained(1), Settings(views=(View("v", sigma=0.9),), gate=Gate("off")))
    assert end.status == "held"
    assert "view 'v' exists with other sigma" in end.reasons[0]
    assert collection.current() == "v000001"
    # A view that the spec no longer names goes on, and so does a default view that was once given otherwise.
    assert publish(store, retrained(1)).status == "published"
    assert {view["name"] for view in collection.views()} == {"items_raw", "items_rff", "v"}


# --- string ids -------------------------------------------------------------------------------------------------------


def test_string_ids_of_growing_width(store: Store, collection: Collection) -> None:
    ids = [f"item-{number}" for number in range(N)]
    publish(store, retrained(0), ids=ids)
    before = served(collection, ids).copy()
    longer = [*ids[1:], "a-much-longer-identifier-than-before"]
    assert publish(store, retrained(1), ids=longer, counts=np.ones(N, dtype=int)).status == "held"
    raw = retrained(1)
    raw[:-1] = retrained(1)[1:]
    assert publish(store, raw, ids=longer, counts=np.ones(N, dtype=int)).status == "published"
    status, vectors = collection.open().lookup([ids[0], longer[-1], ids[7]])
    assert status.tolist() == [CARRIED, FOUND, FOUND]
    np.testing.assert_array_equal(vectors[0], before[0])
    assert cosines(vectors[2:], before[7:8])[0] > 0.95
    with pytest.raises(ValueError, match="ids of type string, the candidate has others"):
        publish(store, retrained(2))


def test_few_items_go_on_where_nothing_has_to_be_aligned(store: Store) -> None:
    """Such as brands: warm starts are in the basis already, and a rotation of so few would say nothing."""
    few = geometry(num_items=13).astype(np.float32)
    apart = Settings(align=False, ema=None, gate=Gate("enforce"))
    first, second = (publish(store, rows, apart) for rows in (few, few + 0.01))
    assert (first.status, second.status) == ("published", "published"), second.reasons
    assert second.anchor_generation == first.anchor_generation
    held = publish(store, few + 0.02, Settings(ema=None))
    assert held.status == "held"
    assert "publish.align: false" in held.reasons[0]
    other = publish(store, few, apart, ids=np.arange(100, 113))
    assert other.status == "held"
    assert "no item with a vector in both versions" in other.reasons[0]
