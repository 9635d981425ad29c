"""Alternating least squares against the equations row by row, on the rows and the split that a job has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.papers.data import documents
from benchmarks.papers.sse import als, graphs
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.data.prepare.split import TEST, VALIDATION

SPLIT = {"split": {"kind": "random", "validation": 0.1, "test": 0.2}}


def test_every_row_is_the_least_squares_of_its_ratings_and_neighbours() -> None:
    """Row 3 has no rating, row 4 no neighbour either."""
    draw = np.random.default_rng(0)
    row, other, value = np.array([0, 0, 1, 2, 2, 2]), draw.normal(size=(6, 2)), draw.normal(size=6)
    weights = als.weights_of(np.array([0, 1]), np.array([1, 3]), 5)
    assert weights[0, 1] == weights[1, 3] == pytest.approx(2**-0.5)
    before = draw.normal(size=(5, 2))
    found = als.solved(row, other, value, weights, before, 0.3, 2.0)
    for one in range(5):
        of = row == one
        penalty = 0.3 * max(of.sum(), 1) + 2.0 * weights[one].sum()
        matrix = other[of].T @ other[of] + penalty * np.eye(2)
        right = other[of].T @ value[of] + 2.0 * weights[one] @ before
        np.testing.assert_allclose(found[one], np.linalg.solve(matrix, right), rtol=1e-12, atol=1e-15)
    assert not found[4].any()


def test_baselines_have_a_jobs_split_and_the_graph_tells_unrated_ids(tmp_path: Path) -> None:
    """Users of two groups: each group gives every item the group's rating, so neighbours tell what is not seen."""
    draw = np.random.default_rng(1)
    user = np.repeat(np.arange(60), 4)
    rows = {"user": user, "item": draw.integers(40, size=len(user)), "rating": np.where(user % 2, 4.0, 2.0)}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    for name, count in (("ages", 60), ("genres", 40)):
        graphs.write_edges(graphs.cluster_edges({one: one % 2 for one in range(count)}), tmp_path / f"{name}.parquet")
    ends = {"source": "source", "target": "target"}
    of = documents.dataset(
        "ratings", tmp_path / "rows.parquet", {"value": "rating"},
        graphs={name: ends | {"uri": str(tmp_path / f"{name}.parquet"), "of": side} for name, side in
                (("ages", "user"), ("genres", "item"))},
    )  # fmt: skip
    model = {"kind": "mf", "embedding_dim": 2, "loss": "mse"}
    job = documents.job("als", of, model=model, evaluation=SPLIT, batch_size=16)
    ratings = als.read_ratings(of, job.evaluation.split)
    prepare(of, job, tmp_path / "data")
    data = PreparedData.open(tmp_path / "data")
    for side, name in ((VALIDATION, "validation"), (TEST, "test")):
        np.testing.assert_array_equal(np.sort(ratings.value[ratings.side == side]), np.sort(data.labels(name)))
    found = als.baselines(of, job)
    assert found["als_laplacian"]["test"] < found["als"]["test"] - 0.1
    assert found["als"]["l2"] in als.L2
    assert found["als_laplacian"]["strength"] in als.STRENGTHS
