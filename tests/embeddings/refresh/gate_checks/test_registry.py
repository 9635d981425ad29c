"""What holds for every check of the gate, and that one more is measured, judged and calibrated like the others."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.refresh import gate_metrics
from embeddings.refresh.calibration import calibrated
from embeddings.refresh.gate import Thresholds, decide
from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit, base_of
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_checks.registry import CHECKS, LIMITS
from embeddings.vectors.item_vectors import ItemVectors

N, D = 900, 16


def items(seed: int) -> ItemVectors:
    vectors = np.random.default_rng(0).standard_normal((N, D))
    vectors += 0.05 * np.random.default_rng(seed).standard_normal((N, D))
    return ItemVectors(np.arange(N), vectors.astype(np.float32), counts=np.arange(N))


def comparison(seed: int = 1) -> Comparison:
    before = {"newly_carried": 0.1}
    return Comparison(items(0), items(seed), np.ones(N, dtype=bool), anchor=items(0), metrics_before=before)


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ != "FrozenProbes"])
def test_a_check_measures_what_it_limits(check: type[GateCheck]) -> None:
    measured = check.measure(comparison())
    assert {limit.metric for limit in check.limits} <= set(measured)
    for name, value in measured.items():
        assert np.isfinite(value), name
    # Without samples to draw, the same again.
    assert check.measure(comparison()) == measured


def test_metrics_and_limits_belong_to_one_check_each() -> None:
    metrics = [name for check in CHECKS for name in check.measure(comparison())]
    assert len(metrics) == len(set(metrics))
    assert len(LIMITS) == sum(len(check.limits) for check in CHECKS)
    assert all(limit.remedy for limit in LIMITS.values())


def test_a_first_version_is_measured_by_the_checks_that_need_no_other() -> None:
    metrics = gate_metrics.compare(None, items(1))
    assert set(metrics) == {"dim", "rows", "finite", "coverage", "effective_rank", "missing"}


def test_one_limit_of_each_kind() -> None:
    limits = Thresholds({"newly_carried": 0.1, "effective_rank": 0.0, "rows": 5.0})
    assert limits.limit("finite", D) == 1.0
    assert limits.limit("cosine_p5[10-99]", D) == 0.40
    assert limits.limit("cosine_p5_traffic[10-99]", D) is None
    assert limits.limit("canary_churn[genre]", D) == 0.25
    assert limits.limit("canary_items[genre]", D) is None
    assert limits.limit("newly_carried", D) == 0.1
    assert limits.limit("effective_rank", D) == 3.0  # a quarter under the starting 4 is the end of it
    assert limits.limit("rows", D) == 5.0  # what has no limit may be given one


class Spread(GateCheck):
    """``spread``: the largest coordinate of the candidate."""

    limits = (Limit("spread", 4.0, "coordinates are large", at_most=True, calibrated=Calibrated(1.0, 0.5)),)

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        return {"spread": float(np.abs(comparison.candidate.vectors[:]).max())}


def test_a_check_that_is_entered_is_measured_judged_and_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [gate_metrics.measure(comparison(seed)) for seed in (1, 2, 3)]
    monkeypatch.setattr(gate_metrics, "CHECKS", (*CHECKS, Spread))
    monkeypatch.setitem(LIMITS, "spread", Spread.limits[0])
    nulls = [gate_metrics.measure(comparison(seed)) for seed in (1, 2, 3)]
    assert [{name: value for name, value in null.items() if name != "spread"} for null in nulls] == before
    assert decide({"spread": 3.5}).passed
    assert decide({"spread": 4.5}).reasons == ["spread is 4.5, above 4: coordinates are large"]
    found = calibrated(nulls)
    assert found.limits["spread"] == pytest.approx(max(null["spread"] for null in nulls) + 0.5)
    assert {base_of(name) for name in found.limits} <= set(LIMITS)
