"""Batch normalisation over the global batch, against torch's; shortcuts; the same on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.models.layers.batch_norm import BatchNorm
from trainer.models.layers.mlp import HiddenLayer, tower

BOTH = {"residual": True, "batch_norm": True}


def batches(count: int, size: int = 12, width: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [2.0 + 3.0 * torch.randn(size, width, generator=generator, dtype=torch.float64) for _ in range(count)]


def stirred(layer):
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -0.5, 2.0]))
        layer.bias.copy_(torch.tensor([0.5, 1.0, -1.0]))
    return layer


def test_batch_norm_is_torchs():
    """Outputs, gradients, running moments and evaluation, over some batches; float64 rounding."""
    mine, theirs = stirred(BatchNorm(3, dtype=torch.float64)), stirred(nn.BatchNorm1d(3, dtype=torch.float64))
    for x in batches(3):
        given = [x.clone().requires_grad_() for _ in range(2)]
        found = [layer(inputs) for layer, inputs in zip((mine, theirs), given, strict=True)]
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        for outputs in found:
            (outputs.sin() * torch.arange(12.0)[:, None]).sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(mine.running_mean, theirs.running_mean)
    torch.testing.assert_close(mine.running_variance, theirs.running_var)
    (x,) = batches(1)
    torch.testing.assert_close(mine.eval()(x), theirs.eval()(x), rtol=1e-12, atol=1e-12)


def test_gradients_of_batch_norm_and_dice_are_the_finite_differences():
    from trainer.models.din import Dice

    (x,) = batches(1, size=5)
    for layer in (stirred(BatchNorm(3, dtype=torch.float64)), Dice(3, torch.float64)):
        assert torch.autograd.gradcheck(layer, x.clone().requires_grad_())


def test_a_batch_of_one_and_one_of_none():
    layer = stirred(BatchNorm(3, dtype=torch.float64))
    torch.testing.assert_close(layer(torch.ones(1, 3, dtype=torch.float64)), layer.bias[None])
    kept = layer.running_mean.clone(), layer.running_variance.clone()
    nothing = layer(torch.empty(0, 3, dtype=torch.float64, requires_grad=True))
    nothing.sum().backward()
    assert nothing.shape == (0, 3)
    assert torch.equal(layer.running_mean, kept[0])
    assert torch.equal(layer.running_variance, kept[1])


def test_evaluation_does_not_move_what_was_learned():
    layer = BatchNorm(3, dtype=torch.float64).eval()
    layer(batches(1)[0])
    assert not layer.running_mean.any()


# --- ranks -----------------------------------------------------------------------------------------------------------


def normalised(shares: list[int]) -> tuple[torch.Tensor, ...]:
    """Outcome and gradient of this rank's samples, and the running moments."""
    layer = stirred(BatchNorm(3, dtype=torch.float64))
    rank = dist.get_rank()
    start = sum(shares[:rank])
    parts = []
    for x in batches(2):
        mine = x[start : start + shares[rank]].clone().requires_grad_()
        found = layer(mine)
        (found.sin() * torch.arange(12.0)[start : start + shares[rank], None]).sum().backward()
        parts += [found.detach(), mine.grad]
    return (*parts, layer.running_mean, layer.running_variance)


@pytest.mark.parametrize("shares", [[7, 5], [12, 0]])
def test_ranks_normalise_the_batch_as_one_does(ranks, shares):
    """Also where a rank has no sample. Float64 sums in another order."""
    (alone,) = ranks(1).run(normalised, [12])
    several = ranks(2).run(normalised, shares)
    for number, expected in enumerate(alone):
        if expected.dim() == 2:
            torch.testing.assert_close(
                torch.cat([found[number] for found in several]), expected, rtol=1e-12, atol=1e-12
            )
        else:
            assert torch.equal(several[0][number], several[1][number])
            torch.testing.assert_close(several[0][number], expected, rtol=1e-12, atol=1e-12)


# --- towers ----------------------------------------------------------------------------------------------------------


def test_options_add_to_the_same_initial_weights():
    plain = tower([3, 4, 4, 1], seed=5, dtype=torch.float64)
    with_both = tower([3, 4, 4, 1], seed=5, dtype=torch.float64, **BOTH)
    linear = [layer for layer in plain if isinstance(layer, nn.Linear)]
    hidden = [layer for layer in with_both if isinstance(layer, HiddenLayer)]
    assert len(hidden) == 2
    for one, other in zip(linear, [*(layer.linear for layer in hidden), with_both[-1]], strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias, other.bias)
    # Sizes that agree need no weights for their shortcut.
    assert hidden[0].shortcut.weight.shape == (4, 3)
    assert hidden[1].shortcut is None


def test_a_hidden_layer_is_its_formula():
    (x,) = batches(1)
    network = tower([3, 4, 4, 1], seed=5, dtype=torch.float64, **BOTH).eval()
    first, second, last = network
    for layer in (first, second):
        layer.norm.running_mean.fill_(0.3)
        layer.norm.running_variance.fill_(2.0)
    scale = (2.0 + 1e-5) ** -0.5
    h = ((x @ first.linear.weight.T + first.linear.bias - 0.3) * scale).clamp(min=0) + x @ first.shortcut.weight.T
    h = ((h @ second.linear.weight.T + second.linear.bias - 0.3) * scale).clamp(min=0) + h
    torch.testing.assert_close(network(x), h @ last.weight.T + last.bias)


def test_without_logits_the_last_layer_is_hidden_too():
    (x,) = batches(1)
    network = tower([3, 4, 2], seed=5, dtype=torch.float64, logits=False)
    plain = tower([3, 4, 2], seed=5, dtype=torch.float64)
    torch.testing.assert_close(network(x), plain(x).relu())
