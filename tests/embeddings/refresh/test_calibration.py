"""Limits from null refreshes, and where they are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embeddings.refresh.calibration import calibrate, calibrated, calibrated_by_halves, calibration_of
from embeddings.refresh.gate import Thresholds, decide
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, Settings, publish_candidate
from embeddings.store import Store, UnknownVersion, open_store
from embeddings.vectors.item_vectors import ItemVectors

N, D = 600, 8

NULL = {
    "dim": 32.0, "cosine_mean": 0.96, "cosine_p5": 0.9, "cosine_low": 0.001, "cosine_mean[0-9]": 0.8,
    "cosine_low[0-9]": 0.1, "knn_overlap": 0.6, "kernel_rms": 0.2, "effective_rank": 20.0, "unreplaced": 0.01,
    "coverage": 1.0, "norm_shift": 1.1, "norm_moved": 0.0, "canary_drop[genre]": 0.01, "canary_churn[genre]": 0.05,
    "rows": 1000.0,
}  # fmt: skip


def test_limits_follow_the_worst_null() -> None:
    worse = {**NULL, "cosine_mean": 0.94, "kernel_rms": 0.25, "canary_churn[genre]": 0.1, "effective_rank": 15.0}
    found = calibrated([NULL, NULL, worse])
    expected = {
        "cosine_mean": 0.92, "cosine_p5": 0.85, "cosine_low": 0.006, "cosine_mean[0-9]": 0.75, "cosine_low[0-9]": 0.13,
        "knn_overlap": 0.54, "kernel_rms": 0.31, "effective_rank": 12.0, "unreplaced": 0.06, "coverage": 0.98,
        "norm_shift": 1.32, "norm_moved": 0.005, "canary_drop[genre]": 0.03, "canary_churn[genre]": 0.14,
    }  # fmt: skip
    assert found.limits == pytest.approx(expected)
    assert found.nulls["cosine_mean"] == pytest.approx(
        {"mean": 2.86 / 3, "spread": np.std([0.96, 0.96, 0.94], ddof=1), "worst": 0.94}
    )
    assert (found.num_nulls, found.dim, found.unstable) == (3, 32, [])
    for null in (NULL, worse):
        assert decide(null, found.thresholds()).passed
    assert decide({**NULL, "cosine_low": 0.01}, found.thresholds()).failed == ["cosine_low"]
    assert decide({**NULL, "canary_churn[genre]": 0.15}, found.thresholds()).failed == ["canary_churn[genre]"]


def test_a_canary_of_few_items_is_given_what_chance_alone_does_to_so_few() -> None:
    def of(churn: float, items: float) -> dict[str, float]:
        return {**NULL, "canary_churn[genre]": churn, "canary_items[genre]": items, "canary_judged[genre]": items / 5}

    few = calibrated([of(churn, 150.0) for churn in (0.0, 0.0133, 0.02)])
    error = (0.02 * 0.98 / 150) ** 0.5
    assert few.limits["canary_churn[genre]"] == pytest.approx(1.3 * 0.02 + 2 * error)
    assert few.limits["canary_drop[genre]"] == pytest.approx(0.01 + 2 * (0.02 * 0.98 / 30) ** 0.5)
    assert decide(of(0.04, 150.0), few.thresholds()).passed  # six items, where the worst null has three
    assert decide(of(0.08, 150.0), few.thresholds()).failed == ["canary_churn[genre]"]
    many = calibrated([of(churn, 15_000.0) for churn in (0.0, 0.0133, 0.02)])
    assert many.limits["canary_churn[genre]"] == pytest.approx(1.3 * 0.02 + 0.01)


def test_no_null_makes_a_gate_looser_than_the_starting_values() -> None:
    weak = {**NULL, "cosine_mean": 0.7, "cosine_p5": 0.3, "cosine_low": 0.4, "effective_rank": 5.0}
    found = calibrated([weak] * 3)
    assert [found.limits[name] for name in ("cosine_mean", "cosine_p5", "cosine_low")] == [0.85, 0.70, 0.05]
    assert found.unstable == ["cosine_mean", "cosine_p5", "cosine_low", "effective_rank"]
    failed = decide(weak, found.thresholds()).failed
    assert failed == ["cosine_mean", "cosine_p5", "cosine_low", "effective_rank"]


def test_nulls_near_the_starting_rank_are_not_held_by_it() -> None:
    """SASRec's vectors of 50 coordinates: a quarter of 50 lies within what its refreshes differ by."""
    nulls = [{**NULL, "dim": 50.0, "effective_rank": rank} for rank in (13.4, 12.3, 14.0)]
    found = calibrated(nulls)
    assert found.limits["effective_rank"] == pytest.approx(0.8 * 12.3)
    assert found.unstable == []
    assert decide(nulls[1], found.thresholds()).passed
    assert decide({**nulls[1], "effective_rank": 9.5}, found.thresholds()).failed == ["effective_rank"]
    # A quarter below is the end of it, whatever the nulls say.
    assert calibrated([{**one, "effective_rank": 10.0} for one in nulls]).limits["effective_rank"] == 0.75 * 12.5


