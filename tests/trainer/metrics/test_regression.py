"""RMSE and MAE against scikit-learn's."""

import math

import numpy as np
import pytest

from trainer.metrics import mae, rmse


def test_errors_equal_scikit_learns_with_weights_too():
    from sklearn.metrics import mean_absolute_error, root_mean_squared_error

    rng = np.random.default_rng(0)
    labels, weights = rng.integers(1, 6, 500), rng.integers(0, 4, 500)
    predictions = (labels + rng.normal(size=500)).astype(np.float32)
    for w in (None, weights):
        expected = root_mean_squared_error(labels, predictions.astype(float), sample_weight=w)
        assert rmse(predictions, labels, w) == pytest.approx(expected, rel=1e-12)
        expected = mean_absolute_error(labels, predictions.astype(float), sample_weight=w)
        assert mae(predictions, labels, w) == pytest.approx(expected, rel=1e-12)


def test_nothing_has_no_error_and_nan_stays():
    assert math.isnan(rmse(np.array([]), np.array([])))
    assert math.isnan(mae(np.array([]), np.array([])))
    assert math.isnan(rmse(np.array([1.0, np.nan]), np.array([1.0, 1.0])))
