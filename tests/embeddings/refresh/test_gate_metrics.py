"""The gate's measurements against plain ones, and its verdicts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.gate import Thresholds, decide
from embeddings.refresh.gate_checks.effective_rank import effective_rank
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
    metrics = compare(items(geometry()), items(geometry() * 3, counts=np.arange(N)))
    for name, value in metrics.items():
        if name.startswith("cosine_low") or name in ("kernel_rms", "missing", "carried", "newly_carried", "norm_moved"):
            assert value == pytest.approx(0, abs=1e-6), name
        elif name.startswith(("cosine", "knn")) or name in ("coverage", "finite"):
            assert value == pytest.approx(1, abs=1e-6), name
    assert metrics["shared"] == N
    assert metrics["norm_shift"] == pytest.approx(3)
    assert decide(metrics).passed


def test_norms_against_plain_ones() -> None:
    rng = np.random.default_rng(4)
    old = geometry()
    factors = np.exp(0.3 * rng.standard_normal(N))
    factors[:60] *= 5
    metrics = compare(items(old), items((old * factors[:, None]).astype(np.float32)))
    before = np.linalg.norm(old.astype(np.float64), axis=1)
    after = before * factors
    shift = np.median(after) / np.median(before)
    low, high = np.percentile(before, 0.5), np.percentile(before, 99.5)
    assert metrics["norm_shift"] == pytest.approx(shift, rel=1e-5)
    assert metrics["norm_moved"] == pytest.approx(np.mean(np.abs(np.log(factors / shift)) > np.log(2)))
    assert metrics["norm_outside"] == pytest.approx(np.mean((after < low) | (after > high)))
    # Half as long is as far as twice as long.
    assert compare(items(old), items(old / 2))["norm_shift"] == pytest.approx(2)
    assert metrics["cosine_mean"] == pytest.approx(1)


def test_a_norm_that_follows_the_counts_has_not_changed() -> None:
    rng = np.random.default_rng(4)
    old, counts = geometry(), rng.integers(2, 50, N)
    growth = rng.uniform(0.5, 4, N)
    later = np.maximum(2, np.round(counts * growth)).astype(int)
    grown = (3 * old * ((later / counts) ** 0.4)[:, None]).astype(np.float32)

    def change(vectors: np.ndarray) -> float:
        return compare(items(old, counts=counts), items(vectors, counts=later))["norm_change_p95"]

    assert change(grown) == pytest.approx(0, abs=1e-5)
    scaled = grown.copy()
    scaled[:60] *= 1.5
    assert change(scaled) == pytest.approx(0.5, abs=0.05)  # the line itself moves a little
    scaled[:60] /= 1.5**2
    assert change(scaled) == pytest.approx(0.5, abs=0.05)
    # Alike counts have no line, and one item in twenty is not seen.
    assert compare(items(old, counts=counts), items(old * 2, counts=counts))["norm_change_p95"] == pytest.approx(0)
    few = old.copy()
    few[:25] *= 10
    assert compare(items(old, counts=counts), items(few, counts=counts))["norm_change_p95"] == pytest.approx(0)


def test_cosines_against_plain_ones() -> None:
    rng = np.random.default_rng(3)
    old, counts = geometry(), rng.integers(0, 500, N)
    new = noisy(old, 0.8)
    metrics = compare(items(old), items(new, counts=counts))
    plain = cosines(old, new)
    assert metrics["cosine_mean"] == pytest.approx(plain.mean())
    assert metrics["cosine_p5"] == pytest.approx(np.percentile(plain, 5))
    assert metrics["cosine_low"] == pytest.approx((plain < 0.65).mean())
    assert metrics["cosine_mean_traffic"] == pytest.approx(np.average(plain, weights=counts))
    assert metrics["cosine_low_traffic"] == pytest.approx(np.average(plain < 0.65, weights=counts))
    assert metrics["cosine_p5_traffic"] == pytest.approx(np.percentile(np.repeat(plain, counts), 5), abs=2e-3)
    inside = plain[(counts >= 100) & (counts <= 999)]
    assert metrics["cosine_mean[100-999]"] == pytest.approx(inside.mean())
    assert metrics["cosine_low[100-999]"] == pytest.approx((inside < 0.65).mean())
    assert metrics["cosine_p5[100-999]"] == pytest.approx(np.percentile(inside, 5))
    # Fewer than 30 items have a count below 10.
    assert (counts < 10).sum() < 30
    assert "cosine_mean[0-9]" not in metrics


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


def test_kernel_error_against_a_plain_one() -> None:
    old = geometry()
    new = noisy(old, 0.5)

    def kernel(vectors: np.ndarray) -> np.ndarray:
        unit = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        squared = np.sum((unit[:, None] - unit[None]) ** 2, axis=2)
        return np.exp(-(0.4**2) * squared / 2)[np.triu_indices(N, 1)]

    plain = np.sqrt(np.mean((kernel(new) - kernel(old)) ** 2)) / kernel(old).std()
    assert compare(items(old), items(new))["kernel_rms"] == pytest.approx(plain, rel=0.05)


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
    assert "collapsed" in verdict.reasons[0]


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


def test_neighbours_and_kernel_are_blind_to_a_rotation_and_the_cosines_are_not() -> None:
    old = geometry()
    rotation = np.linalg.qr(geometry(5, D, D))[0]
    metrics = compare(items(old), items((old @ rotation).astype(np.float32)))
    assert metrics["knn_overlap"] > 0.999
    assert metrics["kernel_rms"] < 1e-5
    assert metrics["cosine_mean"] < 0.3
    assert not decide(metrics).passed


def test_a_fault_in_the_head_alone_is_seen_by_traffic_and_bucket() -> None:
    rng = np.random.default_rng(0)
    counts = np.ones(3000, dtype=int)
    counts[:40] = 5000
    old = geometry(0, 3000)
    new = noisy(old, 0.1)
    new[:40] = rng.permutation(new[:40])
    failed = {
        check.metric
        for check in decide(compare(items(old), items(new, counts=counts))).checks
        if check.verdict == "fail"
    }
    assert failed == {
        "cosine_mean_traffic", "cosine_p5_traffic", "cosine_low_traffic", "cosine_mean[1000-9999]",
        "cosine_low[1000-9999]",
    }  # fmt: skip


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
    st.dictionaries(st.sampled_from(["cosine_mean", "cosine_p5", "knn_overlap", "finite"]), st.floats(-1, 1)),
    st.dictionaries(st.sampled_from(["cosine_low", "kernel_rms", "missing", "carried"]), st.floats(0, 2)),
)
def test_verdicts_are_the_limits(at_least: dict[str, float], at_most: dict[str, float]) -> None:
    limits = Thresholds()
    verdict = decide({**at_least, **at_most}, limits)
    good = all(value >= (limits.limit(name, D) or 0) for name, value in at_least.items())
    good = good and all(value <= (limits.limit(name, D) or 0) for name, value in at_most.items())
    assert verdict.passed == good == (not verdict.reasons)
    assert len(verdict.checks) == len(at_least) + len(at_most)


def test_reasons_say_value_limit_and_remedy() -> None:
    (reason,) = decide({"cosine_mean": 0.5, "cosine_p5": 0.2, "knn_overlap": 0.9}).reasons
    assert reason.startswith("cosine_mean is 0.5, below 0.85, cosine_p5 is 0.2, below 0.7: the vectors moved")
    assert "override_gate" in reason


def test_vectors_of_another_dim() -> None:
    with pytest.raises(ValueError, match="16 coordinates, the candidate 8"):
        compare(items(geometry()), items(geometry(0, N, 8)))