def test_what_a_null_could_not_measure_keeps_its_starting_value() -> None:
    found = calibrated([NULL, NULL, {**NULL, "cosine_p5": float("nan")}])
    assert "cosine_p5" not in found.limits
    assert found.thresholds().limit("cosine_p5", 32) == 0.70
    without = {name: value for name, value in NULL.items() if name != "cosine_mean[0-9]"}
    assert "cosine_mean[0-9]" not in calibrated([NULL, NULL, without]).limits


def test_limits_of_ones_own() -> None:
    found = calibrated([NULL] * 3, overrides={"unreplaced": 0.3})
    assert found.limits["unreplaced"] == 0.3
    with pytest.raises(ValueError, match=r"limits of cosine_maen: no such metric has one; there are .*cosine_mean"):
        calibrated([NULL] * 3, overrides={"cosine_maen": 0.3})
    # Measured, but told alone: a limit of it would have no direction.
    with pytest.raises(ValueError, match="limits of cosine_mean_all: no such metric has one"):
        calibrated([{**NULL, "cosine_mean_all": 0.9}] * 3, overrides={"cosine_mean_all": 0.3})


def test_a_limit_of_every_probe_is_that_of_those_without_their_own() -> None:
    own = Thresholds({"canary_drop": 0.1, "canary_drop[genre]": 0.2, "cosine_mean": 0.5})
    assert (own.limit("canary_drop[year]", 32), own.limit("canary_drop[genre]", 32)) == (0.1, 0.2)
    # What has a limit without a bucket as well keeps those of its buckets.
    assert own.limit("cosine_mean[0-9]", 32) == 0.75


def test_too_few_or_unlike_nulls() -> None:
    with pytest.raises(ValueError, match="2 null refreshes: at least 3"):
        calibrated([NULL] * 2)
    with pytest.raises(ValueError, match=r"dims \[16, 32\]"):
        calibrated([NULL, NULL, {**NULL, "dim": 16.0}])


def test_halves_tighten_what_the_starting_values_leave_open() -> None:
    quiet = {name: value for name, value in NULL.items() if name != "canary_drop[genre]"}
    quiet |= {"norm_change_p95": 0.05, "turn_p999": 0.2}
    floors = {"norm_shift": 1.5, "norm_moved": 0.05, "norm_change_p95": 0.3, "turn_p999": 0.9}
    found = calibrated_by_halves([quiet, quiet])
    assert found.limits == floors
    for name, floor in floors.items():
        assert decide({**quiet, name: floor}, found.thresholds()).passed
        assert decide({**quiet, name: 1.05 * floor}, found.thresholds()).failed == [name]
        assert decide({**quiet, name: 1.05 * floor}).passed
    noisy = {**quiet, "norm_shift": 1.4, "norm_moved": 0.1, "norm_change_p95": 0.4, "turn_p999": 1.1}
    expected = {"norm_shift": 1.68, "norm_moved": 0.105, "norm_change_p95": 0.46, "turn_p999": 1.47}
    assert calibrated_by_halves([quiet, noisy]).limits == pytest.approx(expected)


# --- in a store ------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def refresh(
    store: Store, name: str, seed: int, noise: float, mode: str = "report", model: str = "bpr", num_items: int = N
) -> Publication:
    base = np.random.default_rng(0).standard_normal((num_items, D))
    rng = np.random.default_rng(seed)
    vectors = (base + noise * rng.standard_normal((num_items, D))).astype(np.float32)
    settings = Settings(ema=None, gate=Gate(mode))  # type: ignore[arg-type]
    parent = store.collection(name).current()
    return publish_candidate(
        store, name, ItemVectors(np.arange(num_items), vectors), settings, parent_version=parent, model=model
    )


def nulls_of(store: Store, noise: float, num_nulls: int = 3) -> list[str]:
    refresh(store, "scratch", 0, noise)
    return [str(refresh(store, "scratch", seed, noise).version) for seed in range(1, num_nulls + 1)]


