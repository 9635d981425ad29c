"""Metrics of ranks against definitions written out over ranked lists, and NDCG against scikit-learn's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import Ranking

# By user: which places of a list of 12 hold relevant items, and how many relevant items are not in the list.
USERS = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 3)).filter(lambda u: any(u[0]) or u[1]),
    min_size=1,
    max_size=8,
)


def ranking_of(users):
    ranks = [(rank, number) for number, (places, _) in enumerate(users) for rank in range(12) if places[rank]]
    return Ranking(
        np.array([rank for rank, _ in ranks], float),
        np.array([number for _, number in ranks], np.int64),
        np.array([sum(places) + missing for places, missing in users]),
    )


@given(USERS, st.integers(1, 15))
def test_metrics_at_k_are_what_the_ranked_list_says(users, k):
    found = ranking_of(users)
    for number, (places, missing) in enumerate(users):
        hits = sum(places[:k])
        gain = sum(1 / math.log2(rank + 2) for rank in range(min(k, 12)) if places[rank])
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, sum(places) + missing)))
        first = places.index(True) if any(places) else math.inf
        assert found.precision(k)[number] == hits / k
        assert found.recall(k)[number] == hits / (sum(places) + missing)
        assert found.hit_rate(k)[number] == (hits > 0)
        assert found.ndcg(k)[number] == pytest.approx(gain / ideal, rel=1e-12)
        assert found.mrr()[number] == 1 / (first + 1)


@given(USERS, st.integers(1, 12))
def test_ndcg_equals_scikit_learns(users, k):
    from sklearn.metrics import ndcg_score

    users = [(places, 0) for places, _ in users if any(places)]
    if not users:
        return
    relevance = np.array([places for places, _ in users], float)
    expected = ndcg_score(relevance, np.tile(-np.arange(12.0), (len(users), 1)), k=k)
    assert ranking_of(users).ndcg(k).mean() == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 12))
def test_with_one_relevant_item_recall_is_the_hit_rate(ranks, k):
    found = Ranking.of_single(np.array(ranks))
    share = np.mean([rank < k for rank in ranks])
    assert found.recall(k).mean() == found.hit_rate(k).mean() == share
    assert found.precision(k).mean() * k == pytest.approx(share)
    assert found.ndcg(k).mean() == pytest.approx(
        np.mean([1 / math.log2(r + 2) if r < k else 0 for r in ranks]), rel=1e-12
    )
    assert found.mrr().mean() == pytest.approx(np.mean([1 / (rank + 1) for rank in ranks]))


def test_unknown_ranks_give_no_figure():
    found = Ranking.of_single(np.array([0.0, np.nan]))
    assert np.isnan(found.values("hit_rate", 10)).all()
    assert np.isnan(found.values("mrr", None)).all()
    assert np.isnan(found.values("ndcg", 10)).all()


def test_an_item_that_was_not_ranked_is_not_found():
    found = Ranking(np.array([0.0]), np.array([1]), np.array([2, 1]))
    assert found.recall(5).tolist() == [0.0, 1.0]
    assert found.mrr().tolist() == [0.0, 1.0]
