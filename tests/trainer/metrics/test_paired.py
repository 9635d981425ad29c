"""Differences of two models on the same rows: values as elsewhere, intervals that hold what they claim."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, roc_auc_score, root_mean_squared_error

from trainer.metrics.classification import logloss, sigmoid
from trainer.metrics.paired import PAIRED, interval, paired_auc, standard_error
from trainer.metrics.pointwise import Rows


def drawn(num_rows: int, seed: int, ties: bool = False):
    """Labels, and scores of two models that both know something of them."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_rows) < 0.3).astype(np.float64)
    scores = [labels * strength + rng.normal(size=num_rows) for strength in (0.5, 0.9)]
    return labels, *([one.round(0) if ties else one for one in scores])


def plain_delong(scores, labels):
    """AUC and the placements of positives and negatives, by every pair."""
    positives, negatives = scores[labels > 0.5], scores[labels < 0.5]
    wins = (positives[:, None] > negatives) + 0.5 * (positives[:, None] == negatives)
    return wins.mean(), wins.mean(axis=1), wins.mean(axis=0)


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_delongs_by_every_pair(ties):
    labels, first, second = drawn(400, 1, ties)
    paired = paired_auc(first, second, labels)
    areas, of_positives, of_negatives = zip(*(plain_delong(one, labels) for one in (first, second)), strict=True)
    assert paired.first == pytest.approx(roc_auc_score(labels, first), abs=1e-12)
    assert paired.second == pytest.approx(areas[1], abs=1e-12)
    contrast = np.array([-1.0, 1.0])
    variance = contrast @ np.cov(of_positives) @ contrast / (labels > 0.5).sum()
    variance += contrast @ np.cov(of_negatives) @ contrast / (labels < 0.5).sum()
    low, high = interval(paired, level=0.9)
    assert high - low == pytest.approx(2 * 1.6448536269514722 * variance**0.5, rel=1e-10)
    assert (low + high) / 2 == pytest.approx(areas[1] - areas[0], abs=1e-12)


def test_values_are_those_of_the_metrics_and_less_loss_is_better():
    labels, first, second = drawn(500, 4)
    of_logits = [Rows(one.astype(np.float32), labels.astype(np.float32)) for one in (first, second)]
    of_values = [Rows(one.astype(np.float32), labels.astype(np.float32), is_logit=False) for one in (first, second)]
    found = PAIRED["logloss"](*of_logits)
    assert found.first == pytest.approx(logloss(of_logits[0].scores, labels))
    assert found.improvement == pytest.approx(found.first - found.second)
    assert PAIRED["rmse"](*of_values).first == pytest.approx(root_mean_squared_error(labels, of_values[0].scores))
    assert PAIRED["mae"](*of_values).second == pytest.approx(mean_absolute_error(labels, of_values[1].scores))
    assert PAIRED["rmse"](*of_logits).first == pytest.approx(
        root_mean_squared_error(labels, sigmoid(of_logits[0].scores))
    )
    for name in ("rmse", "mae"):
        found = PAIRED[name](*of_values)
        assert found.improvement == pytest.approx(found.first - found.second)


@pytest.mark.parametrize("name", sorted(PAIRED))
def test_nineteen_of_twenty_intervals_hold_the_improvement(name):
    """Models differ by a known amount; rows of a user go together, so users are the units."""

    def rows(num_users, seed):
        rng = np.random.default_rng(seed)
        users = np.repeat(np.arange(num_users), 30)
        taste = rng.normal(size=num_users)[users]
        labels = (rng.random(len(users)) < sigmoid(taste - 0.5)).astype(np.float32)
        mood = rng.normal(size=num_users)[users]
        scores = taste + 0.7 * mood, taste + 0.5 * rng.normal(size=num_users)[users] - 0.2
        return users, [Rows(one.astype(np.float32), labels) for one in scores]

    truth = PAIRED[name](*rows(30_000, 0)[1]).improvement
    by_user = by_row = 0
    for seed in range(1, 201):
        users, both = rows(80, seed)
        paired = PAIRED[name](*both)
        low, high = interval(paired, users)
        by_user += low <= truth <= high
        low, high = interval(paired)
        by_row += low <= truth <= high
    # 190 are expected, with a standard deviation of 3.
    assert 178 <= by_user <= 199
    assert by_row < 175


def test_equal_models_differ_by_nothing():
    labels, first, _ = drawn(200, 5)
    assert interval(paired_auc(first, first, labels)) == (0.0, 0.0)


@pytest.mark.parametrize("name", sorted(PAIRED))
def test_errors_of_both_values_are_those_of_resampled_users(name):
    rng = np.random.default_rng(3)
    users = np.repeat(np.arange(300), 20)
    taste = 1.5 * rng.normal(size=300)[users]
    labels = (rng.random(len(users)) < sigmoid(taste)).astype(np.float32)
    mood = rng.normal(size=300)[users]
    scores = [(taste + noise).astype(np.float32) for noise in (1.2 * mood, 0.4 * rng.normal(size=len(users)))]
    paired = PAIRED[name](*(Rows(one, labels) for one in scores))
    for units, group in ((users, 20), (None, 1)):
        starts, values = np.arange(0, len(users), group), []
        for _ in range(300):
            drawn = (rng.choice(starts, len(starts))[:, None] + np.arange(group)).ravel()
            resampled = PAIRED[name](*(Rows(one[drawn], labels[drawn]) for one in scores))
            values.append((resampled.first, resampled.second))
        for spread, influence in zip(np.std(values, axis=0), paired.influences, strict=True):
            assert standard_error(influence, units) == pytest.approx(spread, rel=0.15)
