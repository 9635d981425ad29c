"""Figures 3 and 5 of SSE's paper, against their definitions summed out."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.sse import figures
from benchmarks.papers.sse.figures import (
    EDGES,
    NEAR,
    PROBABILITIES,
    QUANTILES,
    explained,
    nearness,
    projected,
    simulated_complexity,
    spread,
)


@pytest.fixture
def mf():
    """Rows of 6 users and 5 items, of which the last of each is in no example, and 40 examples."""
    draw = np.random.default_rng(3)
    user, item = draw.integers(0, 5, 40), draw.integers(0, 4, 40)
    return draw.normal(size=(6, 3)), draw.normal(size=(5, 3)), user, item, draw.normal(3.0, 1.0, 40)


def quantiles_of(smoothed, seed):
    signs = np.random.default_rng(seed).integers(0, 2, (figures.NUM_DRAWS, 40), dtype=np.int8) * 2.0 - 1.0
    return np.quantile(np.abs(signs @ smoothed) / 40, QUANTILES)


@pytest.mark.parametrize("place", range(len(PROBABILITIES)))
def test_the_complexity_is_the_sum_over_all_swaps(mf, place):
    users, items, user, item, label = mf
    p = PROBABILITIES[place]
    plain = np.array([(y - users[u] @ items[i]) ** 2 for u, i, y in zip(user, item, label, strict=True)])
    own, theirs = np.zeros(40), np.zeros(40)
    for row, (u, i, y) in enumerate(zip(user, item, label, strict=True)):
        for k in range(5):
            for m in range(4):
                chance = ((1 - p) * (k == u) + p / 5) * ((1 - p) * (m == i) + p / 4)
                own[row] += chance * (y - users[k] @ items[m]) ** 2
        of_user, of_item = plain[user == u].mean(), plain[item == i].mean()
        theirs[row] = (1 - p) ** 2 * plain[row] + p * (1 - p) * (of_user + of_item) + p**2 * plain.mean()
    found = simulated_complexity(users, items, user, item, label, seed=1)
    assert found["own"][place] == pytest.approx(quantiles_of(own, 1), rel=1e-9)
    assert found["theirs"][place] == pytest.approx(quantiles_of(theirs, 1), rel=1e-9)


def test_more_swaps_to_rows_with_labels_of_their_own_leave_less(mf):
    medians = [one[1] for one in simulated_complexity(*mf)["theirs"]]
    assert medians[-1] < 0.8 * medians[0]


def test_components_of_rows_in_a_plane():
    draw = np.random.default_rng(0)
    axes = np.linalg.qr(draw.normal(size=(8, 8)))[0][:2]
    rows = (draw.normal(size=(5000, 2)) * (3.0, 1.0)) @ axes + 7.0
    assert explained(rows, 3) == pytest.approx([0.9, 0.1, 0.0], abs=0.01)


def test_rows_are_projected_on_what_spreads_them_with_the_longer_tail_on_the_right():
    draw = np.random.default_rng(0)
    axes = np.linalg.qr(draw.normal(size=(8, 8)))[0][:2]
    drawn = draw.exponential(size=(5000, 2)) * (-3.0, 1.0)
    places = projected(drawn @ axes + 7.0)
    centred = (drawn - drawn.mean(axis=0)) * (-1.0, 1.0)
    assert np.mean(np.sum(places**2, axis=1)) == pytest.approx(1.0)
    assert places == pytest.approx(centred / np.sqrt(10.0), abs=0.15)


def test_the_spread_counts_every_place_once():
    assert spread(np.array([-9.0, -1.9, 0.1, 9.0])) == [0.5, *[0.0] * 7, 0.25, *[0.0] * 6, 0.25]
    assert len(spread(np.zeros(3))) == len(EDGES) - 1


def test_rows_in_two_holes_are_near_their_centres():
    draw = np.random.default_rng(0)
    round_ones = draw.normal(size=(2000, 8))
    holes = np.where(draw.random((2000, 1)) < 0.3, 5.0, -5.0) + 0.05 * round_ones
    tenth = NEAR.index(0.1)
    assert nearness(holes)[tenth] == 1.0
    assert nearness(round_ones)[tenth] == 0.0
    assert np.all(np.diff(nearness(round_ones)) >= 0)
    assert nearness(np.ones((4, 2)) * np.arange(4)[:, None])[-1] == 1.0
