"""The gate's measurements against plain ones, and its verdicts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT
from embeddings.refresh.gate_checks.effective_rank import effective_rank
from embeddings.refresh.gate_checks.registry import LIMITS
from embeddings.refresh.gate_metrics import compare
from embeddings.vectors.item_vectors import CARRIED, FOUND, ItemVectors

N, D = 600, 16


def geometry(seed: int = 0, num_items: int = N, dim: int = D) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_items, dim)).astype(np.float32)


def noisy(vectors: np.ndarray, noise: float, seed: int = 1) -> np.ndarray:
    return (vectors + noise * np.random.default_rng(seed).standard_normal(vectors.shape)).astype(np.float32)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    left, right = left.astype(np.float64), right.astype(np.float64)
    return np.sum(left * right, axis=1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


def items(vectors: np.ndarray, ids: np.ndarray | None = None, **columns: object) -> ItemVectors:
    return ItemVectors(np.arange(len(vectors)) if ids is None else ids, vectors, **columns)  # type: ignore[arg-type]


def test_the_same_vectors_are_perfect() -> None:
    counts = 2 + np.arange(N)
    metrics = compare(items(geometry(), counts=counts), items(geometry() * 3, counts=counts))
    for name, value in metrics.items():
        if name in ("cosine_low", "missing", "unreplaced") or name.endswith("_se") or "carried" in name:
            assert value == pytest.approx(0, abs=1e-6), name
        elif name.startswith(("cosine", "knn")) or name in ("coverage", "finite"):
            assert value == pytest.approx(1, abs=1e-6), name
    assert metrics["shared"] == N
    assert metrics["norm_shift"] == pytest.approx(3)
    assert metrics["norm_change_p95"] == pytest.approx(2)
    assert decide(metrics).passed


def test_norms_against_plain_ones() -> None:
    rng = np.random.default_rng(4)
    old, counts = geometry(), rng.integers(2, 50, N)
    factors = 1.2 * np.exp(0.3 * rng.standard_normal(N))
    counts[:60] = 1  # noise, however far they went
    factors[:60] *= 50

    def norms(vectors: np.ndarray) -> list[float]:
        metrics = compare(items(old, counts=counts), items(vectors.astype(np.float32), counts=counts))
        assert metrics["cosine_mean"] == pytest.approx(1)
        return [metrics["norm_shift"], metrics["norm_change_p95"]]

    changes = np.abs(np.log(factors[60:]))
    expected = [np.exp(abs(np.median(np.log(factors[60:])))), np.expm1(np.percentile(changes, 95))]
    assert norms(old * factors[:, None]) == pytest.approx(expected, rel=1e-5)
    # Half as long is as far as twice as long.
    assert norms(old / 2) == pytest.approx([2, 1])
    assert norms(old * 2) == pytest.approx([2, 1])


def test_norms_are_not_judged_where_too_few_items_have_known_counts() -> None:
    few = np.where(np.arange(N) < MIN_EVIDENT - 1, 2, 1)
    for before, after in ((None, None), (None, few + 1), (few, few + 1)):
        metrics = compare(items(geometry(), counts=before), items(geometry() * 100, counts=after))
        assert not {"norm_shift", "norm_change_p95"} & set(metrics)
    enough = np.where(np.arange(N) < MIN_EVIDENT, 2, 1)
    metrics = compare(items(geometry(), counts=enough), items(geometry() * 100, counts=enough))
    assert decide(metrics).failed == ["norm_change_p95"]


def test_a_norm_that_follows_the_counts_has_not_changed() -> None:
    rng = np.random.default_rng(4)
    old, counts = geometry(), rng.integers(2, 50, N)
    growth = rng.uniform(0.5, 4, N)
    later = np.maximum(2, np.round(counts * growth)).astype(int)
    lengths = (later / counts) ** 0.4
    # As long as before where an item's rows grew as much as those of all do.
    grown = (old * (lengths / np.exp(np.log(lengths).mean()))[:, None]).astype(np.float32)

    def change(vectors: np.ndarray) -> float:
        return compare(items(old, counts=counts), items(vectors, counts=later))["norm_change_p95"]

    assert change(grown) == pytest.approx(0, abs=1e-5)
    assert change(3 * grown) == pytest.approx(2, abs=1e-5)
    scaled = grown.copy()
    scaled[:60] *= 1.5
    assert change(scaled) == pytest.approx(0.5, abs=0.05)  # the line itself moves a little
    scaled[:60] /= 1.5**2
    assert change(scaled) == pytest.approx(0.5, abs=0.05)
    # Alike counts have no line, and one item in twenty is not seen.
    few = old.copy()
    few[:25] *= 10
    assert compare(items(old, counts=counts), items(few, counts=counts))["norm_change_p95"] == pytest.approx(0)


def test_cosines_against_plain_ones() -> None:
    rng = np.random.default_rng(3)
    old, counts = geometry(), rng.integers(0, 500, N)
    new = noisy(old, 0.8)
    metrics = compare(items(old), items(new, counts=counts))
    plain = cosines(old, new)
    low = (plain < 0.65).mean()
    assert metrics["cosine_mean"] == pytest.approx(plain.mean())
    assert metrics["cosine_mean_se"] == pytest.approx(plain.std(ddof=1) / np.sqrt(N))
    assert metrics["cosine_p5"] == pytest.approx(np.percentile(plain, 5))
    assert metrics["cosine_low"] == pytest.approx(low)
    assert metrics["cosine_low_se"] == pytest.approx(np.sqrt(low * (1 - low) / N))
    assert metrics["cosine_mean_traffic"] == pytest.approx(np.average(plain, weights=counts))


def test_neighbours_against_plain_ones() -> None:
    old = geometry()
    new = noisy(old, 0.5)

    def neighbours(vectors: np.ndarray) -> list[set[int]]:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        similar = unit @ unit.T
        np.fill_diagonal(similar, -2)
        return [set(row) for row in np.argsort(-similar, axis=1)[:, :10].tolist()]

    plain = np.mean([len(a & b) / 10 for a, b in zip(neighbours(old), neighbours(new), strict=True)])
    assert compare(items(old), items(new), num_queries=N)["knn_overlap"] == pytest.approx(plain, abs=2e-4)
    sampled = [compare(items(old), items(new), num_queries=200, seed=seed)["knn_overlap"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0] == pytest.approx(plain, abs=0.05)


@given(rank=st.integers(1, 12), seed=st.integers(0, 100))
def test_effective_rank_of_equal_axes_is_their_number(rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((12, 12)))[0][:rank]
    rows = np.repeat(np.eye(rank), 5, axis=0) @ basis * rng.uniform(0.1, 9, (5 * rank, 1))
    assert effective_rank(rows, np.arange(len(rows))) == pytest.approx(rank, rel=1e-9)


def test_a_popularity_bit_has_effective_rank_near_one() -> None:
    """Zero-initialised tables: 96 % of the variance in one axis, which the cosines can't see."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((N, D)) * np.sqrt(0.04 / 15)
    rows[:, 0] = np.sqrt(0.96) * rng.choice([-1, 1], N)
    metrics = compare(None, items(rows.astype(np.float32)))
    assert metrics["effective_rank"] < 1.5
    verdict = decide(metrics)
    assert not verdict.passed
    assert "few directions" in verdict.reasons[0]


