"""Bootstrap: its draws are functions of the seed, and its interval has the width that theory gives."""

import math

import numpy as np
import pytest

from trainer.metrics import auc
from trainer.metrics.counts import Blocks
from trainer.metrics.intervals import bootstrap, multiplicities, percentiles


def test_draws_are_a_function_of_seed_and_replicate():
    first = multiplicities(100, 3, 7)
    assert first.sum() == 100
    assert np.array_equal(first, multiplicities(100, 3, 7))
    assert not np.array_equal(first, multiplicities(100, 3, 8))
    assert not np.array_equal(first, multiplicities(100, 4, 7))
    counted = np.concatenate([multiplicities(50, 0, replicate) for replicate in range(400)])
    assert counted.mean() == 1.0
    assert counted.var() == pytest.approx(1 - 1 / 50, rel=0.05)  # binomial(50, 1/50)


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(0).normal(2.0, 3.0, 400)
    (interval,) = bootstrap(
        lambda w: {"mean": float(np.average(values, weights=w))}, 400, replicates=1000, seed=1
    ).values()
    half = 1.96 * values.std() / 20
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)


def test_interval_of_the_auc_is_that_of_hanley_and_mcneil():
    rng = np.random.default_rng(2)
    labels = np.repeat([0.0, 1.0], [500, 300])
    scores = rng.normal(labels, 1.0)
    blocks = Blocks(scores, labels)

    def statistic(weights):
        from trainer.metrics.classification import AucSum

        return {"auc": AucSum().add(blocks.counts(weights)).value()}

    low, high = bootstrap(statistic, 800, replicates=400, seed=0)["auc"]
    a = auc(scores, labels)
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    error = math.sqrt((a * (1 - a) + 299 * (q1 - a * a) + 499 * (q2 - a * a)) / (300 * 500))
    assert low < a < high
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_what_has_no_value_in_a_replicate_is_left_out():
    assert percentiles(np.array([1.0, math.nan, 1.0]), 0.9) == (1.0, 1.0)
    assert all(math.isnan(end) for end in percentiles(np.array([math.nan]), 0.9))
    assert bootstrap(lambda w: {"x": 1.0}, 0, replicates=5, seed=0) == {}
