"""Losses of targets among shared items: formulas written out, gradients, blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from trainer.models import retrieval_losses
from trainer.models.retrieval_losses import RETRIEVAL, Shared, shared_loss

SETTINGS = {"calibration": 0.75, "margin": 0.1, "negative_weight": 2.0}
NUM_ITEMS = 50


def sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score))


def by_hand(kind: str, target: float, scores: list[float]) -> float:
    """The loss of one target; ``scores`` are those of the items that are not the target."""
    if kind == "sampled_softmax":
        return math.log(math.exp(target) + sum(map(math.exp, scores))) - target
    if kind in ("bce", "gbce"):
        # Equations 7 and 9 of gSASRec, as they are printed.
        alpha, t = NUM_DRAWN / (NUM_ITEMS - 1), SETTINGS["calibration"] if kind == "gbce" else 0.0
        beta = alpha * (t * (1.0 - 1.0 / alpha) + 1.0 / alpha)
        return -math.log(sigmoid(target) ** beta) - sum(math.log(1.0 - sigmoid(z)) for z in scores)
    if kind == "bpr":
        return sum(-math.log(sigmoid(target - z)) for z in scores) / NUM_DRAWN
    assert kind == "cosine_contrastive"
    above = sum(max(0.0, z - SETTINGS["margin"]) for z in scores)
    return 1.0 - target + SETTINGS["negative_weight"] / NUM_DRAWN * above


NUM_DRAWN = 7


def drawn(num_targets: int = 5):
    """Queries, rows of all items, ids of targets, ids of drawn items: some of them are targets, one is there twice."""
    generator = torch.Generator().manual_seed(3)
    queries, items = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (num_targets, 12))
    targets = torch.arange(num_targets) % 12
    return normalize(queries, dim=1), normalize(items, dim=1), targets, torch.tensor([9, 2, 11, 2, 0, 8, 7])


@pytest.fixture(params=[1 << 20, 15])
def blocks(request, monkeypatch):
    """All scores at once, and two targets at a time."""
    monkeypatch.setattr(retrieval_losses, "SCORES_AT_ONCE", request.param)
    monkeypatch.setattr(retrieval_losses, "LEAST_TARGETS_AT_ONCE", 1)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", [kind for kind in RETRIEVAL if kind != "softmax"])
def test_losses_of_drawn_items_are_their_formulas(kind):
    queries, items, targets, ids = drawn()
    loss = RETRIEVAL[kind](SETTINGS, NUM_ITEMS)
    target = (queries * items[targets]).sum(1)
    found = shared_loss(loss, queries, target, Shared(items[ids], ids, targets))
    expected = [
        by_hand(kind, float(score), [float(query @ items[i]) for i in ids if i != own])
        for query, score, own in zip(queries, target, targets, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)


@pytest.mark.usefixtures("blocks")
def test_the_whole_softmax_is_cross_entropy_over_the_catalogue_with_its_gradients():
    queries, items, targets, _ = drawn()
    # Scores of some hundred, whose exponentials alone overflow float32.
    queries, items = (300.0 * queries).requires_grad_(), items.requires_grad_()
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    for factors in (torch.ones_like(weights), weights):  # known beforehand and not: backward has a way for each
        loss = shared_loss(RETRIEVAL["softmax"]({}, 12), queries, (queries * items[targets]).sum(1), Shared(items))
        plain = cross_entropy(queries @ items.T, targets, reduction="none")
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((factors * loss).sum(), (queries, items))
        for one, other in zip(found, torch.autograd.grad((factors * plain).sum(), (queries, items)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", RETRIEVAL)
@pytest.mark.parametrize("equal", [True, False])
def test_gradients(kind, equal):
    queries, items, targets, ids = drawn()
    weights = torch.ones(5, dtype=torch.float64) if equal else torch.arange(1.0, 6.0, dtype=torch.float64)
    loss = RETRIEVAL[kind](SETTINGS, NUM_ITEMS)
    offsets = torch.linspace(-1.0, 1.0, len(ids), dtype=torch.float64)

    def total(q, z, rows):
        shared = Shared(rows) if kind == "softmax" else Shared(rows, ids, targets, offsets)
        return (weights * shared_loss(loss, q, z, shared)).sum()

    inputs = queries.requires_grad_(), torch.randn(5, dtype=torch.float64, requires_grad=True), items[ids]
    inputs = (*inputs[:2], inputs[2].detach().requires_grad_())
    assert torch.autograd.gradcheck(total, inputs)
    assert "softmax" not in kind or torch.autograd.gradgradcheck(total, inputs)


def test_offsets_correct_for_how_items_are_drawn():
    """With - log Q on both sides, draws by frequency give the whole softmax in the mean of the sum's terms."""
    queries, items, targets, _ = drawn(1)
    q = torch.arange(1.0, 13.0, dtype=torch.float64) / 78.0
    ids = torch.multinomial(q, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(ids, minlength=12)
    # Each item by how often it was drawn: offsets of - log(k Q) + log of its count.
    others = torch.arange(12)[torch.arange(12) != targets[0]]
    offsets = (counts[others] / (200_000 * q[others])).log()
    target = (queries * items[targets]).sum(1)
    found = shared_loss(
        RETRIEVAL["sampled_softmax"]({}, 12), queries, target, Shared(items[others], others, targets, offsets)
    )
    torch.testing.assert_close(found, cross_entropy(queries @ items.T, targets, reduction="none"), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("kind", RETRIEVAL)
def test_a_rank_without_targets_has_gradients_of_zero(kind):
    queries, target = torch.empty(0, 4, requires_grad=True), torch.empty(0, requires_grad=True)
    rows = torch.empty(0, 4, requires_grad=True)
    loss = shared_loss(RETRIEVAL[kind](SETTINGS, 3), queries, target, Shared(rows, torch.empty(0), torch.empty(0)))
    loss.sum().backward()
    assert (queries.grad.shape, rows.grad.shape) == ((0, 4), (0, 4))
