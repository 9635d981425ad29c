"""Rows that are unlike those of the days before: each figure that a broken window changes is held."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from embeddings.refresh.gate_checks.row_figures import RowFigures
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, RefreshRequest, Settings, publish_candidate
from embeddings.refresh.usual import EARLY, WIDTH
from embeddings.store import Store
from embeddings.vectors.item_vectors import ItemVectors
from tests.embeddings.refresh.gate_checks.test_registry import comparison

N, D = 400, 8
USUAL = {
    "rows": 10_000.0, "users": 2_000.0, "largest_user": 0.02, "pairing": 0.8, "pairing_newest": 0.75, "popularity": 0.6,
}  # fmt: skip


def refresh(store: Store, seed: int, gate: Gate | None = None, **figures: Any) -> Publication:
    """A refresh whose vectors are no reason to hold it, on rows like those of other days but for ``figures``."""
    vectors = np.random.default_rng(0).standard_normal((N, D))
    vectors += 0.1 * np.random.default_rng(1 + seed).standard_normal((N, D))
    return publish_candidate(
        store,
        "items",
        RefreshRequest(
            ItemVectors(np.arange(N), vectors.astype(np.float32)),
            Settings(gate=gate or Gate()),
            parent_version=store.collection("items").current(),
            lineage={"row_figures": USUAL | figures},
        ),
    )


def failed(end: Publication) -> list[str]:
    return [check["metric"] for check in end.gate if check["verdict"] == "fail"]


def test_figures_are_those_of_the_lineage_and_what_is_unknown_is_left_out() -> None:
    assert RowFigures.measure(comparison()) == {
        "log_rows": pytest.approx(math.log(1000)), "log_users": pytest.approx(math.log(100)),
        "largest_user": 0.1, "pairing": 0.8, "pairing_newest": 0.7, "popularity": 0.6,
    }  # fmt: skip
    store_figures: dict[str, float | None] = {"rows": 0.0, "largest_user": None, "pairing": None}
    unknown = comparison()
    object.__setattr__(unknown, "row_figures", store_figures)
    assert RowFigures.measure(unknown) == {}


@pytest.mark.parametrize(
    ("metric", "honest", "broken", "far"),
    [
        ("log_rows", {"rows": 3_000.0}, {"rows": 2_000.0}, {"rows": 200.0}),
        ("largest_user", {"largest_user": 0.2}, {"largest_user": 0.25}, {"largest_user": 0.55}),
        ("log_users", {"users": 600.0}, {"users": 400.0}, {"users": 40.0}),
        ("pairing", {"pairing": 0.79}, {"pairing": 0.78}, {"pairing": 0.76}),
        ("pairing_newest", {"pairing_newest": 0.725}, {"pairing_newest": 0.715}, {"pairing_newest": 0.67}),
        ("popularity", {"popularity": 0.45}, {"popularity": 0.35}, {"popularity": 0.05}),
    ],
)
def test_one_day_is_enough_to_tell_broken_rows_and_more_rows_are_no_fault(
    store: Store, metric: str, honest: dict[str, float], broken: dict[str, float], far: dict[str, float]
) -> None:
    """Rows that are a little beyond the limit may be the world's; the next refresh goes on from them."""
    refresh(store, 0)
    for seed, (figures, cause, sound) in enumerate([(broken, "data", True), (far, "rows", False)]):
        end = refresh(store, 10 + seed, Gate("enforce"), **figures)
        assert (end.status, failed(end)) == ("held", [metric])
        assert end.diagnosis is not None
        assert end.diagnosis["cause"] == cause
        assert store.collection("items").versions()[-1]["sound"] == sound
    assert refresh(store, 2, **honest).status == "published"
    better = {"rows": 1e6, "users": 1e5, "largest_user": 0.0001, "pairing": 0.99, "popularity": 0.99}
    assert refresh(store, 3, **better).status == "published"


def test_limits_are_tighter_once_the_collection_is_known(store: Store) -> None:
    for seed in range(6):
        end = refresh(store, seed)
        limits = {check["metric"]: check["threshold"] for check in end.gate}
        if seed:
            width = (EARLY if seed < 5 else 1.0) * WIDTH * 0.0015
            assert limits["pairing"] == pytest.approx(0.8 - width)
    end = refresh(store, 9, pairing=0.78)
    assert failed(end) == ["pairing"]
    (reason,) = end.reasons
    assert reason.startswith("pairing is 0.78, below 0.794 (usually 0.8): users and items of the rows belong together")


def test_a_first_version_has_nothing_to_compare_its_rows_with(store: Store) -> None:
    end = refresh(store, 0, pairing=0.5)
    assert end.status == "published"
    assert end.metrics["pairing"] == 0.5
    assert "pairing" not in {check["metric"] for check in end.gate}
