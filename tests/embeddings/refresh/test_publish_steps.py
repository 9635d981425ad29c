"""Each step of the refresh stage beside the same step on whole arrays in plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh.merge import Expiry, eligible_rows, expired, plan
from embeddings.refresh.procrustes import Rotated, min_shared, procrustes, rotate
from embeddings.refresh.served_rows import ServedRows, average
from embeddings.refresh.settings import MovingAverage
from embeddings.vectors.item_vectors import CARRIED, CHUNK_ROWS, FOUND, ItemVectors
from embeddings.vectors.lazy_rows import Picked, Rows, Widened, take

SCALES = [1e-30, 1e-9, 1.0, 1e9, 1e30]
TODAY = 20_000


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    rows = rows / np.abs(rows).max(axis=1, keepdims=True)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def basis(rng: np.random.Generator, dim: int) -> np.ndarray:
    return np.asarray(np.linalg.qr(rng.standard_normal((dim, dim)))[0])


def pair(seed: int, num_rows: int, dim: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """A refresh and what is served: the same geometry with a little noise in two bases, rows of any length."""
    rng = np.random.default_rng(seed)
    old = unit(rng.standard_normal((num_rows, dim)))
    new = (old + 0.1 * rng.standard_normal(old.shape)) @ basis(rng, dim)
    return (new * scale * rng.uniform(0.1, 10, (num_rows, 1))).astype(np.float32), old.astype(np.float32)


sizes = st.integers(1, 3 * CHUNK_ROWS)


# --- rows that are computed when they are read -----------------------------------------------------------------------


@given(data=st.data(), num_rows=st.integers(1, 50))
def test_rows_are_read_as_an_array_is(data: st.DataObject, num_rows: int) -> None:
    whole = np.arange(3 * num_rows, dtype=np.float32).reshape(num_rows, 3)
    order = np.random.default_rng(num_rows).permutation(num_rows)
    for rows, expected in ((Picked(whole, order), whole[order]), (Widened(whole.astype(np.float16)), whole)):
        assert (len(rows), rows.shape, rows.ndim) == (num_rows, whole.shape, 2)
        np.testing.assert_array_equal(np.asarray(rows), expected)
        part = data.draw(st.slices(num_rows))
        np.testing.assert_array_equal(rows[part], expected[part])
        numbers = np.array(data.draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=9)), dtype=np.int64)
        np.testing.assert_array_equal(rows[numbers], expected[numbers])
        mask = np.arange(num_rows) % 3 == 0
        np.testing.assert_array_equal(rows[mask], expected[mask])
        np.testing.assert_array_equal(rows[-1], expected[-1])
        np.testing.assert_array_equal(take(rows, numbers % num_rows), expected[numbers % num_rows])


# --- alignment -------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), num_rows=sizes, dim=st.integers(1, 16), scale=st.sampled_from(SCALES))
def test_alignment(seed: int, num_rows: int, dim: int, scale: float) -> None:
    new, old = pair(seed, max(num_rows, min_shared(dim)), dim, scale)
    u, singular, vt = np.linalg.svd(unit(new).T @ unit(old))
    # float32 products of blocks, relative to the singular values that decide where R points.
    tolerance = 3e-6 * singular[0] / singular[-1]
    found = procrustes(new, old)
    np.testing.assert_allclose(found, u @ vt, atol=tolerance)
    np.testing.assert_allclose(found @ found.T, np.eye(dim), atol=1e-12)
    expected = unit(new) @ u @ vt
    np.testing.assert_allclose(rotate(new, u @ vt), expected, atol=1e-6)
    lazily = Rotated(new, u @ vt)
    np.testing.assert_allclose(lazily[3:9], expected[3:9], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(lazily).astype(np.float64), axis=1), 1, atol=1e-6)


# --- evidence --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), num_rows=sizes, floor=st.sampled_from([0.0, 1e-12, 0.5]))
def test_evidence(seed: int, num_rows: int, floor: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_rows, 3)).astype(np.float32)
    kinds = rng.choice([1.0, 0.0, np.nan, np.inf, 1e-20, 1e-5, 1e30], num_rows, p=[0.7] + [0.05] * 6)
    with np.errstate(invalid="ignore"):
        rows *= kinds[:, None].astype(np.float32)
    touched = rng.random(num_rows) < 0.9
    items = ItemVectors(np.arange(num_rows), rows, evidence=touched, norms=np.ones(num_rows))
    finite = np.isfinite(rows).all(axis=1)
    norms = np.linalg.norm(np.where(finite[:, None], rows, 0).astype(np.float64), axis=1)
    np.testing.assert_array_equal(eligible_rows(items, floor), touched & finite & (norms > floor))


# --- average ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 300),
    weight=st.sampled_from([0.05, 0.3, 1.0]),
    limit=st.sampled_from([-1.0, 0.65, 1.0]),
    scale=st.sampled_from(SCALES),
)
def test_average(seed: int, num_rows: int, weight: float, limit: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    old = unit(rng.standard_normal((num_rows, 5))).astype(np.float32)
    new = ((old + rng.uniform(0, 2) * rng.standard_normal(old.shape)) * scale).astype(np.float32)
    found, reset = average(new, old, weight, limit)
    cosines = np.sum(unit(new) * unit(old), axis=1)
    mixed = (1 - weight) * unit(old) + weight * unit(new)
    expected = np.where((cosines < limit)[:, None], unit(new), unit(mixed))
    near = np.abs(cosines - limit) < 1e-6  # rounding may decide either way
    np.testing.assert_array_equal(reset[~near], (cosines < limit)[~near])
    # Where two nearly cancel, rounding errors are as large as what is left.
    sure = ~near & (np.linalg.norm(mixed, axis=1) > 0.05)
    np.testing.assert_allclose(found[sure], expected[sure], atol=3e-6)
    assert found.dtype == np.float32


def test_vectors_that_cancel_are_reset() -> None:
    old = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    new = np.array([[-2.0, 0.0], [0.0, 3.0]], dtype=np.float32)
    found, reset = average(new, old, 0.5, -1.0)
    assert reset.tolist() == [True, False]
    assert found.tolist() == [[-1.0, 0.0], [0.0, 1.0]]


# --- which items -----------------------------------------------------------------------------------------------------

items_of_parent = st.dictionaries(
    st.integers(0, 40), st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=30
)
items_of_run = st.dictionaries(st.integers(0, 40), st.sampled_from(["found", "without", "unwanted"]), max_size=30)


@given(
    before=items_of_parent,
    run=items_of_run,
    limit=st.none() | st.integers(1, 5),
    days=st.none() | st.integers(1, 9),
    as_text=st.booleans(),
)
def test_plan_against_dictionaries(before: Any, run: Any, limit: Any, days: Any, as_text: bool) -> None:
    """``before``: id -> (publications carried, days since found, retired); ``run``: id -> what it has of it."""

    def ids(numbers: list[int]) -> Any:
        return np.array([f"{n:03}".encode() for n in numbers], dtype="S3") if as_text else np.array(numbers, np.int64)

    old, new = sorted(before), sorted(run)
    parent = ItemVectors(
        ids(old), np.ones((len(old), 2)), carried_for=np.array([before[n][0] for n in old], np.int32),
        last_found=np.array([TODAY - before[n][1] for n in old], np.int32),
    )  # fmt: skip
    usable = np.array([run[n] == "found" for n in new], dtype=np.bool_)
    wanted = np.array([run[n] != "unwanted" for n in new], dtype=np.bool_)
    renewed = np.array([run.get(n) == "found" for n in old], dtype=np.bool_)
    retired = np.array([before[n][2] for n in old], dtype=np.bool_)
    gone = expired(parent, renewed, Expiry(limit, days), TODAY)
    served = plan(parent, ids(new), usable, wanted, retired | gone, TODAY)

    expected = {}
    for n in sorted({*old, *new}):
        if run.get(n) == "found":
            expected[n] = (FOUND, 0, TODAY)
        elif n in before:
            carried_for, age, is_retired = before[n]
            too_long = (limit is not None and carried_for + 1 > limit) or (days is not None and age > days)
            if not is_retired and not too_long:
                expected[n] = (CARRIED, carried_for + 1, TODAY - age)
    np.testing.assert_array_equal(served.keys, ids(sorted(expected)))
    rows = zip(served.statuses.tolist(), served.carried_for.tolist(), served.last_found.tolist(), strict=True)
    assert list(rows) == [expected[n] for n in sorted(expected)]
    found = [n for n in sorted(expected) if run.get(n) == "found"]
    assert [new[row] for row in served.found_rows if row >= 0] == found
    for n, found_row, parent_row in zip(sorted(expected), served.found_rows, served.parent_rows, strict=True):
        assert (found_row >= 0) == (run.get(n) == "found")
        assert parent_row == (old.index(n) if n in before else -1)
    assert served.num_new == len(set(found) - set(before))
    assert served.num_missing == len({n for n in new if run[n] == "without"} - set(expected))
    column = served.pick(np.array([100 + n for n in new]), np.array([200 + n for n in old]))
    assert column.tolist() == [(100 if run.get(n) == "found" else 200) + n for n in sorted(expected)]


def test_without_a_parent_nothing_is_carried() -> None:
    served = plan(None, np.arange(3), np.array([True, False, True]), np.ones(3, np.bool_), np.zeros(0, np.bool_), TODAY)
    assert served.keys.tolist() == [0, 2]
    assert (served.num_missing, served.num_new, served.parent_rows.tolist()) == (1, 2, [-1, -1])


# --- the rows of a version -------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 400),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    ema=st.none() | st.builds(MovingAverage, st.sampled_from([0.3, 1.0]), st.sampled_from([-1.0, 0.9])),
    half=st.booleans(),
)
def test_served_rows(seed: int, num_rows: int, share: float, ema: MovingAverage | None, half: bool) -> None:
    rng = np.random.default_rng(seed)
    new, old = pair(seed, num_rows, 4, 1.0)
    stored = old.astype(np.float16) if half else old
    old = stored.astype(np.float32)
    old_ids = np.flatnonzero(rng.random(num_rows) < 0.7)
    new_ids = np.flatnonzero(rng.random(num_rows) < 0.8)
    usable = rng.random(len(new_ids)) < share
    rotation = basis(rng, 4)
    parent = ItemVectors(old_ids, Widened(stored[old_ids]) if half else stored[old_ids], norms=np.ones(len(old_ids)))
    served = plan(parent, new_ids, usable, np.ones_like(usable), np.zeros(len(old_ids), np.bool_), TODAY)
    rows = ServedRows(served, new[new_ids], rotation, parent.vectors, ema)

    expected, resets = np.zeros((len(served), 4)), np.zeros(len(served), dtype=np.bool_)
    for row, key in enumerate(served.keys):
        turned = unit(new[key][None])[0] @ rotation
        before = unit(old[key][None])[0]
        if served.statuses[row] == CARRIED:
            expected[row] = old[key]
        elif ema is None or key not in old_ids:
            expected[row] = turned
        else:
            resets[row] = turned @ before < ema.reset_below_cosine
            mixed = (1 - ema.new_weight) * before + ema.new_weight * turned
            expected[row] = turned if resets[row] else mixed / np.linalg.norm(mixed)
    cut = len(served) // 3
    found = np.concatenate([rows[:cut], rows[cut:]])
    # A mixture of two that nearly cancel loses digits; few do.
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not len(found) or np.median(np.abs(found - expected)) < 1e-6
    carried = served.statuses == CARRIED
    np.testing.assert_array_equal(found[carried], old[served.keys[carried]])
    np.testing.assert_array_equal(rows.reset, resets)
    np.testing.assert_allclose(rows[np.arange(len(served))[::-1]], found[::-1], atol=1e-6)


def test_rows_are_abstract() -> None:
    with pytest.raises(NotImplementedError):
        Rows(2, 2)[0:1]
