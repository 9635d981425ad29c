"""Orthogonal alignment: recovers a planted rotation whatever the scale of the rows, and refuses what it cannot
trust."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.procrustes import TooFewShared, min_shared, procrustes, rotate
from embeddings.vectors.item_vectors import unit_rows


def random_rotation(dim: int, rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0]


@given(dim=st.integers(1, 24), seed=st.integers(0, 2**31), scale=st.sampled_from([1e-200, 1e-30, 1.0, 1e30, 1e200]))
def test_recovers_a_planted_rotation(dim: int, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    target = rng.standard_normal((min_shared(dim) + 5, dim))
    rotation = random_rotation(dim, rng)
    source = target @ rotation.T * scale * rng.uniform(0.1, 10.0, size=(len(target), 1))
    found = procrustes(source, target, chunk_rows=37)
    # Exact but for rounding: d products of unit coordinates.
    np.testing.assert_allclose(found, rotation, atol=1e-10)
    np.testing.assert_allclose(found @ found.T, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(unit_rows(source)[0] @ found, unit_rows(target)[0], atol=1e-10)


def test_no_orthogonal_matrix_does_better() -> None:
    rng = np.random.default_rng(1)
    source, target = rng.standard_normal((2, 400, 6))
    found = procrustes(source, target)

    def loss(rotation: np.ndarray) -> float:
        return float(np.sum((unit_rows(source)[0] @ rotation - unit_rows(target)[0]) ** 2))

    assert all(loss(found) <= loss(random_rotation(6, rng)) for _ in range(200))
    # Neither does a small turn away from it.
    for _ in range(50):
        skew = rng.standard_normal((6, 6)) * 1e-3
        step, _ = np.linalg.qr(np.eye(6) + skew - skew.T)
        assert loss(found) <= loss(found @ step) + 1e-12


def test_rows_of_larger_arrays_are_paired_by_position() -> None:
    rng = np.random.default_rng(2)
    source = rng.standard_normal((500, 4)).astype(np.float32)
    target = rng.standard_normal((300, 4)).astype(np.float32)
    left, right = rng.permutation(500)[:100], rng.permutation(300)[:100]
    picked = procrustes(source, target, source_rows=left, target_rows=right, chunk_rows=7)
    # Blocks of float32 rows are multiplied in float32, and these are unrelated: R hangs on small singular values.
    np.testing.assert_allclose(picked, procrustes(source[left], target[right]), atol=1e-5)
    source, target = source.astype(np.float64), target.astype(np.float64)
    picked = procrustes(source, target, source_rows=left, target_rows=right, chunk_rows=7)
    np.testing.assert_allclose(picked, procrustes(source[left], target[right]), atol=1e-12)


def test_chunks_do_not_matter() -> None:
    rng = np.random.default_rng(3)
    source, target = rng.standard_normal((2, 1000, 5))
    np.testing.assert_allclose(procrustes(source, target, chunk_rows=1), procrustes(source, target), atol=1e-11)


def test_refuses_too_few_shared_items() -> None:
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((12 * 8, 8))
    procrustes(rows, rows)
    with pytest.raises(TooFewShared, match=r"95 shared items, 96 are needed"):
        procrustes(rows[1:], rows[1:])
    rows[5] = 0.0
    with pytest.raises(TooFewShared):
        procrustes(rows, rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_rows_that_are_not_finite(bad: float) -> None:
    rows = np.ones((100, 2))
    broken = rows.copy()
    broken[50, 1] = bad
    for source, target in ((rows, broken), (broken, rows)):
        with pytest.raises(ValueError, match="not finite"):
            procrustes(source, target)


def test_refuses_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match="of one d"):
        procrustes(np.ones((50, 2)), np.ones((50, 3)))
    with pytest.raises(ValueError, match="paired by position"):
        procrustes(np.ones((50, 2)), np.ones((51, 2)))


def test_rotate_gives_unit_rows_and_keeps_zero_and_nan() -> None:
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((40_000, 3)).astype(np.float32)
    vectors[7] = 0.0
    vectors[9, 1] = np.nan
    vectors[11] = 1e-42
    rotated = rotate(vectors, random_rotation(3, rng))
    norms = np.linalg.norm(rotated.astype(np.float64), axis=1)
    assert not rotated[7].any()
    assert np.isnan(rotated[9]).all()
    others = np.delete(norms, [7, 9])
    np.testing.assert_allclose(others, 1.0, atol=1e-6)
    assert np.array_equal(rotate(vectors, None)[0], unit_rows(vectors[:1])[0].astype(np.float32)[0])
