"""Internal covariate shift against gradients of towers that were put together by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.lecture.covariate_shift import covariate_shifts
from benchmarks.papers.lecture.jacobians import hidden_layers
from tests.benchmarks.papers.lecture.test_jacobians import KINDS, made

RATE = 0.01


def rows() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(40, 3, dtype=torch.float64, generator=draws), torch.rand(40, generator=draws).round().double()


def mean_loss(tower: nn.Module) -> Tensor:
    inputs, labels = rows()
    return binary_cross_entropy_with_logits(tower(inputs).squeeze(1), labels)


def gradient(tower: nn.Module, layer: int) -> Tensor:
    found = torch.autograd.grad(mean_loss(tower), list(hidden_layers(tower)[layer].parameters()))
    return torch.cat([one.flatten() for one in found])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_shifts_by_the_steps_of_the_layers_below_alone(kind: str) -> None:
    tower = made(kind)
    found = covariate_shifts(tower, lambda: mean_loss(tower), RATE)
    assert len(found) == 3
    before = copy.deepcopy(tower).train()
    for layer, shift in enumerate(found, 1):
        after = copy.deepcopy(tower).train()
        for below in range(layer):
            moved, still = (list(hidden_layers(one)[below].parameters()) for one in (after, before))
            gradients = torch.autograd.grad(mean_loss(before), still)
            with torch.no_grad():
                for parameter, slope in zip(moved, gradients, strict=True):
                    parameter -= RATE * slope.sign()
        old, new = gradient(before, layer), gradient(after, layer)
        assert shift.cosine == pytest.approx(float(torch.cosine_similarity(old, new, dim=0, eps=0.0)), rel=1e-9)
        assert shift.difference == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-9)
        assert shift.difference > 1e-3


def test_the_tower_is_left_as_it_was() -> None:
    tower = made("both")
    before = copy.deepcopy(tower.state_dict())
    covariate_shifts(tower, lambda: mean_loss(tower), RATE)
    assert not tower.training
    after = tower.state_dict()
    assert any("running" in name for name in after)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_no_step_is_no_shift() -> None:
    tower = made("plain")
    for shift in covariate_shifts(tower, lambda: mean_loss(tower), 0.0):
        assert shift.cosine == pytest.approx(1.0)
        assert shift.difference == 0.0