def test_the_calibrated_gate_holds_what_the_starting_values_let_through(store: Store) -> None:
    refresh(store, "items", 50, 0.05)
    nulls = nulls_of(store, 0.05)
    refresh(store, "loose", 50, 0.05)
    assert refresh(store, "loose", 51, 0.25, "enforce").status == "published"
    found = calibrate(store.collection("items"), store.collection("scratch"), nulls)
    held = refresh(store, "items", 52, 0.25, "enforce")
    assert held.status == "held"
    assert f"below {found.limits['cosine_mean']:.4g}" in held.reasons[0]
    assert refresh(store, "items", 53, 0.05, "enforce").status == "published"


def test_the_manifest_says_what_the_nulls_were(store: Store) -> None:
    refresh(store, "items", 50, 0.05)
    assert store.collection("items").manifest()["calibration"] is None
    found = calibrate(store.collection("items"), store.collection("scratch"), nulls_of(store, 0.05))
    assert found.source == ["scratch/v000002", "scratch/v000003", "scratch/v000004"]
    refresh(store, "items", 51, 0.05)
    kept = open_store(store.root).collection("items").manifest()
    assert kept["calibration"]["num_nulls"] == 3
    assert kept["calibration"]["nulls"]["cosine_mean"] == found.nulls["cosine_mean"]
    assert set(found.nulls["cosine_mean"]) == {"mean", "spread", "worst"}
    limits = {check["metric"]: check["threshold"] for check in kept["gate"]}
    assert limits["cosine_mean"] == found.limits["cosine_mean"]


def test_a_calibration_is_of_one_family_and_dim(store: Store) -> None:
    refresh(store, "items", 50, 0.05)
    found = calibrate(store.collection("items"), store.collection("scratch"), nulls_of(store, 0.05))
    items = store.collection("items")
    assert calibration_of(items, "bpr", D) == found
    assert calibration_of(items, "bpr", 2 * D) is None
    assert calibration_of(items, "two_tower", D) is None
    refresh(store, "others", 1, 0.05, model="two_tower")
    with pytest.raises(ValueError, match=r"is of model 'bpr' with dim 8; 'others' serves 'two_tower'"):
        calibrate(store.collection("others"), store.collection("scratch"), ["v000002", "v000003", "v000004"])


def test_nulls_of_too_few_items_say_so(store: Store) -> None:
    refresh(store, "items", 50, 0.05, num_items=40)
    nulls = [str(refresh(store, "scratch", seed, 0.05, num_items=40).version) for seed in range(4)]
    says = "v000002 of 'scratch' shares 40 items with the one before it, where 96 are needed for vectors of dim 8"
    with pytest.raises(ValueError, match=says):
        calibrate(store.collection("items"), store.collection("scratch"), nulls[1:])


def test_versions_that_are_no_nulls(store: Store) -> None:
    refresh(store, "items", 50, 0.05)
    nulls = nulls_of(store, 0.05)
    items, scratch = store.collection("items"), store.collection("scratch")
    with pytest.raises(ValueError, match="v000001 of 'scratch' was not measured against one before it"):
        calibrate(items, scratch, ["v000001", *nulls])
    with pytest.raises(UnknownVersion):
        calibrate(items, scratch, [*nulls, "v000099"])
    with pytest.raises(ValueError, match="2 null refreshes"):
        calibrate(items, scratch, nulls[:2])
    with pytest.raises(ValueError, match=f"{nulls[0]}: named more than once"):
        calibrate(items, scratch, [*nulls, nulls[0]])
    with pytest.raises(ValueError, match=r"'\.\./x', 'current': not the names of versions"):
        calibrate(items, scratch, ["current", *nulls, "../x"])
    assert items.settings("calibration") == {}


def test_a_first_version_is_not_judged_by_distances(store: Store) -> None:
    """A new anchor generation has nothing before it: its limits are the starting ones."""
    refresh(store, "items", 50, 0.05)
    calibrate(store.collection("items"), store.collection("scratch"), nulls_of(store, 0.05))
    # Two of fifty items without a vector: less than the nulls have, and no less than any first version may.
    rows = np.random.default_rng(0).standard_normal((50, D)).astype(np.float32)
    thin = ItemVectors(np.arange(50), rows, evidence=np.arange(50) > 1, counts=np.ones(50))
    items = store.collection("items")
    end = publish_candidate(store, "items", thin, Settings(), parent_version=items.current(), model="bpr")
    assert end.anchor_generation == 2
    assert {check["metric"] for check in end.gate if check["verdict"] == "fail"} == {"shared"}


def test_nulls_that_make_a_canary_better_ask_no_such_thing_of_a_refresh() -> None:
    better = calibrated([{**NULL, "canary_drop[genre]": -0.05}] * 3)
    assert better.limits["canary_drop[genre]"] == 0.02
