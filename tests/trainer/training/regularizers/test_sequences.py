"""Dropout's regularizers of recurrent networks: sampled terms against exact ones, tuples, the adaptive softmax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.spec.regularizers import DropoutMethod
from trainer.training.regularizers.adaptive_softmax import AdaptiveSoftmax
from trainer.training.regularizers.draws import GeneratorDraws
from trainer.training.regularizers.dropout import DropoutObjective, explicit_regularizer
from trainer.training.regularizers.layers import HiddenLayers
from trainer.training.regularizers.outputs import CrossEntropy, OutputLoss

WORDS, DIM, LENGTH = 7, 3, 3


class Net(nn.Module):
    """Embedding, an LSTM that gives a tuple, and what makes outputs of its states."""

    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        self.words, self.lstm, self.output = nn.Embedding(WORDS, DIM), nn.LSTM(DIM, DIM, batch_first=True), output

    def forward(self, words: Tensor) -> tuple[Tensor, object]:
        states, last = self.lstm(self.words(words))
        return self.output(states), last


def full() -> tuple[Net, OutputLoss]:
    torch.manual_seed(1)
    return Net(nn.Linear(DIM, WORDS)).double(), CrossEntropy()


def adaptive() -> tuple[Net, OutputLoss]:
    torch.manual_seed(2)
    head = nn.AdaptiveLogSoftmaxWithLoss(DIM, WORDS, [2, 4], div_value=1.0).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return Net(nn.Identity()).double(), AdaptiveSoftmax(head)


def draws() -> GeneratorDraws:
    return GeneratorDraws(torch.Generator().manual_seed(3))


@pytest.mark.parametrize("make", [full, adaptive])
def test_labels_drawn_for_each_position_estimate_the_exact_regularizer(make: Callable[[], tuple[Net, OutputLoss]]):
    """Algorithm 3 is unbiased on sequences as well: derivatives across positions and all."""
    net, output = make()
    words = torch.tensor([[1, 4, 2]])
    with HiddenLayers([net.words, net.lstm]).recorded() as layers:
        outputs, _ = net(words)
    exact = explicit_regularizer(output.hessian(outputs), layers).item()
    copies = words.expand(20_000, LENGTH)
    with HiddenLayers([net.words, net.lstm]).recorded() as layers:
        outputs, _ = net(copies)
    found = explicit_regularizer(output.sampled(outputs, 1, draws()), layers).detach()
    error = (found.std() / len(found) ** 0.5).item()
    assert error < 0.02 * exact
    assert found.mean().item() == pytest.approx(exact, abs=4 * error)


def test_the_loss_of_a_sequence_is_the_sum_over_its_positions():
    net, output = full()
    words, targets = torch.randint(WORDS, (2, 4, LENGTH))
    outputs, _ = net(words)
    expected = torch.stack([cross_entropy(o, t, reduction="sum") for o, t in zip(outputs, targets, strict=True)])
    assert torch.allclose(output.loss(outputs, targets), expected)


def test_labels_of_the_adaptive_softmax_are_drawn_from_the_model():
    _, output = adaptive()
    assert isinstance(output, AdaptiveSoftmax)
    states = torch.full((1, DIM), 0.3, dtype=torch.float64)
    p = output.head.log_prob(states).exp()[0]
    words = torch.rand(40_000, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    share = torch.bincount(output._draw(states.expand(40_000, DIM), words), minlength=WORDS) / 40_000
    # Standard error of a share: at most .5 / 200.
    assert torch.allclose(share.double(), p, atol=0.01)


METHODS = [
    {"masks": 2, "noise": "exact"},
    {"masks": 2, "noise": "approximate"},
    {"masks": 0, "explicit": "output_hessian", "label_samples": 2, "noise": "approximate"},
    {"masks": 0, "explicit": "loss_jacobian"},
]


@pytest.mark.parametrize("fields", METHODS, ids=str)
def test_the_objective_of_an_lstm_is_differentiated_through(fields: dict[str, object]):
    """Its gradient is that of finite differences, through the LSTM's second derivatives."""
    net, output = full()
    words, targets = torch.randint(WORDS, (2, 2, LENGTH), generator=torch.Generator().manual_seed(5))
    # Labels drawn are held by the generator's seed; the weights of a draw that the step would flip are not met here.
    objective = DropoutObjective(net, [net.words, net.lstm], 0.4, DropoutMethod(**fields), output)

    def value() -> Tensor:
        return objective(lambda: output.loss(net(words)[0], targets), draws()).value.mean()

    weight = net.lstm.weight_hh_l0
    (gradient,) = torch.autograd.grad(value(), weight)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = []
    with torch.no_grad():
        for sign in (1.0, -2.0):
            weight += sign * 1e-6 * direction
            with torch.enable_grad():
                found.append(value().item())
    assert (gradient * direction).sum().item() == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-4, abs=1e-8)
