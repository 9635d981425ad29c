"""Counts of a split in pieces: exactly those of one array, whatever the scores, pieces and ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.by_network import exchanges_by_network
from trainer.metrics import auc, calibration_curve, logloss
from trainer.metrics.calibration import EqualMass
from trainer.metrics.classification import AucSum, logloss_sum, sigmoid
from trainer.metrics.counts import by_score
from trainer.metrics.streaming import at_owners, packed_rows, pieces

FLOATS = st.floats(width=32, allow_nan=False)
# Scores that share the upper half of their bits, scores far apart, and both zeros.
SCORES = st.one_of(FLOATS, st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.integers(0, 300).map(lambda i: 1 + i * 2**-23))


def assert_same_counts(found, scores, labels):
    whole = by_score(scores.astype(np.float64), labels)
    for mine, theirs in zip((np.concatenate(parts) for parts in zip(*found, strict=True)), whole, strict=True):
        assert np.array_equal(mine, theirs)


@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=60), st.integers(1, 70))
def test_pieces_are_the_counts_of_one_array(rows, piece_rows):
    scores = np.array([score for score, _ in rows], np.float32)
    labels = np.array([float(label) for _, label in rows])
    found = list(pieces(packed_rows(scores, labels), None, piece_rows))
    assert_same_counts(found, scores, labels)
    for counts in found:
        # More only where one upper half of the keys has more.
        halves = set((counts.scores.astype(np.float32) + np.float32(0)).view(np.uint32) >> 16)
        assert counts.num_rows <= piece_rows or len(halves) == 1


def test_metrics_of_pieces_equal_scikit_learns():
    from sklearn.metrics import log_loss, roc_auc_score

    rng = np.random.default_rng(0)
    scores = rng.normal(-1, 2, 100_000).astype(np.float32)
    scores[::7] = np.round(scores[::7], 1)
    labels = (rng.random(100_000) < sigmoid(scores)).astype(np.float32)
    area, losses, bins = AucSum(), 0.0, EqualMass(len(scores))
    for counts in pieces(packed_rows(scores, labels), None, 5000):
        area.add(counts)
        losses += logloss_sum(counts)
        bins.add(counts._replace(scores=sigmoid(counts.scores)))
    assert area.value() == auc(scores, labels)
    assert area.value() == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert losses / len(scores) == pytest.approx(log_loss(labels, sigmoid(scores)), rel=1e-9)
    assert losses / len(scores) == pytest.approx(logloss(scores, labels), rel=1e-12)
    for mine, theirs in zip(bins.curve(), calibration_curve(sigmoid(scores), labels), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9)


def test_equal_scores_take_no_more_than_one_row_and_nothing_gives_nothing():
    packed = packed_rows(np.full(10_000, 0.25, np.float32), np.arange(10_000) % 4 == 0)
    (counts,) = pieces(packed, None, 10)
    assert (counts.scores.tolist(), counts.totals.tolist(), counts.positives.tolist()) == ([0.25], [10_000], [2500])
    assert list(pieces(packed[:0], None)) == []
    assert math.isnan(AucSum().value())


# --- over ranks ------------------------------------------------------------------------------------------------------


def share_of(rank, world_size, seed):
    """Rank 1 has nothing for one seed in three."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 3000))
    scores = rng.normal(size=count).astype(np.float32)
    scores[rng.random(count) < 0.5] = np.float32(0.5)
    labels = rng.integers(0, 2, count).astype(np.float32)
    users = rng.integers(0, 50, count)
    owner = np.zeros(count, int) if seed % 3 == 0 else rng.integers(0, world_size, count)
    mine = owner == rank
    return (scores, labels, users), tuple(array[mine] for array in (scores, labels, users))


def counted_on_ranks(seeds):
    found = []
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_group()
    for seed in seeds:
        _, (mine, own_labels, own_users) = share_of(rank, world_size, seed)
        parts = [
            tuple(np.array(array) for array in counts) for counts in pieces(packed_rows(mine, own_labels), group, 700)
        ]
        columns = np.stack([packed_unsorted(mine), own_users, own_labels.astype(np.int64)])
        found.append((parts, at_owners("test rows", columns, own_users, group)))
    return found


def packed_unsorted(scores):
    return np.asarray(scores).view(np.int32).astype(np.int64)


def counted_by_network(seeds):
    with exchanges_by_network():
        return counted_on_ranks(seeds)


@pytest.mark.parametrize("function", [counted_on_ranks, counted_by_network])
def test_two_ranks_count_what_one_array_has(ranks, function):
    seeds = list(range(6))
    told = ranks(2).run(function, seeds)
    for number, seed in enumerate(seeds):
        (scores, labels, users), _ = share_of(0, 2, seed)
        parts = told[0][number][0]
        assert len(parts) > 1 or len(scores) < 700
        assert_same_counts(parts, scores, labels)
        assert all(len(counts[0]) == 0 for counts in told[1][number][0])
        rows = [answer[number][1] for answer in told]
        for rank in (0, 1):
            assert set(rows[rank][1] % 2) <= {rank}
        together = np.concatenate(rows, axis=1)
        expected = np.stack([packed_unsorted(scores), users, labels.astype(np.int64)])
        assert sorted(together.T.tolist()) == sorted(expected.T.tolist())


@settings(max_examples=20)
@given(st.lists(FLOATS, min_size=2, max_size=40, unique=True))
def test_keys_are_ordered_as_scores_are(scores):
    scores = np.array(scores, np.float32)
    packed = packed_rows(scores, np.zeros(len(scores)))
    assert np.array_equal(packed >> 1, np.sort(packed >> 1))
    (counts,) = pieces(packed, None)
    assert np.array_equal(counts.scores, np.unique(scores.astype(np.float64)))
