"""What holds for every check of the gate, and that one more is measured and judged like the others."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.refresh import gate_metrics
from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.gate_checks.base import STANDARD_ERROR, GateCheck, Limit, base_of
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_checks.registry import CHECKS, LIMITS, REMOVED
from embeddings.refresh.model_comparison import ModelComparison, ModelDifference
from embeddings.vectors.item_vectors import ItemVectors

N, D = 900, 16
ROWS = {
    "rows": 1000.0, "users": 100.0, "largest_user": 0.1, "pairing": 0.8, "pairing_newest": 0.7, "popularity": 0.6,
}  # fmt: skip
HOLD = {
    "finite", "coverage", "effective_rank", "cosine_mean", "cosine_low", "norm_change_p95", "unreplaced", "canary_drop",
    "anchor_cosine", "log_rows", "log_users", "largest_user", "pairing", "pairing_newest", "popularity", "model_gain",
    "model_metric", "model_metric_before",
}  # fmt: skip


def items(seed: int) -> ItemVectors:
    vectors = np.random.default_rng(0).standard_normal((N, D))
    vectors += 0.05 * np.random.default_rng(seed).standard_normal((N, D))
    return ItemVectors(np.arange(N), vectors.astype(np.float32), counts=np.arange(N))


def comparison(seed: int = 1) -> Comparison:
    models = ModelComparison("v000001", (ModelDifference("auc", "all", 1000, 0.7, 0.71, 0.0, 0.02),))
    return Comparison(
        items(0), items(seed), np.ones(N, dtype=bool), anchor=items(0), metrics_before={"newly_carried": 0.1},
        row_figures=ROWS, models=models,
    )  # fmt: skip


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ != "FrozenProbes"])
def test_a_check_measures_what_it_limits(check: type[GateCheck]) -> None:
    measured = check.measure(comparison())
    assert {limit.metric for limit in check.limits} <= {base_of(name) for name in measured}
    for name, value in measured.items():
        assert np.isfinite(value), name
    # Without samples to draw, the same again.
    assert check.measure(comparison()) == measured


def test_metrics_and_limits_belong_to_one_check_each() -> None:
    metrics = [name for check in CHECKS for name in check.measure(comparison())]
    assert len(metrics) == len(set(metrics))
    assert len(LIMITS) == sum(len(check.limits) for check in CHECKS)
    assert all(limit.remedy for limit in LIMITS.values())
    assert not REMOVED & set(LIMITS)


def test_few_metrics_hold_and_the_others_inform() -> None:
    holding = {name for name, limit in LIMITS.items() if limit.spread is not None or limit.starting is not None}
    assert holding | {"effective_rank"} == HOLD
    informing = set(LIMITS) - HOLD
    assert {"knn_overlap", "cosine_p5", "norm_shift", "canary_churn", "newly_carried", "missing"} <= informing
    worst = {name: 1e9 if LIMITS[name].at_most else -1e9 for name in informing}
    assert decide(worst).checks == ()
    own = Limits(own=dict.fromkeys(informing, 0.0))
    assert set(decide(worst, own).failed) == informing


def test_a_first_version_is_measured_by_the_checks_that_need_no_other() -> None:
    metrics = gate_metrics.compare(None, items(1))
    assert set(metrics) == {"dim", "rows", "finite", "coverage", "effective_rank", "missing"}


def test_one_limit_of_each_kind() -> None:
    limits = Limits({"newly_carried": 0.1, "effective_rank": 3.0, "rows": 5.0, "model_gain": -0.1})
    metrics = {"dim": D}
    assert limits.of("finite", metrics) == 1.0
    assert limits.of("cosine_mean", metrics) == 0.75
    assert limits.of("knn_overlap", metrics) is None
    assert limits.of("canary_drop[genre]", metrics) == 0.02
    assert limits.of("canary_items[genre]", metrics) is None
    assert limits.of("model_gain[country=DE]", metrics) == -0.1
    assert limits.of("newly_carried", metrics) == 0.1
    assert Limits().of("effective_rank", metrics) == 4.0
    assert limits.of("effective_rank", metrics) == 3.0
    assert limits.of("rows", metrics) == 5.0  # what has no limit may be given one
    assert limits.of(f"cosine_mean{STANDARD_ERROR}", metrics) is None


def test_a_limit_of_every_probe_is_that_of_those_without_their_own() -> None:
    own = Limits({"canary_drop": 0.1, "canary_drop[genre]": 0.2})
    assert (own.of("canary_drop[year]", {}), own.of("canary_drop[genre]", {})) == (0.1, 0.2)


class Spread(GateCheck):
    """``spread``: the largest coordinate of the candidate."""

    limits = (Limit("spread", 4.0, "coordinates are large", at_most=True),)

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        return {"spread": float(np.abs(comparison.candidate.vectors[:]).max())}


def test_a_check_that_is_entered_is_measured_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gate_metrics.measure(comparison())
    monkeypatch.setattr(gate_metrics, "CHECKS", (*CHECKS, Spread))
    monkeypatch.setitem(LIMITS, "spread", Spread.limits[0])
    measured = gate_metrics.measure(comparison())
    assert measured == before | {"spread": float(np.abs(items(1).vectors[:]).max())}
    assert decide({"spread": 3.5}).passed
    assert decide({"spread": 4.5}).reasons == ["spread is 4.5, above 4: coordinates are large"]
