"""AUC against its definition over all pairs; logloss against probabilities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import auc, logloss


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=60))
def test_auc_is_the_share_of_ordered_pairs(rows):
    scores = np.array([score / 2 for score, _ in rows])
    labels = np.array([float(label) for _, label in rows])
    positive, negative = scores[labels == 1], scores[labels == 0]
    found = auc(scores, labels)
    if not positive.size or not negative.size:
        assert math.isnan(found)
        return
    above = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    assert found == above / (positive.size * negative.size)  # exact: integers until the last division


def test_auc_equals_scikit_learn_on_many_rows():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=20_000), 2)
    labels = (rng.random(20_000) < 0.3).astype(np.float32)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_does_not_depend_on_order_or_scale():
    rng = np.random.default_rng(1)
    scores, labels = rng.normal(size=500), rng.integers(0, 2, 500)
    order = rng.permutation(500)
    assert auc(scores, labels) == auc(scores[order] * 7 - 3, labels[order])


def test_auc_of_nan_scores_is_nan():
    assert math.isnan(auc(np.array([0.0, np.nan]), np.array([0, 1])))


@given(st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=40))
def test_logloss_equals_the_textbook_formula(rows):
    logits = np.array([logit for logit, _ in rows])
    labels = np.array([float(label) for _, label in rows])
    p = 1 / (1 + np.exp(-logits))
    expected = -np.mean(np.where(labels == 1, np.log(p), np.log1p(-p)))
    assert logloss(logits, labels) == pytest.approx(expected, rel=1e-3, abs=1e-12)  # 1 - p rounds at logit 30


def test_logloss_of_large_logits_is_finite():
    assert logloss(np.array([1000.0, -1000.0]), np.array([0.0, 0.0])) == 500.0


def test_logloss_of_nothing_is_nan():
    assert math.isnan(logloss(np.array([]), np.array([])))
