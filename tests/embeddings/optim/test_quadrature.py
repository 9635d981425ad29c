"""Gauss rules from moments: exact for polynomials, and what they do where there are fewer points than nodes."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.optim.quadrature import gauss_rule, moments

WEIGHTS, POINTS = 0.9 ** np.arange(60)[None], np.linspace(0.0, 2.0, 60)[None]


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_rules_have_the_moments_of_the_sum(count):
    sums = moments(WEIGHTS, POINTS, 2 * count)
    weights, nodes = gauss_rule(sums)
    assert (weights > 0.0).all()
    assert ((nodes > 0.0) & (nodes < 2.0)).all()
    np.testing.assert_allclose(moments(weights, nodes, 2 * count), sums, rtol=1e-7)


@pytest.mark.parametrize("count", [2, 4])
def test_points_may_lie_below_zero(count):
    weights, nodes = gauss_rule(moments(WEIGHTS, -POINTS, 2 * count))
    mirrored, above = gauss_rule(moments(WEIGHTS, POINTS, 2 * count))
    order, other = np.argsort(nodes[0]), np.argsort(-above[0])
    np.testing.assert_allclose(nodes[0][order], -above[0][other])
    np.testing.assert_allclose(weights[0][order], mirrored[0][other])


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("points", [[], [0.0], [0.7], [0.0, 0.3], [0.0, 0.1, 0.25]])
def test_fewer_points_than_nodes_are_found_themselves(count, points):
    ones = np.ones((1, len(points)))
    weights, nodes = gauss_rule(moments(ones, np.array([points]).reshape(1, -1), 2 * count))
    assert np.isfinite(weights).all()
    assert np.isfinite(nodes).all()
    found = float((weights * np.exp(nodes)).sum())
    expected = sum(np.exp(point) for point in points)
    assert found == pytest.approx(expected, rel=1e-3 if count == 2 and len(points) > 2 else 1e-6, abs=1e-12)
