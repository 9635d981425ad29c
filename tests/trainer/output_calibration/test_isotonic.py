"""Isotonic regression against scikit-learn's, blocks of any values and weights, and scores with ties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.output_calibration.base import smoothed_targets
from trainer.output_calibration.isotonic import Isotonic, pool_adjacent_violators

ELEMENTS = st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 10)), min_size=1, max_size=60)
ROWS = st.lists(st.tuples(st.integers(-6, 6), st.booleans(), st.integers(1, 4)), min_size=2, max_size=60)


@given(ELEMENTS)
def test_pooling_equals_scikit_learns(elements):
    from sklearn.isotonic import isotonic_regression

    values, weights = np.array(elements).T
    found, sizes = pool_adjacent_violators(values, weights)
    assert sizes.sum() == len(values)
    assert (np.diff(found) > 0).all()
    peer = isotonic_regression(values, sample_weight=weights)
    assert np.repeat(found, sizes) == pytest.approx(peer, abs=1e-9)


@pytest.mark.parametrize(
    "values", [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0, -9.0], [1.0, 1.0, 1.0], [2.0], [*range(12), -1000.0]]
)
def test_pooling_of_what_ends_low_is_the_mean(values):
    found, sizes = pool_adjacent_violators(np.array(values, float), np.ones(len(values)))
    assert found == pytest.approx([np.mean(values)])
    assert sizes.tolist() == [len(values)]


@given(ROWS)
def test_the_curve_equals_scikit_learns_within_the_smoothed_targets(rows):
    from sklearn.isotonic import IsotonicRegression

    logits, labels, weights = (np.array(column, float) for column in zip(*rows, strict=True))
    found = Isotonic.fit(logits, labels, weights)
    peer = IsotonicRegression(out_of_bounds="clip").fit(logits, labels, sample_weight=weights)
    # Also between the points, and beyond them.
    asked = np.linspace(-8, 8, 65)
    knots = np.interp(asked, peer.X_thresholds_, np.clip(peer.y_thresholds_, *smoothed_targets(labels, weights)))
    assert found.probabilities(asked) == pytest.approx(knots, abs=1e-9)


def test_no_probability_is_0_or_1():
    found = Isotonic.fit(np.array([-1.0, -1.0, 1.0]), np.array([0.0, 0.0, 1.0]), np.ones(3))
    assert found.probabilities(np.array([-50.0, 50.0])).tolist() == [1 / 4, 2 / 3]


def test_many_rows_make_few_points():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=20_000)
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-2 * logits))).astype(float)
    found = Isotonic.fit(logits, labels, np.ones(20_000))
    assert len(found.logits) < 1000
    assert np.abs(found.probabilities(logits) - 1 / (1 + np.exp(-2 * logits))).mean() < 0.02
