"""The refresh stage: what is served after good, broken, stale, thin and foreign refreshes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.procrustes import procrustes
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Expiry, Gate, MovingAverage, Settings, View, publish_candidate
from embeddings.store import Collection, GateHeld, Store, UnknownView, open_store
from embeddings.vectors.item_vectors import CARRIED, CHUNK_ROWS, FOUND, MISSING, ItemVectors, unit_rows

pytestmark = pytest.mark.slow

N, D = 400, 8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def collection(store: Store) -> Collection:
    return store.collection("items")


def geometry(seed: int = 0, num_items: int = N, dim: int = D) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_items, dim))


def basis(seed: int, dim: int = D) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]


def retrained(seed: int, noise: float = 0.15, base: np.ndarray | None = None) -> np.ndarray:
    """A refresh: the same geometry, a little noise, rows of other lengths, a basis of its own."""
    base = geometry() if base is None else base
    rng = np.random.default_rng(1000 + seed)
    moved = base + noise * rng.standard_normal(base.shape)
    return (moved * rng.uniform(0.2, 5, (len(base), 1)) @ basis(seed, base.shape[1])).astype(np.float32)


def publish(
    store: Store, vectors: np.ndarray, settings: Any = None, ids: Any = None, *, parent: Any = "current", **options: Any
) -> Publication:
    columns = {name: options.pop(name) for name in ("evidence", "counts", "norms") if name in options}
    candidate = ItemVectors(np.arange(len(vectors)) if ids is None else ids, vectors, **columns)
    parent = store.collection("items").current() if parent == "current" else parent
    return publish_candidate(store, "items", candidate, settings or Settings(), parent_version=parent, **options)


def served(collection: Collection, ids: Any = None) -> np.ndarray:
    vectors: np.ndarray = collection.open().lookup(np.arange(N) if ids is None else ids)[1]
    return vectors


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.asarray(np.sum(unit_rows(left)[0] * unit_rows(right)[0], axis=1))


# --- the first version -----------------------------------------------------------------------------------------------


def test_the_first_version_needs_no_parent(store: Store, collection: Collection) -> None:
    raw = retrained(0)
    end = publish(store, raw, counts=np.arange(N), job_id="job-1", model="bpr")
    assert (end.status, end.version, end.reasons, end.anchor_generation) == ("published", "v000001", [], 1)
    assert {check["metric"] for check in end.gate} == {"finite", "coverage", "missing", "effective_rank"}
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
    assert set(views) == {"items_rff", "wide"}
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


def test_settings_of_a_job_spec_are_taken_as_they_are(store: Store, collection: Collection) -> None:
    from trainer.spec import Publish

    spec = Publish.model_validate({"collection": "items", "feature": "item", "views": [{"name": "v", "sigma": 0.5}]})
    assert publish(store, retrained(0), spec).status == "published"
    assert publish(store, retrained(1), spec).status == "published"
    assert {view["name"] for view in collection.views()} == {"items_rff", "v"}


# --- a good refresh --------------------------------------------------------------------------------------------------


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


# --- items without evidence ------------------------------------------------------------------------------------------


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


# --- broken refreshes ------------------------------------------------------------------------------------------------


def shuffled_ids(raw: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).permutation(raw)


def constant(raw: np.ndarray) -> np.ndarray:
    return np.ones_like(raw)


def nan_rows(raw: np.ndarray) -> np.ndarray:
    raw[::50] = np.nan
    return raw


def truncated(raw: np.ndarray) -> np.ndarray:
    return raw[: N * 3 // 10]


def signs_flipped_per_row(raw: np.ndarray) -> np.ndarray:
    return raw * np.where(np.random.default_rng(2).random((len(raw), 1)) < 0.5, -1, 1).astype(np.float32)


def another_collections(raw: np.ndarray) -> np.ndarray:
    return retrained(3, base=geometry(99))


def untrained(raw: np.ndarray) -> np.ndarray:
    return raw + 3 * np.abs(raw).mean() * geometry(5).astype(np.float32)


def zeros(raw: np.ndarray) -> np.ndarray:
    raw[: N // 2] = 0.0
    return raw


BROKEN: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "shuffled ids": (shuffled_ids, "cosine_mean"),
    "constant vectors": (constant, "effective_rank"),
    "NaN rows": (nan_rows, "finite"),
    "truncated": (truncated, "unreplaced"),
    "signs flipped per row": (signs_flipped_per_row, "cosine_p5"),
    "another collection's": (another_collections, "cosine_mean"),
    "untrained": (untrained, "cosine_mean"),
    "half zero": (zeros, "coverage"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_refresh_is_held(store: Store, collection: Collection, fault: str) -> None:
    publish(store, retrained(0))
    before = served(collection).copy()
    broken, metric = BROKEN[fault]
    end = publish(store, broken(retrained(1)))
    assert end.status == "held"
    assert any(metric in reason for reason in end.reasons), end.reasons
    assert collection.current() == "v000001"
    np.testing.assert_array_equal(served(collection), before)
    manifest = collection.manifest(str(end.version))
    assert manifest["state"] == "held"
    assert manifest["reasons"] == end.reasons
    assert metric in {check["metric"] for check in manifest["gate"] if check["verdict"] == "fail"}
    with pytest.raises(GateHeld):
        collection.promote(str(end.version), "by mistake")
    # What is kept of it is finite even so, and the next good refresh is published.
    assert np.isfinite(collection.open(str(end.version)).vectors).all()
    assert publish(store, retrained(2)).status == "published"


def test_a_skipped_alignment_is_held_and_the_cosines_show_it(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    end = publish(store, retrained(1), Settings(align=False))
    assert end.status == "held"
    failed = {check["metric"] for check in end.gate if check["verdict"] == "fail"}
    assert {"cosine_mean", "cosine_p5", "cosine_low"} <= failed
    assert not {"knn_overlap", "kernel_rms"} & failed


def test_a_sign_flip_of_all_is_only_another_basis(store: Store, collection: Collection) -> None:
    raw = retrained(0)
    publish(store, raw)
    before = served(collection).copy()
    assert publish(store, -raw, Settings(align=False)).status == "held"
    assert publish(store, -raw).status == "published"
    np.testing.assert_allclose(served(collection), before, atol=2e-6)


def test_the_gate_stands_before_the_average(store: Store, collection: Collection) -> None:
    """With a small new weight even noise passes for yesterday's vectors once it is averaged."""
    publish(store, retrained(0))
    before = served(collection).copy()
    settings = Settings(ema=MovingAverage(new_weight=0.05, reset_below_cosine=-1.0))
    end = publish(store, retrained(1, base=geometry(99)), settings)
    assert cosines(collection.open(str(end.version)).vectors, before).mean() > 0.95
    assert end.status == "held"


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("mode", ["report", "off"])
def test_without_enforcement_nothing_that_is_not_finite_is_served(
    store: Store, collection: Collection, fault: str, mode: Any
) -> None:
    publish(store, retrained(0))
    broken, metric = BROKEN[fault]
    end = publish(store, broken(retrained(1)), Settings(gate=Gate(mode)))
    assert end.status == "published"
    assert collection.current() == end.version
    status, vectors = collection.open().lookup(np.arange(N))
    assert (status != MISSING).all()
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=1e-6)
    if mode == "report":
        assert any(metric in reason for reason in end.reasons)
    else:
        assert (end.reasons, end.gate, end.metrics) == ([], [], {})


