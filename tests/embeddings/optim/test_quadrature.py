"""Gauss rules from moments: exact for polynomials, with many nodes too, and with fewer points than nodes."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.optim.quadrature import Basis, gauss_rule, moments, orthogonal_basis

WEIGHTS, POINTS = 0.9 ** np.arange(60)[None], np.linspace(0.0, 2.0, 60)[None]


BASIS = orthogonal_basis(WEIGHTS[0] * 1.01 ** np.arange(60), POINTS[0], 64)
"""Of a sum that is much like it."""


def test_polynomials_are_orthogonal_and_monic():
    weights, points = WEIGHTS[0], POINTS[0]
    basis = orthogonal_basis(weights, points, 16)
    found = np.stack([moments(np.eye(60), points[None], basis, 16)])[0]
    products = (found * weights) @ found.T
    scale = np.sqrt(np.diag(products))
    np.testing.assert_allclose(products / scale / scale[:, None], np.eye(16), atol=1e-9)
    assert basis.unit == pytest.approx(
        np.sqrt(np.average((points - np.average(points, weights=weights)) ** 2, weights=weights))
    )
    # p_2 from its values at three points.
    x = points[[0, 20, 50]] / basis.unit
    assert np.polyfit(x, found[2][[0, 20, 50]], 2)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("basis", [BASIS, BASIS.powers()], ids=["orthogonal", "powers"])
@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_rules_have_the_moments_of_the_sum(count, basis):
    sums = moments(WEIGHTS, POINTS, basis, 2 * count)
    weights, nodes = gauss_rule(sums, basis)
    assert (weights > 0.0).all()
    assert ((nodes > 0.0) & (nodes < 2.0)).all()
    for exponent in range(2 * count):
        expected = (WEIGHTS * POINTS**exponent).sum()
        assert (weights * nodes**exponent).sum() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("count", "bound"), [(12, 1e-6), (16, 1e-7), (24, 1e-10), (32, 1e-11)])
def test_many_nodes_say_more_than_powers_can(count, bound):
    """Of a sum whose points spread over 20 and whose weights fade: what an idle row's are where beta2 is small."""
    steps = np.arange(400)
    weights, points = (0.92**steps * 1.001**steps)[None], (0.05 * steps)[None]
    exact = (weights / (1.0 + np.exp(points - 3.0))).sum()

    def error(basis):
        found, nodes = gauss_rule(moments(weights, points, basis, 2 * count), basis)
        return abs((found / (1.0 + np.exp(nodes - 3.0))).sum() - exact)

    basis = orthogonal_basis(0.92**steps, points[0], 64)
    assert error(basis) < bound
    if count > 16:
        assert error(basis.powers()) > 10 * bound


@pytest.mark.parametrize("count", [2, 4])
def test_points_may_lie_below_zero(count):
    below = Basis(BASIS.unit, -BASIS.means, BASIS.squares)
    weights, nodes = gauss_rule(moments(WEIGHTS, -POINTS, below, 2 * count), below)
    mirrored, above = gauss_rule(moments(WEIGHTS, POINTS, BASIS, 2 * count), BASIS)
    order, other = np.argsort(nodes[0]), np.argsort(-above[0])
    np.testing.assert_allclose(nodes[0][order], -above[0][other])
    np.testing.assert_allclose(weights[0][order], mirrored[0][other])


@pytest.mark.parametrize("basis", [BASIS, BASIS.powers()], ids=["orthogonal", "powers"])
@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("points", [[], [0.0], [0.7], [0.0, 0.3], [0.0, 0.1, 0.25]])
def test_fewer_points_than_nodes_are_found_themselves(count, points, basis):
    ones = np.ones((1, len(points)))
    weights, nodes = gauss_rule(moments(ones, np.array([points]).reshape(1, -1), basis, 2 * count), basis)
    assert np.isfinite(weights).all()
    assert np.isfinite(nodes).all()
    found = float((weights * np.exp(nodes)).sum())
    expected = sum(np.exp(point) for point in points)
    assert found == pytest.approx(expected, rel=1e-3 if count == 2 and len(points) > 2 else 1e-6, abs=1e-12)


@pytest.mark.parametrize("points", [[0.0], [0.3], [0.0, 0.3]])
def test_a_basis_of_fewer_points_than_polynomials(points):
    ones = np.ones(len(points))
    basis = orthogonal_basis(ones, np.array(points), 12)
    weights, nodes = gauss_rule(moments(ones[None], np.array([points]), basis, 12), basis)
    assert float((weights * np.exp(nodes)).sum()) == pytest.approx(sum(np.exp(points)), rel=1e-9)
