"""Losses against their formulas in float64, and the in-batch softmax on two ranks against one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainer.data.batches.order import rank_slice
from trainer.models.losses import focal_loss, in_batch_softmax, pointwise_loss, sampled_loss


def test_pointwise_losses_are_their_formulas():
    scores, labels = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    p = torch.sigmoid(scores)
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log())
    assert torch.allclose(pointwise_loss("bce", scores, labels), expected, rtol=1e-12)
    assert torch.equal(pointwise_loss("mse", scores, 5 * labels), (scores - 5 * labels) ** 2)


@pytest.mark.parametrize("alpha", [0.25, None])
def test_focal_loss_is_its_formula(alpha):
    scores, labels = 3 * torch.randn(50, dtype=torch.float64), (torch.rand(50) < 0.4).float()
    for gamma in (0.0, 0.5, 2.0):
        expected = []
        for z, y in zip(scores.tolist(), labels.tolist(), strict=True):
            missed = 1 / (1 + math.exp(z if y else -z))  # 1 - p_t, with all of its digits where p_t is close to 1
            alpha_t = 1.0 if alpha is None else alpha if y else 1 - alpha
            expected.append(-alpha_t * missed**gamma * math.log1p(-missed))
        found = pointwise_loss("focal", scores, labels, gamma=gamma, alpha=alpha)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    if alpha is None:
        plain = focal_loss(scores, labels.double(), gamma=0.0, alpha=None)
        torch.testing.assert_close(plain, pointwise_loss("bce", scores, labels), rtol=1e-12, atol=1e-15)
    # A label between the classes has both terms by its share, and far from them nothing overflows.
    ends = [focal_loss(scores, torch.full_like(scores, y), gamma=2.0, alpha=alpha) for y in (0.0, 1.0, 0.3)]
    torch.testing.assert_close(0.7 * ends[0] + 0.3 * ends[1], ends[2])
    far = torch.tensor([-900.0, 900.0], dtype=torch.float64, requires_grad=True)
    losses = focal_loss(far, torch.tensor([1.0, 1.0]), gamma=2.0, alpha=alpha)
    losses.sum().backward()
    assert losses.tolist() == [900.0 * (alpha or 1.0), 0.0]
    assert far.grad.tolist() == [-(alpha or 1.0), 0.0]


@pytest.mark.parametrize("kind", ["dnn", "mf", "two_tower"])
def test_settings_of_a_loss_reach_it_in_every_model_of_labels(lab, kind):
    model, batch, settings = lab.model(kind), lab.batch(), {"gamma": 1.5, "alpha": 0.3}
    model.loss_kind, model.loss_settings = "focal", settings
    expected = focal_loss(model(batch.features), batch.labels, **settings)
    torch.testing.assert_close(model.loss(batch), expected)


def test_gradients_of_the_focal_loss():
    """Also the second ones, which regularizers of dropout ask for."""
    scores, labels = torch.randn(9, dtype=torch.float64, requires_grad=True), torch.rand(9, dtype=torch.float64)

    def losses(z):
        return focal_loss(z, labels, gamma=1.5, alpha=0.3)

    assert torch.autograd.gradcheck(losses, (scores,))
    assert torch.autograd.gradgradcheck(losses, (scores,))


@pytest.mark.parametrize("kind", ["bce", "sampled_softmax", "bpr", "top1"])
def test_gradients_of_losses_among_drawn_items(kind):
    """Their formulas are in test_sequence_models.py."""
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)
    scores[1].requires_grad_()
    assert torch.autograd.gradcheck(lambda z, others: sampled_loss(kind, z, others), scores)


def batch_of(size: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    queries, candidates = (torch.from_numpy(rng.normal(size=(size, 4))) for _ in range(2))
    labels = torch.from_numpy((rng.random(size) < 0.7).astype(np.float32))
    log_q = torch.log(torch.tensor([0.4, 0.2, 0.2, 0.1, 0.05, 0.05], dtype=torch.float64))[rng.integers(0, 6, size)]
    return queries, candidates, labels, log_q


def by_hand(queries, candidates, labels, log_q):
    """The formula, sample by sample."""
    losses = []
    for i in range(len(labels)):
        corrected = [(queries[i] @ candidates[j] - log_q[j]).exp() for j in range(len(labels))]
        losses.append(-float(labels[i]) * torch.log(corrected[i] / sum(corrected)))
    return torch.stack(losses)


def test_in_batch_softmax_is_its_formula_with_the_correction():
    batch = batch_of(17)
    found = in_batch_softmax(*batch, 17)
    assert torch.allclose(found, by_hand(*batch), rtol=1e-12)
    assert bool((found[batch[2] == 0] == 0).all())
    uncorrected = in_batch_softmax(*batch[:3], torch.zeros_like(batch[3]), 17)
    assert not torch.allclose(found, uncorrected)


def test_gradients_of_the_in_batch_softmax():
    queries, candidates, labels, log_q = batch_of(7)
    queries.requires_grad_(), candidates.requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda q, c: in_batch_softmax(q, c, labels, log_q, 7), (queries, candidates))


def test_with_the_correction_softmax_scores_are_the_odds_of_items_whatever_their_popularity():
    """Scores converge to log p(item | user) up to a constant, the minimiser of the softmax over the whole catalogue;
    without log Q they converge to log p(item | user) - log p(item)."""
    rng = np.random.default_rng(0)
    share = np.array([[0.4, 0.4, 0.2], [0.7, 0.1, 0.2]])
    user = rng.integers(0, 2, 40_000)
    item = (rng.random(40_000)[:, None] > np.cumsum(share, axis=1)[user]).sum(1)
    q = np.bincount(item, minlength=3) / len(item)

    def learned(log_q):
        table = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([table], 0.1)
        for start in range(0, 40_000, 400):
            u, i = (torch.from_numpy(part[start : start + 400]) for part in (user, item))
            ones = torch.ones(400)
            loss = in_batch_softmax(table[u], torch.eye(3, dtype=torch.float64)[i], ones, log_q[i], 400).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.softmax(table.detach(), 1).numpy()

    np.testing.assert_allclose(learned(torch.log(torch.from_numpy(q))), share, atol=0.04)
    lift = share / q
    np.testing.assert_allclose(
        learned(torch.zeros(3, dtype=torch.float64)), lift / lift.sum(1, keepdims=True), atol=0.04
    )


def on_ranks(size: int):
    """This rank's losses and the gradients of its rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, last = rank_slice(size, rank, world_size)
    queries, candidates, labels, log_q = (part[first:last] for part in batch_of(size))
    queries, candidates = (part.clone().requires_grad_() for part in (queries, candidates))
    losses = in_batch_softmax(queries, candidates, labels, log_q, size)
    losses.sum().backward()
    return [part.detach().numpy() for part in (losses, queries.grad, candidates.grad)]


@pytest.mark.parametrize("size", [13, 1])
def test_two_ranks_have_the_losses_and_gradients_of_one(ranks, size):
    queries, candidates, *rest = batch_of(size)
    queries.requires_grad_(), candidates.requires_grad_()
    losses = in_batch_softmax(queries, candidates, *rest, size)
    losses.sum().backward()
    told = ranks(2).run(on_ranks, size)
    for number, whole in enumerate((losses.detach(), queries.grad, candidates.grad)):
        together = np.concatenate([answer[number] for answer in told])
        np.testing.assert_allclose(together, whole.numpy(), rtol=1e-12, atol=1e-14)
