"""Measures of a point in parameter space against closed forms: quadratic losses, small matrices, every truncation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from trainer.generalization.parameters import Point
from trainer.generalization.sections import distance, gaps
from trainer.generalization.sharpness import (
    ascent_rise,
    gradient_norms,
    noise_rise,
    rescalable,
    rescaled,
    top_eigenvalue,
)
from trainer.generalization.spectrum import rank_of, spectrum, truncated_losses


def quadratic(seed: int = 0) -> tuple[Point, np.ndarray, np.ndarray]:
    """L = theta^T A theta / 2 in two tensors of 3 and 2 x 2, A symmetric and indefinite; A and theta."""
    draw = np.random.default_rng(seed)
    half = draw.normal(size=(7, 7))
    a, theta = half + half.T, draw.normal(size=7)
    first = torch.tensor(theta[:3], requires_grad=True)
    second = torch.tensor(theta[3:].reshape(2, 2), requires_grad=True)
    matrix = torch.tensor(a)

    def loss() -> torch.Tensor:
        whole = torch.cat([first, second.reshape(-1)])
        return whole @ matrix @ whole / 2

    return Point({"first": first, "second": second}, loss), a, theta


def test_the_top_eigenvalue_of_a_quadratic_is_that_of_its_matrix() -> None:
    point, a, theta = quadratic()
    assert top_eigenvalue(point) == pytest.approx(np.linalg.eigvalsh(a)[-1], rel=1e-9)
    scaled = np.abs(theta)[:, None] * a * np.abs(theta)
    assert top_eigenvalue(point, scale=point.magnitudes()) == pytest.approx(np.linalg.eigvalsh(scaled)[-1], rel=1e-9)
    # Fewer steps find less, never more.
    assert top_eigenvalue(point, num_steps=2) < np.linalg.eigvalsh(a)[-1]


def test_the_hessian_of_a_linear_loss_is_zero() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert top_eigenvalue(Point({"x": leaf}, leaf.sum)) == 0.0


def test_ascent_and_noise_on_a_quadratic() -> None:
    """Ascent: with d = rho g / |g|, L(theta + d) - L = g d + d A d / 2. Noise: its mean is sigma^2 tr A / 2."""
    point, a, theta = quadratic()
    g = a @ theta
    step = 0.1 * g / np.linalg.norm(g)
    assert ascent_rise(point, 0.1) == pytest.approx(g @ step + step @ a @ step / 2, rel=1e-9)
    t = np.abs(theta)
    step = 0.1 * t**2 * g / np.linalg.norm(t * g)
    assert ascent_rise(point, 0.1, scale=point.magnitudes()) == pytest.approx(g @ step + step @ a @ step / 2, rel=1e-9)
    sigma = 0.3
    # Its standard deviation over n antithetic draws is sigma^2 |A|_F / sqrt(2 n).
    for scale, matrix in ((None, a), (point.magnitudes(), t[:, None] * a * t)):
        tolerance = 5 * sigma**2 * float(np.linalg.norm(matrix)) / math.sqrt(2 * 400)
        mean = noise_rise(point, sigma, scale=scale, num_draws=400)
        assert mean == pytest.approx(sigma**2 * np.trace(matrix) / 2, abs=tolerance)


def test_a_point_is_put_back_bit_for_bit() -> None:
    point, _, theta = quadratic()
    ascent_rise(point)
    noise_rise(point, num_draws=2)
    assert np.array_equal(torch.cat([leaf.detach().reshape(-1) for leaf in point.leaves]).numpy(), theta)


def test_gradient_norms_of_a_quadratic() -> None:
    point, a, theta = quadratic()
    g = a @ theta
    found = gradient_norms(point)
    assert found["first"] == pytest.approx((np.linalg.norm(g[:3]), np.linalg.norm(g[:3]) / np.linalg.norm(theta[:3])))
    assert found["second"][0] == pytest.approx(np.linalg.norm(g[3:]))


def network() -> tuple[nn.Sequential, Point, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    x, y = torch.randn(40, 4, dtype=torch.float64), (torch.rand(40) > 0.4).double()

    def loss() -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y)

    return net, Point(dict(net.named_parameters()), loss), x


def test_lanczos_on_a_network_is_its_whole_hessian() -> None:
    """Against the Hessian column by column; 47 parameters, all of which 47 steps see."""
    _, point, _ = network()
    product = point.hessian_products()
    columns = []
    for place, leaf in enumerate(point.leaves):
        for element in range(leaf.numel()):
            vector = [torch.zeros_like(one) for one in point.leaves]
            vector[place].view(-1)[element] = 1.0
            columns.append(torch.cat([one.reshape(-1) for one in product(vector)]))
    hessian = torch.stack(columns)
    assert torch.allclose(hessian, hessian.T, atol=1e-12)
    assert top_eigenvalue(point, num_steps=60) == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-8)


def test_rescaled_layers_are_the_same_function_with_another_sharpness_and_the_same_relative_one() -> None:
    """Dinh et al. 2017. alpha is a power of two, which rounds nothing."""
    net, point, x = network()
    before, weights = net(x).detach(), [leaf.detach().clone() for leaf in point.leaves]
    pairs = rescalable(net)
    assert pairs == [(net[0], net[2]), (net[2], net[4])]
    plain, relative = top_eigenvalue(point), top_eigenvalue(point, scale=point.magnitudes())
    ascent = ascent_rise(point, 0.5, scale=point.magnitudes())
    with rescaled(pairs, 64.0):
        assert torch.allclose(net(x), before, rtol=1e-12)
        assert top_eigenvalue(point) > 4 * plain
        assert top_eigenvalue(point, scale=point.magnitudes()) == pytest.approx(relative, rel=1e-6)
        assert ascent_rise(point, 0.5, scale=point.magnitudes()) == pytest.approx(ascent, rel=1e-9)
    assert all(torch.equal(leaf, weight) for leaf, weight in zip(point.leaves, weights, strict=True))


def test_what_is_not_homogeneous_is_not_rescaled() -> None:
    assert rescalable(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2))) == []


@pytest.mark.parametrize("shape", [(6, 4), (3, 5), (500, 4)])
def test_spectra_and_truncation_are_those_of_the_svd(shape: tuple[int, int]) -> None:
    matrix = torch.tensor(np.random.default_rng(1).normal(size=shape))
    values = np.linalg.svd(matrix.numpy(), compute_uv=False)
    one = spectrum(matrix)
    assert one.values == pytest.approx(values)
    assert one.stable_rank == pytest.approx(np.linalg.norm(matrix.numpy()) ** 2 / values[0] ** 2)
    for rank in range(len(values) + 1):
        left, middle, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
        best = (left[:, :rank] * middle[:rank]) @ right[:rank]
        assert (matrix @ one.projector(rank)).numpy() == pytest.approx(best, abs=1e-9)
        error = np.linalg.norm(matrix.numpy() - best) / np.linalg.norm(matrix.numpy())
        assert one.error(rank) == pytest.approx(error, abs=1e-9)
    for t in (0.1, 0.5, 0.9):
        assert one.num_above(t) == int((values > t * values[0]).sum()) <= one.stable_rank / t**2


def test_a_matrix_of_rank_one_and_one_of_zeros() -> None:
    one = spectrum(torch.outer(torch.arange(1.0, 9.0), torch.tensor([1.0, 2.0])))
    assert one.stable_rank == pytest.approx(1.0)
    assert one.error(1) == pytest.approx(0.0, abs=1e-7)
    zeros = spectrum(torch.zeros(20, 3))
    assert math.isnan(zeros.stable_rank)
    assert zeros.error(1) == 0.0


def test_compression_truncates_one_matrix_at_a_time_then_all_and_puts_them_back() -> None:
    draw = np.random.default_rng(2)
    matrices = {name: torch.tensor(draw.normal(size=(4, 4))) for name in ("a", "b")}
    whole = {name: one.clone() for name, one in matrices.items()}
    spectra = {name: spectrum(one) for name, one in matrices.items()}

    def loss() -> float:
        return float(sum(one.square().sum() for one in matrices.values()))

    found = truncated_losses(matrices, spectra, loss, (0.5, 1.0))
    squares = {name: np.square(one.values) for name, one in spectra.items()}
    left = {name: squares[name][2:].sum() for name in squares}
    total = sum(one.sum() for one in squares.values())
    assert found["a"] == pytest.approx([total - left["a"], total])
    assert found["all"] == pytest.approx([total - left["a"] - left["b"], total])
    assert all(torch.equal(matrices[name], whole[name]) for name in matrices)
    assert [rank_of(spectra["a"], share) for share in (0.01, 0.5, 1.0)] == [1, 2, 4]


def test_gaps_are_of_epochs_with_both_splits_and_larger_is_worse() -> None:
    metrics = [
        {"epoch": 1, "split": "train", "loss": 0.7, "auc": 0.9, "logloss": 0.5},
        {"epoch": 1, "split": "validation", "auc": 0.1, "logloss": 9.0},
        {"epoch": 1, "split": "test", "auc": 0.6, "logloss": 0.75},
        {"epoch": 2, "split": "test", "auc": 0.6, "logloss": 0.75},
        {"epoch": 3, "split": "train", "rmse": 0.5},
        {"epoch": 3, "split": "test", "rmse": 0.75},
    ]
    assert gaps(metrics) == [
        {"epoch": 1, "split": "gap", "auc": pytest.approx(0.3), "logloss": pytest.approx(0.25)},
        {"epoch": 3, "split": "gap", "rmse": pytest.approx(0.25)},
    ]


def test_distance_of_two_trainings() -> None:
    """Ridge regression in closed form, with one example replaced: epsilon is the largest difference over all z."""
    draw = np.random.default_rng(3)
    x, y, z = draw.normal(size=(30, 3)), draw.normal(size=30), draw.normal(size=(50, 3))

    def fitted(targets: np.ndarray) -> np.ndarray:
        return np.linalg.solve(x.T @ x + 0.1 * np.eye(3), x.T @ targets)

    other = y.copy()
    other[4] = -y[4]
    weights = [fitted(targets) for targets in (y, other)]
    losses = [np.square(z @ one - 1.0) for one in weights]
    found = distance(*losses, *({"w": one} for one in weights))
    # Sherman and Morrison: only the right-hand side changed, by -2 y_4 x_4.
    moved = np.linalg.solve(x.T @ x + 0.1 * np.eye(3), -2 * y[4] * x[4])
    assert found.parameters["w"] == pytest.approx(np.linalg.norm(moved) / np.linalg.norm(weights[0]))
    assert found.epsilon == max(abs(a - b) for a, b in zip(*losses, strict=True))
    assert abs(found.risk) <= found.mean <= found.epsilon
    assert distance(losses[0], losses[0], {}, {}).epsilon == 0.0
