"""What holds for every check of the gate, and that one more is measured and judged like the others."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.refresh import gate_metrics
from embeddings.refresh.gate import Thresholds, decide
from embeddings.refresh.gate_checks.base import GateCheck, Limit
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


def test_a_limit_of_every_probe_is_that_of_those_without_their_own() -> None:
    own = Thresholds({"canary_drop": 0.1, "canary_drop[genre]": 0.2, "cosine_mean": 0.5})
    assert (own.limit("canary_drop[year]", 32), own.limit("canary_drop[genre]", 32)) == (0.1, 0.2)
    # What has a limit without a bucket as well keeps those of its buckets.
    assert own.limit("cosine_mean[0-9]", 32) == 0.75


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
