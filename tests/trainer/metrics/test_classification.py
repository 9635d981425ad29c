"""AUC against its definition over all pairs, by user too; logloss and normalized entropy against probabilities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import auc, gauc, logloss, normalized_entropy
from trainer.metrics.classification import AucSum, auc_by_group, entropy, logloss_sum, sigmoid
from trainer.metrics.counts import Counts, by_score

ROWS = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=60)


def arrays_of(rows):
    return np.array([score / 2 for score, *_ in rows]), np.array([float(row[1]) for row in rows])


def auc_by_pairs(scores, labels):
    positive, negative = scores[labels == 1], scores[labels == 0]
    if not positive.size or not negative.size:
        return math.nan
    above = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    return above / (positive.size * negative.size)


@given(ROWS)
def test_auc_is_the_share_of_ordered_pairs(rows):
    scores, labels = arrays_of(rows)
    # Exact: integers until the last division.
    np.testing.assert_equal(auc(scores, labels), auc_by_pairs(scores, labels))


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


@pytest.mark.parametrize("of", [auc, lambda scores, labels: gauc(scores, labels, np.zeros(len(scores), np.int64))])
def test_auc_of_nan_scores_of_one_class_and_of_nothing_is_nan(of):
    assert math.isnan(of(np.array([0.0, np.nan]), np.array([0, 1])))
    assert math.isnan(of(np.array([0.0, 1.0]), np.array([1, 1])))
    assert math.isnan(of(np.array([]), np.array([])))


@given(ROWS, st.integers(1, 5))
def test_auc_of_pieces_is_that_of_the_whole(rows, num_pieces):
    scores, labels = arrays_of(rows)
    whole = by_score(scores, labels)
    pieces = AucSum()
    for part in zip(*(np.array_split(array, num_pieces) for array in whole), strict=True):
        pieces.add(Counts(*part))
    np.testing.assert_equal(pieces.value(), auc(scores, labels))
    assert (pieces.num_rows, pieces.num_positives) == (len(labels), int(labels.sum()))


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40))
def test_a_weight_is_so_many_rows(rows):
    scores, labels = arrays_of(rows)
    weights = np.array([weight for *_, weight in rows])
    repeated = np.repeat(scores, weights), np.repeat(labels, weights)
    np.testing.assert_equal(auc(scores, labels, weights), auc(*repeated))
    np.testing.assert_allclose(logloss(scores, labels, weights), logloss(*repeated), rtol=1e-12)


# --- by user ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.integers(-1, 4)), min_size=1, max_size=60))
def test_gauc_is_the_mean_of_users_aucs_by_impressions(rows):
    scores, labels = arrays_of(rows)
    users = np.array([user for *_, user in rows])
    total = weight = 0.0
    expected = {}
    for user in range(5):
        own = auc_by_pairs(scores[users == user], labels[users == user])
        if not math.isnan(own):
            total, weight = total + (users == user).sum() * own, weight + (users == user).sum()
            expected[user] = own
    np.testing.assert_allclose(gauc(scores, labels, users), total / weight if weight else math.nan, rtol=1e-13)
    groups, values, impressions = auc_by_group(scores, labels, users)
    assert dict(zip(groups.tolist(), values.tolist(), strict=True)) == expected
    assert impressions.tolist() == [(users == user).sum() for user in expected]


def test_gauc_of_users_with_one_row_is_nan_and_one_user_has_the_auc():
    rng = np.random.default_rng(2)
    scores, labels = np.round(rng.normal(size=400), 1), rng.integers(0, 2, 400)
    assert math.isnan(gauc(scores, labels, np.arange(400)))
    assert gauc(scores, labels, np.full(400, 7)) == auc(scores, labels)


def test_gauc_does_not_see_what_separates_users():
    """A score of the user alone has an AUC, and no GAUC: within a user all rows are equal."""
    rng = np.random.default_rng(3)
    users = rng.integers(0, 30, 3000)
    labels = rng.random(3000) < (users + 1) / 32
    assert auc(users * 1.0, labels) > 0.7
    assert gauc(users * 1.0, labels, users) == 0.5


# --- logloss ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=40))
def test_logloss_equals_the_textbook_formula(rows):
    logits = np.array([logit for logit, _ in rows])
    labels = np.array([float(label) for _, label in rows])
    p = 1 / (1 + np.exp(-logits))
    expected = -np.mean(np.where(labels == 1, np.log(p), np.log1p(-p)))
    assert logloss(logits, labels) == pytest.approx(expected, rel=1e-3, abs=1e-12)  # 1 - p rounds at logit 30
    assert logloss_sum(by_score(logits, labels)) == pytest.approx(logloss(logits, labels) * len(rows), rel=1e-12)


def test_logloss_of_large_logits_is_finite():
    assert logloss(np.array([1000.0, -1000.0]), np.array([0.0, 0.0])) == 500.0
    assert sigmoid(np.array([1000.0, -1000.0, 0.0])).tolist() == [1.0, 0.0, 0.5]


def test_logloss_of_nothing_is_nan():
    assert math.isnan(logloss(np.array([]), np.array([])))
    assert math.isnan(normalized_entropy(np.array([]), np.array([])))


def test_normalized_entropy_is_one_for_the_base_rate_and_equals_its_definition():
    from sklearn.metrics import log_loss

    rng = np.random.default_rng(4)
    logits, labels = rng.normal(-1, 1, 1000), (rng.random(1000) < 0.25).astype(float)
    p = labels.mean()
    assert normalized_entropy(np.full(1000, math.log(p / (1 - p))), labels) == pytest.approx(1.0, rel=1e-12)
    base = log_loss(labels, np.full(1000, p))
    assert normalized_entropy(logits, labels) == pytest.approx(log_loss(labels, sigmoid(logits)) / base, rel=1e-12)
    assert entropy(0.5) == pytest.approx(math.log(2), rel=1e-15)


def test_normalized_entropy_of_one_class_is_nan():
    assert math.isnan(normalized_entropy(np.zeros(3), np.ones(3)))
    assert math.isnan(normalized_entropy(np.zeros(3), np.zeros(3)))