@pytest.mark.parametrize(("dim", "limit"), [(2, 1), (4, 2), (8, 4), (16, 4), (32, 8), (64, 16)])
def test_limit_of_the_effective_rank(dim: int, limit: float) -> None:
    (check,) = [c for c in decide({"dim": dim, "effective_rank": 1.0}).checks if c.metric == "effective_rank"]
    assert check.threshold == limit


def test_counting_of_what_is_new_old_and_absent() -> None:
    """Previous: ids 0..9, of which 8 and 9 were carried. Candidate: 4..13; 4 has no evidence, 5 is NaN, 12 is zero."""
    previous = items(
        geometry(0, 10), statuses=[FOUND] * 8 + [CARRIED] * 2, counts=[10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    )
    vectors = geometry(0, 14)[4:]
    vectors[1, 3] = np.nan
    vectors[8] = 0.0
    evidence = np.ones(10, dtype=bool)
    evidence[0] = False
    counts = np.ones(10, dtype=int)
    counts[8] = 0
    metrics = compare(previous, items(vectors, np.arange(4, 14), evidence=evidence, counts=counts))
    assert metrics["finite"] == 0.9
    # Live: all but 12. Usable: 6..11 and 13.
    assert metrics["coverage"] == pytest.approx(7 / 9)
    # Served: those 7, and 0..5 carried; 12 never had a vector.
    assert metrics["carried"] == pytest.approx(6 / 13)
    assert metrics["missing"] == pytest.approx(1 / 14)
    # Found before and not now: 0..5 of 0..7.
    assert metrics["newly_carried"] == pytest.approx(6 / 8)
    assert metrics["newly_carried_traffic"] == pytest.approx(210 / 360)
    # Found in both: 6 and 7. 8 and 9 were carried, which is no evidence.
    assert metrics["shared"] == 2


def test_neighbours_are_blind_to_a_rotation_and_the_cosines_are_not() -> None:
    old = geometry()
    rotation = np.linalg.qr(geometry(5, D, D))[0]
    metrics = compare(items(old), items((old @ rotation).astype(np.float32)))
    assert metrics["knn_overlap"] > 0.999
    assert metrics["cosine_mean"] < 0.3
    assert not decide(metrics).passed


def test_a_fault_in_the_head_alone_shows_by_traffic_and_a_job_may_hold_it() -> None:
    rng = np.random.default_rng(0)
    counts = np.ones(3000, dtype=int)
    counts[:40] = 5000
    old = geometry(0, 3000)
    new = noisy(old, 0.1)
    new[:40] = rng.permutation(new[:40])
    metrics = compare(items(old), items(new, counts=counts))
    assert metrics["cosine_mean_traffic"] < 0.7 < 0.95 < metrics["cosine_mean"]
    assert decide(metrics).failed == []
    assert decide(metrics, Limits(own={"cosine_mean_traffic": 0.7})).failed == ["cosine_mean_traffic"]


def test_a_metric_that_cannot_be_measured_fails() -> None:
    metrics = compare(items(geometry(0, 50)), items(geometry(1, 50), np.arange(100, 150)))
    assert np.isnan(metrics["cosine_mean"])
    verdict = decide(metrics)
    assert not verdict.passed
    assert any("cosine_mean cannot be measured" in reason for reason in verdict.reasons)
    json.dumps([check.as_dict() for check in verdict.checks], allow_nan=False)


def test_unknown_counts_leave_their_metrics_out() -> None:
    metrics = compare(items(geometry()), items(geometry()))
    assert not any("[" in name or "traffic" in name for name in metrics)


@given(
    st.dictionaries(st.sampled_from(["cosine_mean", "anchor_cosine", "coverage", "finite"]), st.floats(-1, 1)),
    st.dictionaries(st.sampled_from(["cosine_low", "norm_change_p95", "unreplaced", "canary_drop"]), st.floats(0, 10)),
)
def test_verdicts_are_the_limits(at_least: dict[str, float], at_most: dict[str, float]) -> None:
    verdict = decide({**at_least, **at_most, "knn_overlap": 0.0, "newly_carried": 1.0})
    starting = {name: limit.starting or 0.0 for name, limit in LIMITS.items()}
    good = all(value >= starting[name] for name, value in at_least.items())
    good = good and all(value <= starting[name] for name, value in at_most.items())
    assert verdict.passed == good == (not verdict.reasons)
    assert {check.metric: check.threshold for check in verdict.checks} == {
        name: starting[name] for name in (*at_least, *at_most)
    }


def test_reasons_say_value_limit_and_remedy() -> None:
    (reason,) = decide({"cosine_mean": 0.5, "cosine_low": 0.3, "knn_overlap": 0.9}).reasons
    assert reason.startswith("cosine_mean is 0.5, below 0.75, cosine_low is 0.3, above 0.2: the vectors moved")
    assert "override_gate" in reason


def test_vectors_of_another_dim() -> None:
    with pytest.raises(ValueError, match="16 coordinates, the candidate 8"):
        compare(items(geometry()), items(geometry(0, N, 8)))