@pytest.mark.parametrize("fault", ["constant vectors", "NaN rows", "half zero"])
def test_a_broken_first_version_is_held(store: Store, collection: Collection, fault: str) -> None:
    broken, metric = BROKEN[fault]
    end = publish(store, broken(retrained(0)))
    assert end.status == "held"
    assert any(metric in reason for reason in end.reasons)
    assert collection.current() is None


def test_nothing_at_all_to_publish(store: Store, collection: Collection) -> None:
    end = publish(store, np.full((N, D), np.nan, dtype=np.float32))
    assert (end.status, end.version) == ("held", None)
    assert "no item has a vector" in end.reasons[0]
    assert not collection.exists()
    publish(store, retrained(0))
    assert publish(store, np.zeros((N, D), dtype=np.float32)).status == "held"
    assert collection.current() == "v000001"


def test_a_held_version_can_be_promoted_and_goes_on(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    held = publish(store, retrained(1, base=geometry(99)))
    collection.promote(str(held.version), "the catalogue was replaced", override_gate=True)
    assert publish(store, retrained(2, base=geometry(99))).status == "published"


# --- stale and repeated runs -----------------------------------------------------------------------------------------


def test_an_overtaken_run_is_held(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    publish(store, retrained(1))
    end = publish(store, retrained(2), parent="v000001")
    assert end.status == "held"
    assert "version v000002 of 'items' is current, not v000001" in end.reasons[0]
    assert collection.current() == "v000002"
    assert publish(store, retrained(2), parent=None).status == "held"
    assert publish(store, retrained(3), parent="v000099").reasons[0].startswith("parent version v000099 cannot be read")


def test_a_rollback_between_start_and_publication_makes_a_run_stale(store: Store, collection: Collection) -> None:
    """The run was aligned onto v000002, which is not served any more when it ends."""
    publish(store, retrained(0))
    publish(store, retrained(1))
    started_from = collection.current()
    collection.promote("v000001", "v000002 was a mistake")
    end = publish(store, retrained(2), parent=started_from)
    assert end.status == "held"
    assert "version v000001 of 'items' is current, not v000002" in end.reasons[0]
    assert collection.current() == "v000001"
    # One that starts after the rollback rests on what was rolled back to.
    after = publish(store, retrained(3))
    assert after.status == "published"
    manifest = collection.manifest()
    assert (manifest["parent"], manifest["alignment"]["onto"]) == ("v000001", "v000001")


def test_a_rollback_that_was_taken_back_does_not_matter(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    publish(store, retrained(1))
    collection.promote("v000001", "v000002 was a mistake")
    collection.promote("v000002", "it was not")
    assert publish(store, retrained(2), parent="v000002").status == "published"
    assert collection.manifest()["parent"] == "v000002"


def test_after_a_rollback_without_average_the_anchor_stays(store: Store, collection: Collection) -> None:
    settings = Settings(ema=None)
    for day in range(3):
        publish(store, retrained(day), settings)
    anchor = collection.open("v000001").vectors.copy()
    collection.promote("v000002", "back")
    raw = retrained(3)
    end = publish(store, raw, settings)
    assert (end.status, collection.manifest()["parent"]) == ("published", "v000002")
    assert collection.manifest()["alignment"]["onto"] == "v000001"
    np.testing.assert_allclose(served(collection), unit_rows(raw)[0] @ procrustes(raw, anchor), atol=1e-6)
    assert end.anchor_cosine == pytest.approx(cosines(served(collection), anchor).mean())


def test_a_run_that_is_given_up_while_it_publishes_does_not_switch(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))

    class GivenUp(Exception):
        pass

    def fence() -> None:
        assert collection.manifest("v000002")["state"] == "candidate"
        raise GivenUp

    with pytest.raises(GivenUp):
        publish(store, retrained(1), job_id="a", fence=fence)
    assert collection.current() == "v000001"
    # The attempt that goes on brings it to its end.
    end = publish(store, retrained(1), job_id="a", fence=lambda: None)
    assert (end.status, end.version) == ("published", "v000002")


def test_a_job_publishes_once(store: Store, collection: Collection) -> None:
    first = publish(store, retrained(0), job_id="a", parent=None)
    assert publish(store, retrained(0), job_id="a", parent=None) == first
    second = publish(store, retrained(1), job_id="b", parent="v000001")
    assert publish(store, retrained(1), job_id="b", parent="v000001").version == second.version == "v000002"
    held = publish(store, shuffled_ids(retrained(1)), job_id="c")
    assert publish(store, shuffled_ids(retrained(1)), job_id="c") == held
    # What was held is no end for a job that has been told since not to mind the gate.
    told = publish(store, shuffled_ids(retrained(1)), Settings(gate=Gate("report")), job_id="c")
    assert (told.version, told.status) == ("v000004", "published")
    # Another parent is another publication.
    assert publish(store, retrained(2), job_id="a").version == "v000005"


def test_old_versions_expire(store: Store, collection: Collection) -> None:
    for day in range(5):
        publish(store, retrained(day), keep_last=2)
    assert [m["state"] for m in collection.versions()] == [
        "superseded", "expired", "expired", "superseded", "published",
    ]  # fmt: skip


# --- generations -----------------------------------------------------------------------------------------------------


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
    assert [view["name"] for view in collection.views()] == ["items_rff"]
    with pytest.raises(UnknownView, match="retrain its consumers"):
        collection.view("mine")
    assert collection.view("mine", "v000001")["sigma"] == 0.7


def test_a_view_that_changes_under_its_consumers_holds_the_refresh(store: Store, collection: Collection) -> None:
    publish(store, retrained(0), Settings(views=(View("v", sigma=0.5),)))
    end = publish(store, retrained(1), Settings(views=(View("v", sigma=0.9),), gate=Gate("off")))
    assert end.status == "held"
    assert "view 'v' exists with other sigma" in end.reasons[0]
    assert collection.current() == "v000001"
    # A view that the spec no longer names goes on, and so does a default view that was once given otherwise.
    assert publish(store, retrained(1)).status == "published"
    assert {view["name"] for view in collection.views()} == {"items_rff", "v"}


# --- string ids ------------------------------------------------------------------------------------------------------


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


# --- retired items ---------------------------------------------------------------------------------------------------


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
    (carried,) = [check["value"] for check in end.gate if check["metric"] == "carried"]
    assert carried == pytest.approx(40 / 340)
    again = publish(store, retrained(2, base=base)[100:], ids=as_ids(range(100, N)), retired=retired)
    assert again.status == "published"
    assert collection.manifest()["retired"] == 0
