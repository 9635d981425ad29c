"""Frozen canary tasks: fitted once, read by every candidate, gated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from embeddings.refresh import probe
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_checks.frozen_probes import FrozenProbes
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, RefreshRequest, Settings, publish_candidate
from embeddings.store import Collection, Store, UnknownCollection, open_store
from embeddings.vectors.item_vectors import ItemVectors

N, D, C = 900, 8, 3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def collection(store: Store) -> Collection:
    publish(store, vectors(1))
    return store.collection("items")


def labels() -> np.ndarray:
    return np.random.default_rng(7).integers(0, C, N)


def vectors(seed: int, noise: float = 0.05) -> np.ndarray:
    """Three clusters that overlap, the same items in each every day."""
    centres = 2.0 * np.random.default_rng(5).standard_normal((C, D))
    fixed = np.random.default_rng(6).standard_normal((N, D))
    moved = centres[labels()] + fixed + noise * np.random.default_rng(seed).standard_normal((N, D))
    return moved.astype(np.float32)


def publish(store: Store, rows: np.ndarray, mode: str = "enforce", **columns: object) -> Publication:
    candidate = ItemVectors(np.arange(N), rows, **columns)  # type: ignore[arg-type]
    parent = store.collection("items").current()
    settings = Settings(ema=None, gate=Gate(mode))  # type: ignore[arg-type]
    return publish_candidate(store, "items", RefreshRequest(candidate, settings, parent_version=parent))


def registered(collection: Collection) -> dict[str, object]:
    return probe.register(collection, "cluster", np.arange(N), [f"c{label}" for label in labels()])


def test_the_fit_is_that_of_a_library() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((400, 5))
    classes = (features @ rng.standard_normal((5, 4)) + rng.gumbel(size=(400, 4))).argmax(axis=1)
    ours = probe.fit(features, classes, 4, l2=0.01, num_steps=5000)
    # sklearn minimises the sum of losses + |W|^2 / (2C).
    peer = LogisticRegression(C=1 / (0.01 * 400), tol=1e-9, max_iter=5000).fit(features, classes)
    # Both stop short of the optimum, by gradients of about 1e-6.
    np.testing.assert_allclose(ours[:-1], peer.coef_.T, atol=1e-3)
    centred = ours[-1] - ours[-1].mean()
    np.testing.assert_allclose(centred, peer.intercept_ - peer.intercept_.mean(), atol=1e-3)


def test_a_canary_is_right_on_items_it_has_not_seen(collection: Collection) -> None:
    document = registered(collection)
    assert document["accuracy"] > 0.8 > document["majority"]  # type: ignore[operator]
    kept = open_store(collection.directory.parents[1]).collection("items").settings("canary")["cluster"]
    assert kept == json.loads(json.dumps(document))
    codes = probe.predict(kept, collection.open().vectors)
    held_out = np.array(kept["held_out"], dtype=bool)
    assert np.mean(codes[held_out] == labels()[held_out]) == pytest.approx(document["accuracy"], abs=1e-3)
    assert "weights" not in probe.summary(kept)
    assert probe.summary(kept)["num_items"] == N


def test_an_honest_refresh_passes_and_its_figures_are_in_the_manifest(store: Store, collection: Collection) -> None:
    document = registered(collection)
    end = publish(store, vectors(2))
    assert end.status == "published"
    assert end.metrics["canary_accuracy[cluster]"] == pytest.approx(document["accuracy"], abs=0.02)
    assert end.metrics["canary_churn[cluster]"] < 0.05
    assert collection.manifest()["canaries"] == ["cluster"]
    limits = {check["metric"]: check["threshold"] for check in end.gate}
    assert limits["canary_drop[cluster]"] == 0.02
    drop = document["accuracy"] - end.metrics["canary_accuracy[cluster]"]  # type: ignore[operator]
    assert end.metrics["canary_drop[cluster]"] == pytest.approx(drop)


def test_metrics_against_plain_ones(store: Store, collection: Collection) -> None:
    document = registered(collection)
    evidence = np.ones(N, dtype=bool)
    evidence[::7] = False
    previous = ItemVectors(np.arange(N), vectors(1))
    candidate = ItemVectors(np.arange(N), vectors(3, noise=1.5), evidence=evidence)
    metrics = FrozenProbes.measure(Comparison(previous, candidate, evidence, probes={"cluster": document}))
    before = probe.predict(document, previous.vectors)
    after = probe.predict(document, candidate.vectors)
    judged = evidence & np.array(document["held_out"], dtype=bool)
    assert metrics["canary_accuracy[cluster]"] == pytest.approx((after == labels())[judged].mean())
    churn = (after != before)[evidence].mean()
    assert metrics["canary_churn[cluster]"] == pytest.approx(churn)
    assert metrics["canary_drop_se[cluster]"] == pytest.approx(np.sqrt(churn * (1 - churn) / judged.sum()))


def test_a_canary_sees_what_the_cosines_do_not(store: Store, collection: Collection) -> None:
    """Every item pushed a little across the nearest border: cosines stay high, the consumer breaks."""
    document = registered(collection)
    weights = probe._unpacked(document["weights"]).reshape(D, C)  # type: ignore[arg-type]
    rows = collection.open().vectors.astype(np.float64)
    scores = rows @ weights + probe._unpacked(document["intercept"])  # type: ignore[arg-type]
    order = np.argsort(-scores, axis=1)
    towards = weights[:, order[:, 1]].T - weights[:, order[:, 0]].T
    gap = scores[np.arange(N), order[:, 0]] - scores[np.arange(N), order[:, 1]]
    push = (1.3 * gap / np.sum(towards**2, axis=1))[:, None] * towards
    near = np.linalg.norm(push, axis=1) < 0.6
    end = publish(store, (rows + np.where(near[:, None], push, 0)).astype(np.float32))
    assert end.status == "held"
    failed = {check["metric"] for check in end.gate if check["verdict"] == "fail"}
    assert failed == {"canary_drop[cluster]"}
    assert "frozen like yours" in " ".join(end.reasons)


def test_a_canary_reads_its_own_anchor_generation_only(store: Store, collection: Collection) -> None:
    registered(collection)
    wide = np.random.default_rng(0).standard_normal((N, 2 * D)).astype(np.float32)
    end = publish(store, wide, "report")
    assert end.anchor_generation == 2
    assert not any(name.startswith("canary") for name in end.metrics)
    assert not any(name.startswith("canary") for name in publish(store, wide).metrics)


def test_a_canary_none_of_whose_items_are_left_is_held(store: Store, collection: Collection) -> None:
    probe.register(collection, "few", np.arange(150), (np.arange(150) % 2).tolist())
    evidence = np.ones(N, dtype=bool)
    evidence[:150] = False
    end = publish(store, vectors(2), evidence=evidence)
    assert end.status == "held"
    assert any("canary_drop[few] cannot be measured" in reason for reason in end.reasons)


def test_what_cannot_be_registered(store: Store, collection: Collection) -> None:
    def register(ids: object, values: object, name: str = "bad") -> None:
        probe.register(collection, name, ids, values)

    with pytest.raises(ValueError, match=r"0 of 200 labelled items have a vector in v000001, 100 are needed"):
        register(np.arange(5000, 5200), [1] * 200)
    with pytest.raises(ValueError, match="1 classes"):
        register(np.arange(N), ["same"] * N)
    with pytest.raises(ValueError, match="900 classes"):
        register(np.arange(N), np.arange(N).tolist())
    with pytest.raises(ValueError, match="an id occurs more than once"):
        register(np.zeros(N, dtype=int), labels().tolist())
    with pytest.raises(ValueError, match="900 ids and labels of shape"):
        register(np.arange(N), [1])
    with pytest.raises(ValueError, match="canary name 'A b'"):
        register(np.arange(N), labels().tolist(), "A b")
    with pytest.raises(UnknownCollection):
        probe.register(store.collection("nothing"), "bad", np.arange(N), labels().tolist())
    assert collection.settings("canary") == {}
    # Labels that are not known are left out.
    probe.register(collection, "some", np.arange(N), [None if i % 2 else i % 4 for i in range(N)])
    assert probe.summary(collection.settings("canary")["some"])["num_items"] == N // 2


def test_a_copy_reads_another_collection(store: Store, collection: Collection) -> None:
    registered(collection)
    rows = ItemVectors(np.arange(N), vectors(9))
    publish_candidate(store, "others", RefreshRequest(rows, Settings()))
    assert probe.copy_to(collection, store.collection("others")) == ["cluster"]
    end = publish_candidate(
        store, "others", RefreshRequest(ItemVectors(np.arange(N), vectors(10)), Settings(), parent_version="v000001")
    )
    assert end.metrics["canary_accuracy[cluster]"] > 0.8


def test_erased_ids_leave_canaries_too(store: Store, collection: Collection) -> None:
    before = registered(collection)
    ids = before["ids"]
    assert isinstance(ids, list)
    gone = ids[3:7]
    collection.erase([*gone, 10**9], "they asked")
    after = store.collection("items").settings(probe.SETTINGS)["cluster"]
    kept = [i for i, id_ in enumerate(ids) if id_ not in gone]
    for part in ("ids", "codes", "held_out"):
        assert after[part] == [before[part][i] for i in kept]  # type: ignore[index]
    assert after["weights"] == before["weights"]


def test_a_canary_without_items_holds_nothing(store: Store, collection: Collection) -> None:
    probe.register(collection, "cluster", np.arange(120), [f"c{label}" for label in labels()[:120]])
    collection.erase(np.arange(120), "they asked")
    end = publish(store, vectors(2))
    assert end.status == "published", end.reasons
    assert not [metric for metric in end.metrics if metric.startswith("canary")]


def test_ids_erased_while_a_canary_is_fitted_are_not_in_it(
    collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = probe.fit

    def fit_and_erase(*arguments: object) -> np.ndarray:
        collection.erase([0, 1, 2], "they asked")
        return fitted(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "fit", fit_and_erase)
    registered(collection)
    kept = collection.settings(probe.SETTINGS)["cluster"]["ids"]
    assert len(kept) == N - 3
    assert not {0, 1, 2} & set(kept)
