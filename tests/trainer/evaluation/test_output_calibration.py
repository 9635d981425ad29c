"""Calibration as validation rows are evaluated: a missing fit is said, figures are of rows that were not fitted."""

import math

import numpy as np
import pytest

from trainer.evaluation.output_calibration import OutputCalibration, Sample


def drawn(rows=400):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=rows) * 4
    return Sample(logits, (rng.random(rows) < 1 / (1 + np.exp(-logits / 4))).astype(float))


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_test_rows_are_measured_by_the_fit_of_validation_rows(kind):
    calibration = OutputCalibration(kind)
    validation = calibration.measured("validation", "", drawn())
    test = calibration.measured("test", "", drawn(401).where(np.arange(401) > 100))
    for figures in (validation, test):
        assert figures["ece_calibrated"] < figures["ece"] / 2
        assert figures["logloss_calibrated"] < figures["logloss"]
    assert list(calibration.problems()) == []
    # To its own rows an isotonic curve fits exactly; rows of the other half are what its figures are of.
    assert kind == "platt" or validation["ece_calibrated"] > 0.005


def test_one_class_alone_is_said_with_the_remedy_and_leaves_probabilities():
    calibration = OutputCalibration("isotonic")
    sample = drawn()._replace(labels=np.ones(400))
    figures = calibration.measured("validation", "click", sample)
    assert math.isnan(figures["logloss_calibrated"])
    (problem,) = calibration.problems()
    assert problem.startswith("probabilities of click are not calibrated: the validation rows have only labels of 1")
    assert calibration.as_json() == {"click": {"kind": "none", "reason": problem.partition(": ")[2]}}
    after = calibration.measured("test", "click", drawn())
    assert after["logloss_calibrated"] == pytest.approx(after["logloss"])
