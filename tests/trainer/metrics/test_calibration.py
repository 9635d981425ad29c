"""Calibration against bins written out, and against scikit-learn's curve."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import calibration_curve, ece
from trainer.metrics.calibration import EqualMass, EqualWidth
from trainer.metrics.counts import Counts, by_score

ROWS = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=50)


def drawn(count=1000, seed=0):
    rng = np.random.default_rng(seed)
    predictions = rng.beta(1, 3, count)
    return predictions, (rng.random(count) < predictions**1.5).astype(float)


@pytest.mark.parametrize("equal_mass", [True, False])
def test_curve_equals_scikit_learns(equal_mass):
    from sklearn.calibration import calibration_curve as peer

    predictions, labels = drawn()
    found = calibration_curve(predictions, labels, 10, equal_mass=equal_mass)
    if equal_mass:
        # Quantiles there lie between two rows: with 1000 rows and no ties the bins are the same.
        shares, means = peer(labels, predictions, n_bins=10, strategy="quantile")
    else:
        shares, means = peer(labels, predictions, n_bins=10, strategy="uniform")
    np.testing.assert_allclose(found.shares, shares, rtol=1e-12)
    np.testing.assert_allclose(found.predictions, means, rtol=1e-12)
    assert found.rows.sum() == pytest.approx(1000)


def test_equal_mass_bins_are_pieces_of_the_sorted_rows():
    predictions, labels = drawn(700)
    order = np.argsort(predictions)
    found = calibration_curve(predictions, labels, 7)
    for bin_, piece in enumerate(np.array_split(order, 7)):
        assert found.rows[bin_] == pytest.approx(100)
        assert found.predictions[bin_] == pytest.approx(predictions[piece].mean(), rel=1e-12)
        assert found.shares[bin_] == pytest.approx(labels[piece].mean(), abs=1e-12)
    expected = np.mean([abs(labels[p].mean() - predictions[p].mean()) for p in np.array_split(order, 7)])
    assert ece(predictions, labels, 7) == pytest.approx(expected, rel=1e-12)


@given(ROWS)
def test_equal_width_ece_is_the_sum_over_bins(rows):
    predictions, labels = np.array([p / 20 for p, _ in rows]), np.array([float(y) for _, y in rows])
    total = 0.0
    for number in range(10):
        low, high = number / 10, (number + 1) / 10
        inside = (predictions >= low) & ((predictions < high) | (number == 9))
        if inside.any():
            total += inside.mean() * abs(labels[inside].mean() - predictions[inside].mean())
    assert ece(predictions, labels, equal_mass=False) == pytest.approx(total, abs=1e-12)


@given(ROWS, st.integers(1, 4), st.integers(1, 7))
def test_pieces_in_order_give_the_curve_of_the_whole(rows, num_pieces, num_bins):
    predictions, labels = np.array([p / 20 for p, _ in rows]), np.array([float(y) for _, y in rows])
    whole = by_score(predictions, labels)
    for bins, equal_mass in ((EqualMass(len(rows), num_bins), True), (EqualWidth(num_bins), False)):
        for part in zip(*(np.array_split(array, num_pieces) for array in whole), strict=True):
            bins.add(Counts(*part))
        for mine, theirs in zip(
            bins.curve(), calibration_curve(predictions, labels, num_bins, equal_mass=equal_mass), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@given(ROWS, st.randoms())
def test_order_of_rows_does_not_matter(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    found = [ece(np.array([p / 20 for p, _ in of]), np.array([float(y) for _, y in of])) for of in (rows, shuffled)]
    assert found[0] == found[1]


def test_one_prediction_for_all_is_off_by_the_base_rate():
    labels = np.array([1.0, 0, 0, 0, 1])
    for equal_mass in (True, False):
        assert ece(np.full(5, 0.3), labels, equal_mass=equal_mass) == pytest.approx(0.1)


def test_what_is_calibrated_has_a_small_error_and_a_shift_shows():
    rng = np.random.default_rng(5)
    predictions = rng.random(200_000)
    labels = rng.random(200_000) < predictions
    for equal_mass in (True, False):
        assert ece(predictions, labels, equal_mass=equal_mass) < 0.005
        assert ece(predictions * 0.8, labels, equal_mass=equal_mass) == pytest.approx(0.1, abs=0.005)


def test_nothing_and_nan_have_no_error():
    assert math.isnan(ece(np.array([]), np.array([])))
    assert math.isnan(ece(np.array([0.2, np.nan]), np.array([0, 1])))
    assert not len(calibration_curve(np.array([]), np.array([])).rows)
