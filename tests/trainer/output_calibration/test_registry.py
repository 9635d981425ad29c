"""Every kind of output calibrator: weights, JSON, rows that allow no fit."""

import json
from typing import get_args

import numpy as np
import pytest

from trainer.output_calibration.base import Uncalibrated
from trainer.output_calibration.registry import CALIBRATORS, as_json, fit, of_json
from trainer.spec import JobSpec

LOGITS = np.random.default_rng(0).normal(size=200).round(1).astype(np.float32)
LABELS = (np.random.default_rng(1).random(200) < 0.3 + 0.2 * np.sign(LOGITS)).astype(np.float32)
FITTED = [kind for kind in CALIBRATORS if kind != "none"]


def test_jobs_name_every_kind():
    assert get_args(JobSpec.model_fields["output_calibration"].annotation) == tuple(CALIBRATORS)


@pytest.mark.parametrize("kind", CALIBRATORS)
def test_json_gives_the_same_probabilities(kind):
    found = fit(kind, LOGITS, LABELS)
    again = of_json(json.loads(json.dumps(as_json(found))))
    assert again == found
    assert again.probabilities(LOGITS).tolist() == found.probabilities(LOGITS).tolist()


@pytest.mark.parametrize("kind", FITTED)
def test_a_row_of_weight_2_is_two_rows_and_of_weight_0_none(kind):
    times = np.random.default_rng(2).integers(0, 3, 200)
    weighed = fit(kind, LOGITS, LABELS, times)
    repeated = fit(kind, np.repeat(LOGITS, times), np.repeat(LABELS, times))
    assert weighed.probabilities(LOGITS) == pytest.approx(repeated.probabilities(LOGITS), abs=1e-9)


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize(
    ("labels", "weights", "reason"),
    [
        (np.ones(200), None, "only labels of 1: give them a larger share"),
        (np.zeros(200), None, "only labels of 0"),
        (LABELS, LABELS, "only labels of 1"),
        (LABELS, np.zeros(200), "no row"),
    ],
)
def test_rows_of_one_class_leave_the_model_s_own_probabilities(kind, labels, weights, reason):
    found = fit(kind, LOGITS, labels, weights)
    assert isinstance(found, Uncalibrated)
    assert f"the validation rows have {reason}" in found.reason


def test_scores_that_are_not_finite_are_not_fitted():
    found = fit("platt", np.array([0.0, np.nan]), np.array([0.0, 1.0]))
    assert found == Uncalibrated("scores of validation rows are not finite")
