"""Theorem 4.1 of Wei, Kakade and Ma: mu and nu by Jacobians and Hessians, its terms against (B.7), which they bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from trainer.generalization import bounds
from trainer.training.regularizers.outputs import CrossEntropy, stability

NUM_ROWS, NUM_INPUTS = 40, 3


def model() -> tuple[nn.Linear, torch.Tensor, torch.Tensor, np.ndarray]:
    """A linear model of one logit, inputs [n, d] and labels [n], and its log losses [n]."""
    torch.manual_seed(3)
    layer = nn.Linear(NUM_INPUTS, 1).double()
    x = torch.randn(NUM_ROWS, NUM_INPUTS, dtype=torch.float64)
    y = torch.randint(2, (NUM_ROWS,))
    losses = binary_cross_entropy_with_logits(layer(x)[:, 0], y.double(), reduction="none")
    return layer, x, y, losses.detach().numpy()


def test_mu_and_nu_are_the_means_of_the_derivatives_by_both_logits() -> None:
    """(4.7) by a Jacobian and a Hessian for each row, of a softmax over the logits 0 and w x + b."""
    layer, x, y, losses = model()
    lengths, traces = [], []
    logits = torch.cat([torch.zeros(NUM_ROWS, 1, dtype=torch.float64), layer(x).detach()], dim=1)
    for i in range(NUM_ROWS):
        one = lambda v, i=i: cross_entropy(v[None], y[i : i + 1])  # noqa: E731
        assert float(one(logits[i])) == pytest.approx(losses[i], rel=1e-12)
        lengths.append(float(torch.func.jacrev(one)(logits[i]).norm()))
        traces.append(float(torch.func.hessian(one)(logits[i]).diagonal().sum()))
    mu, nu = bounds.derivatives(losses)
    assert (mu, nu) == pytest.approx((np.mean(lengths), np.mean(traces)), rel=1e-10)
    assert (mu, nu) == pytest.approx(stability(CrossEntropy(), logits, y), rel=1e-10)


def test_the_terms_are_those_of_the_theorem() -> None:
    layer, x, _, losses = model()
    with bounds.largest_input(layer) as largest:
        layer(x[:10])
        layer(x[10:])
        layer(x[:0])
    # The bias is the weight of an input of 1; the row of the other class is 0.
    inputs = torch.cat([x, torch.ones(NUM_ROWS, 1, dtype=torch.float64)], dim=1)
    weight = torch.stack([torch.zeros(NUM_INPUTS + 1), torch.cat([layer.weight[0], layer.bias])]).detach().numpy()
    longest, norm = float(inputs.norm(dim=1).max()), float(np.sqrt((weight.T**2).sum(axis=0)).sum())
    assert max(largest) == pytest.approx(longest, rel=1e-12)
    assert len(largest) == 2
    assert bounds.norm_of(layer) == pytest.approx(norm, rel=1e-7)  # float32 in the stack
    found = bounds.linear_bound(losses, norm, longest, delta=0.1)
    mu, nu = bounds.derivatives(losses)
    n, b, theta = NUM_ROWS, bounds.TRUNCATION, math.log(2 * NUM_ROWS) ** 3 * longest**2
    expected = (
        (norm * mu) ** (2 / 3) * (theta * b) ** (1 / 3) / n ** (1 / 3),
        norm * math.sqrt(b * nu * theta) / math.sqrt(n),
        b * norm**2 * theta / (n * (math.log(b * norm**2 * theta / (nu * n)) ** 2 + 1)),
        b * (math.log(1 / 0.1) + math.log(math.log(n))) / n,
    )
    assert found.terms == pytest.approx(expected)
    assert found.train == pytest.approx(np.mean(np.minimum(b, losses)))
    assert found.gap == pytest.approx(sum(expected))
    assert found.bound == pytest.approx(1.01 * found.train + sum(expected))
    assert found.is_vacuous
    assert not layer._forward_hooks


def test_the_terms_bound_what_the_proof_minimizes() -> None:
    """Lemma B.3: min over beta of (B.7), with alpha = 100 and tau = sqrt(2), is within constants of the three terms,
    whichever of them is the largest."""
    draw, largest_terms = np.random.default_rng(0), set()
    for _ in range(200):
        n, norm, longest = (float(10 ** draw.uniform(*limits)) for limits in ((3, 5), (-1, 2), (-1, 1)))
        right = np.full(int(n), 1.0 - 10 ** draw.uniform(-6, -0.4))
        losses = -np.log(right)
        mu, nu = bounds.derivatives(losses)
        beta = np.logspace(-6, 2, 2000) / longest
        slope = math.sqrt(2) * beta * longest
        proof = 1.01 * beta * mu * longest + 1.01 * nu * (np.exp(slope) - slope - 1) / 2
        proof += 101 * bounds.TRUNCATION * norm**2 * math.log(len(right) * 2) ** 3 / (beta**2 * len(right))
        terms = bounds.linear_bound(losses, norm, longest).terms[:3]
        assert 5 < proof.min() / sum(terms) < 400
        largest_terms.add(int(np.argmax(terms)))
    assert len(largest_terms) == 3


def test_what_is_no_better_than_a_coin_is_vacuous() -> None:
    certain = np.full(10**6, 1e-6)
    assert not bounds.linear_bound(certain, 1.0, 1.0).is_vacuous
    assert bounds.linear_bound(np.full(10**6, math.log(2)), 1.0, 1.0).is_vacuous
    assert bounds.linear_bound(certain, 1e4, 1.0).is_vacuous
    none = bounds.linear_bound(np.zeros(1000), 0.0, 1.0)
    assert none.terms[:3] == (0.0, 0.0, 0.0)
