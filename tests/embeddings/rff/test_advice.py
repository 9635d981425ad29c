"""Which dim and sigma: errors measured on given vectors, the printed bound, and what consumers are warned of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from embeddings.rff import RandomFourierFeatures
from embeddings.rff.advice import bound_dim, dim_for, warnings_of
from embeddings.vectors.item_vectors import unit_rows


def codes(*arguments: object, **named: object) -> list[str]:
    return [warning["code"] for warning in warnings_of(*arguments, **named)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["orthogonal", "gaussian"])
def test_errors_are_those_of_the_view_itself(kind: str) -> None:
    h = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    choice = dim_for(0.2, h, sigma=1.0, seed=4, frequencies=kind)
    unit = unit_rows(h)[0]
    exact = np.exp(-0.5 * np.sum((unit[:, None] - unit[None]) ** 2, axis=2))
    upper = np.triu_indices(60, 1)
    assert choice.kernel.spread == pytest.approx(exact[upper].std())
    assert choice.kernel.mean == pytest.approx(exact[upper].mean())
    for dim, largest in choice.max_errors.items():
        phi = RandomFourierFeatures(8, dim, 1.0, 4, kind).transform(h).astype(np.float64)
        errors = (phi @ phi.T - exact)[upper]
        # float32 features
        assert largest == pytest.approx(np.abs(errors).max(), abs=1e-6)
        assert choice.rms_errors[dim] == pytest.approx(np.sqrt(np.mean(errors**2)), abs=1e-6)


def test_dim_for_takes_the_smallest_that_does() -> None:
    vectors = np.random.default_rng(3).standard_normal((400, 8))
    vectors[0] = 0.0
    choice = dim_for(0.1, vectors, sigma=1.0, num_sampled=200)
    assert choice.num_vectors == 200
    assert choice.dim is not None
    assert choice.rms_dim is not None
    assert choice.rms_dim <= choice.dim < choice.bound_dim
    assert choice.max_errors[choice.dim] <= 0.1
    assert all(error > 0.1 for dim, error in choice.max_errors.items() if dim < choice.dim)
    assert list(choice.max_errors)[:3] == [16, 32, 48]
    assert dim_for(0.001, vectors, sigma=1.0, max_dim=32).dim is None
    assert len(dim_for(0.9, vectors).max_errors) == 4
    document = json.loads(json.dumps(choice.as_dict()))
    assert [row["dim"] for row in document["measured"]] == list(choice.max_errors)
    assert document["bound_dim"] == choice.bound_dim


def test_methods_figures() -> None:
    """d = 32, sigma = 1: a largest error of .1 needs m of about 256, where the bound demands 180,465."""
    h = np.random.default_rng(1).standard_normal((2000, 32)).astype(np.float32)
    choice = dim_for(0.1, h, sigma=1.0)
    assert choice.dim is not None
    assert 128 <= choice.dim // 2 <= 512
    assert choice.bound_dim == 2 * 180_466


def test_bound_as_printed() -> None:
    # d = 32, sigma = 1, epsilon = .1, failure probability .05: m = 180,465.3, quoted beside the measured dim.
    assert bound_dim(0.1, 32, 1.0) == 2 * 180_466


def test_a_kernel_error_needs_vectors_and_an_epsilon() -> None:
    h = np.eye(4)
    for epsilon in (0.0, 1.0, -1.0, float("nan"), 1e-300):
        with pytest.raises(ValueError, match="between 1e-06 and 1"):
            dim_for(epsilon, h)
    for few in (np.zeros((5, 4)), np.empty((0, 4)), h[:1], np.full((3, 4), np.nan)):
        with pytest.raises(ValueError, match="at least two vectors"):
            dim_for(0.1, few)


def test_identical_vectors_have_no_spread() -> None:
    document = dim_for(0.1, np.ones((5, 3))).as_dict()
    assert document["kernel"]["spread"] == pytest.approx(0, abs=1e-12)
    json.dumps(document, allow_nan=False)


def test_warnings() -> None:
    h = np.random.default_rng(0).standard_normal((300, 32)).astype(np.float32)
    assert codes(32, 64, vectors=h) == ["standardise"]
    assert codes(32, 64) == ["standardise"]
    assert codes(32, 62, vectors=h)[0] == "few-frequencies"
    assert "take dim >= 64" in warnings_of(32, 62)[0]["remedy"]
    assert codes(32, 64, 0.05, vectors=h) == ["narrow-kernel", "standardise"]
    assert warnings_of(32, 64, 0.05, vectors=h)[0]["remedy"] == "raise sigma"
    assert warnings_of(32, 64, 20.0, vectors=h)[0]["remedy"] == "lower sigma"
    assert codes(32, 8, 1.0, 0, "gaussian", vectors=h) == ["few-frequencies", "noisy", "standardise"]
    assert "0.125" in warnings_of(32, 128)[-1]["message"]
    assert codes(32, 64, vectors=np.zeros((4, 32))) == ["standardise"]
