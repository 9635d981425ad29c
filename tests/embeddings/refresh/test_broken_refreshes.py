"""A refresh that is broken is held, whatever broke it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from embeddings.refresh.publish import Gate, MovingAverage, Settings
from embeddings.store import Collection, GateHeld, Store
from embeddings.vectors.item_vectors import MISSING
from tests.embeddings.refresh.refreshes import D, N, cosines, geometry, publish, retrained, served, shuffled_ids

pytestmark = pytest.mark.slow


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
    "signs flipped per row": (signs_flipped_per_row, "cosine_low"),
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
    assert failed == {"cosine_mean", "cosine_low", "anchor_cosine"}
    assert end.metrics["knn_overlap"] > 0.5


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
