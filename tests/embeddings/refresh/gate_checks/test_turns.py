"""A few items that point elsewhere, among many that do not."""

from __future__ import annotations

import numpy as np
import pytest
from embeddings.refresh.gate_checks.turns import Turns

from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_checks.norms import Norms
from embeddings.vectors.item_vectors import ItemVectors

N, D = 2000, 16
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
COUNTS = np.random.default_rng(1).integers(1, 40, N)


def turn(candidate: np.ndarray, before: np.ndarray | None = COUNTS, after: np.ndarray | None = COUNTS) -> float | None:
    pair = [
        ItemVectors(np.arange(N), vectors, counts=counts) for vectors, counts in ((VECTORS, before), (candidate, after))
    ]
    return Turns.measure(Comparison(*pair, np.ones(N, dtype=bool))).get("turn_p999")


def test_a_turn_counts_by_the_fewer_rows_of_the_two() -> None:
    noise = 2.0 * np.random.default_rng(2).standard_normal((N, D))
    candidate = (VECTORS + noise).astype(np.float32)
    later = np.random.default_rng(3).integers(1, 40, N)
    fewer = np.minimum(COUNTS, later)
    cosines = np.sum(VECTORS * candidate, axis=1) / np.linalg.norm(VECTORS, axis=1) / np.linalg.norm(candidate, axis=1)
    turns = np.sort(((1 - cosines) * fewer / (fewer + 1))[fewer >= 2])
    assert turn(candidate, after=later) == pytest.approx(turns[-2], rel=1e-5)  # two of some 1,900 lie above it


def test_swaps_of_a_quarter_percent_show_unless_one_row_speaks_for_the_items() -> None:
    assert turn(VECTORS) == pytest.approx(0.0, abs=1e-6)
    swapped = VECTORS.copy()
    swapped[:5] = -swapped[:5]
    many, one = COUNTS.copy(), COUNTS.copy()
    many[:5], one[:5] = 20, 1
    assert turn(swapped, many, many) == pytest.approx(2 * 20 / 21, rel=1e-5)
    assert turn(swapped, many, one) == pytest.approx(0.0, abs=1e-6)
    # Of two thousand items, one or two alone are no fault.
    odd = VECTORS.copy()
    odd[0] *= -1
    assert turn(odd, many, many) == pytest.approx(0.0, abs=1e-6)


def test_too_few_items_of_known_counts_are_no_measurement() -> None:
    few = np.where(np.arange(N) < 29, 2, 1)
    assert turn(-VECTORS, None) is None
    assert turn(-VECTORS, few) is None
    assert turn(-VECTORS, np.where(np.arange(N) < 30, 2, 1)) == pytest.approx(2 * 2 / 3)
    pair = [ItemVectors(np.arange(N), VECTORS, counts=few)] * 2
    assert "norm_change_p95" not in Norms.measure(Comparison(*pair, np.ones(N, dtype=bool)))
