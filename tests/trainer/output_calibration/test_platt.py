"""Platt scaling against scipy's minimum of the same loss, and where the answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics.classification import sigmoid, softplus
from trainer.output_calibration.base import smoothed_targets
from trainer.output_calibration.platt import Platt


def drawn(slope, intercept, *, rows=400, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=rows) * scale
    labels = (rng.random(rows) < sigmoid(slope * logits + intercept)).astype(float)
    return logits, labels, rng.integers(1, 4, rows).astype(float)


@pytest.mark.parametrize(("slope", "intercept", "scale"), [(0.5, -1.0, 1.0), (3.0, 2.0, 1.0), (0.002, 0.0, 1000.0)])
def test_the_fit_is_the_minimum_of_the_smoothed_loss(slope, intercept, scale):
    from scipy.optimize import minimize

    logits, labels, weights = drawn(slope, intercept, scale=scale)
    low, high = smoothed_targets(labels, weights)
    targets = np.where(labels > 0.5, high, low)

    def loss(at):
        scores = at[0] / scale * logits + at[1]
        return np.average(softplus(scores) - targets * scores, weights=weights)

    peer = minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-7}).x
    found = Platt.fit(logits, labels, weights)
    assert (found.slope * scale, found.intercept) == pytest.approx(tuple(peer), abs=2e-4)


def test_a_model_that_is_calibrated_is_left_about_as_it_is():
    found = Platt.fit(*drawn(1.0, 0.0, rows=50_000))
    assert (found.slope, found.intercept) == pytest.approx((1.0, 0.0), abs=0.05)


def test_rows_that_are_told_apart_have_a_finite_fit():
    logits = np.array([-2.0, -1.0, 1.0, 2.0])
    found = Platt.fit(logits, (logits > 0).astype(float), np.ones(4))
    assert sigmoid(found.slope * logits + found.intercept) == pytest.approx([0.25, 0.25, 0.75, 0.75], abs=0.2)
    assert np.isfinite([found.slope, found.intercept]).all()


@given(st.floats(-100, 100), st.integers(1, 30), st.integers(1, 30))
def test_scores_that_are_alike_get_their_share(score, negatives, positives):
    labels = np.repeat([0.0, 1.0], [negatives, positives])
    weights = np.ones(len(labels))
    low, high = smoothed_targets(labels, weights)
    found = Platt.fit(np.full(len(labels), score), labels, weights)
    share = (negatives * low + positives * high) / len(labels)
    assert found.probabilities(np.array([score])) == pytest.approx([share], abs=1e-6)
