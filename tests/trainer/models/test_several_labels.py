"""Models of several labels against plain loops of their papers' equations; gradients, masks, products, sizes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedTensor

from tests.support.model_specs import model_spec
from trainer.data.batches.keys import Key
from trainer.models.base import ModelInputs
from trainer.models.losses import pointwise_loss
from trainer.models.registry import MODELS
from trainer.models.several_labels import product_logit
from trainer.spec.label_tasks import LabelTask

F, DIM, N, B = 3, 4, 2, 5
NAMES = ("user", "item", "page")
HIDDEN, TOWER = (6, 3), (4,)
TASKS = (LabelTask("click"), LabelTask("buy", weight=0.5), LabelTask("visits", "poisson", 2.0, is_value=True))
TOWERS = {"hidden": HIDDEN, "tower_hidden": TOWER}
VARIANTS = [
    ("shared_bottom", TOWERS),
    ("mmoe", {**TOWERS, "experts": 3}),
    ("ple", {**TOWERS, "label_experts": 2, "shared_experts": 1, "levels": 2}),
    ("ple", {**TOWERS, "label_experts": 1, "shared_experts": 2, "levels": 1}),
    ("ple", {**TOWERS, "label_experts": 1, "shared_experts": 1, "levels": 3, "tower_hidden": ()}),
    ("esmm", {"hidden": HIDDEN, "tasks": {"buy": {"given": "click"}}}),
]


class Rows(nn.Module):
    """Pooled rows that are parameters, whatever is asked for."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.rows = nn.Parameter(torch.randn(B, F * DIM, generator=generator, dtype=torch.float64))

    def forward(self, features: object) -> KeyedTensor:
        return KeyedTensor(list(NAMES), [DIM] * F, self.rows)


def made(kind: str, fields: dict[str, object], *, num_dense: int = N, labels: tuple[LabelTask, ...] = TASKS):
    spec = model_spec(kind, embedding_dim=DIM, **fields)
    keys = tuple(Key(name, name, False, "mean") for name in NAMES)
    model = MODELS[kind](Rows(), spec, ModelInputs(keys, num_dense, 3, torch.float64, tasks=labels)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.5  # so few units would all be below 0 for some sample
    return model


def batch_of(labels: Tensor | None = None, shares: Tensor | None = None, num_dense: int = N) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(B, num_dense, generator=generator, dtype=torch.float64) if num_dense else None
    if labels is None:
        labels = torch.tensor([[1, 1, 3], [0, 0, 0], [1, 0, 7], [0, 0, 1], [1, 1, 2]], dtype=torch.float64)
    return SimpleNamespace(features=None, labels=labels, dense=dense, shares=shares)


# --- the equations, sample by sample ---------------------------------------------------------------------------------


def mlp(network: nn.Module, x: Tensor, *, logits: bool) -> Tensor:
    linear = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(linear):
        x = torch.stack([(row * x).sum() + b for row, b in zip(layer.weight, layer.bias, strict=True)])
        if number + 1 < len(linear) or not logits:
            x = torch.where(x > 0, x, torch.zeros_like(x))
    return x


def gated(gate: nn.Module, x: Tensor, experts: list[Tensor]) -> Tensor:
    powers = [torch.exp((row * x).sum()) for row in gate.linear.weight]
    return sum(power / sum(powers) * expert for power, expert in zip(powers, experts, strict=True))


def shared_bottom(model, x):
    shared = mlp(model.bottom, x, logits=False)
    return [mlp(tower, shared, logits=True)[0] for tower in model.towers]


def mmoe(model, x):
    experts = [mlp(expert, x, logits=False) for expert in model.experts]
    pairs = zip(model.towers, model.gates, strict=True)
    return [mlp(tower, gated(gate, x, experts), logits=True)[0] for tower, gate in pairs]


def ple(model, x):
    """Tang et al., figure 5: level by level, expert by expert."""
    states, shared = [x for _ in model.towers], x
    for level in model.levels:
        of_shared = [mlp(expert, shared, logits=False) for expert in level.shared]
        own = [
            [mlp(expert, state, logits=False) for expert in experts]
            for experts, state in zip(level.own, states, strict=True)
        ]
        states = [
            gated(gate, state, [*experts, *of_shared])
            for gate, state, experts in zip(level.gates, states, own, strict=True)
        ]
        if level.shared_gate is not None:
            shared = gated(level.shared_gate, shared, [*(one for experts in own for one in experts), *of_shared])
    return [mlp(tower, state, logits=True)[0] for tower, state in zip(model.towers, states, strict=True)]


def esmm(model, x):
    click, buy, visits = (mlp(tower, x, logits=True)[0] for tower in model.towers)
    p = torch.sigmoid(click) * torch.sigmoid(buy)
    return [click, torch.log(p / (1 - p)), visits]


PLAIN = {"shared_bottom": shared_bottom, "mmoe": mmoe, "ple": ple, "esmm": esmm}


@pytest.mark.parametrize("num_dense", [0, N])
@pytest.mark.parametrize(("kind", "fields"), VARIANTS)
def test_scores_are_the_equations(kind, fields, num_dense):
    model, batch = made(kind, fields, num_dense=num_dense), batch_of(num_dense=num_dense)
    found = model.scores(batch)
    rows = [model.embeddings.rows] if batch.dense is None else [model.embeddings.rows, batch.dense]
    expected = [torch.stack(PLAIN[kind](model, x)) for x in torch.cat(rows, dim=1)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "fields"), VARIANTS)
def test_gradients_are_the_finite_differences(kind, fields):
    """Of every parameter, those of gates and of each label's experts among them, and of the rows looked up."""
    model, batch = made(kind, fields), batch_of()
    named = dict(model.named_parameters())

    def loss(*values):
        return torch.func.functional_call(_Loss(model), dict(zip(names, values, strict=True)), (batch,))

    names = [f"model.{name}" for name in named]
    assert torch.autograd.gradcheck(loss, tuple(named.values()), atol=1e-6, fast_mode=True)
    model.loss(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in named.values())
    gates = [parameter.grad for name, parameter in named.items() if "gate" in name]
    assert bool(gates) == (kind in ("mmoe", "ple"))
    assert all(gradient.abs().max() > 1e-8 for gradient in gates)


class _Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model.loss(batch).sum()


# --- products --------------------------------------------------------------------------------------------------------


def test_the_logit_of_a_product():
    first, second = torch.linspace(-9, 9, 19, dtype=torch.float64), torch.linspace(-8, 7, 16, dtype=torch.float64)
    a, b = (part.reshape(-1) for part in torch.meshgrid(first, second, indexing="ij"))
    found = torch.sigmoid(product_logit(a, b))
    torch.testing.assert_close(found, torch.sigmoid(a) * torch.sigmoid(b), rtol=1e-7, atol=0)


def test_the_logit_of_a_product_far_from_zero():
    """Where a probability is 0 or 1 in float32 its logarithm would not be finite."""
    far = torch.tensor([-300.0, -300.0, 300.0, 300.0, 300.0], requires_grad=True)
    other = torch.tensor([-200.0, 200.0, -200.0, 400.0, 2.0], requires_grad=True)
    found = product_logit(far, other)
    found.sum().backward()
    assert found.tolist() == pytest.approx([-500.0, -300.0, -200.0, 300.0, 2.0])
    assert torch.isfinite(far.grad).all()
    assert torch.isfinite(other.grad).all()


def test_a_label_given_one_that_is_given_another():
    tasks = (LabelTask("pay"), LabelTask("click"), LabelTask("cart"))
    chain = {"pay": {"given": "cart"}, "cart": {"given": "click"}}
    model = made("esmm", {"hidden": HIDDEN, "tasks": chain}, labels=tasks)
    own = [tower(torch.cat([model.embeddings.rows, batch_of().dense], dim=1)).squeeze(1) for tower in model.towers]
    pay, click, cart = torch.sigmoid(torch.stack(own))
    expected = torch.stack([pay * cart * click, click, cart * click], dim=1)
    torch.testing.assert_close(torch.sigmoid(model.scores(batch_of())), expected, rtol=1e-7, atol=1e-12)


# --- losses ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_over_labels():
    model, batch = made("mmoe", TOWERS), batch_of()
    scores = model.scores(batch)
    terms = [
        task.weight * pointwise_loss(task.loss, scores[:, number], batch.labels[:, number])
        for number, task in enumerate(TASKS)
    ]
    torch.testing.assert_close(model.loss(batch), sum(terms))
    shares = torch.rand(B, len(TASKS), dtype=torch.float64)
    counted = sum(shares[:, number] * term for number, term in enumerate(terms))
    torch.testing.assert_close(model.loss(batch_of(shares=shares)), counted)


def test_an_absent_label_has_no_gradient():
    """Not even where its score is so far off that its loss is not finite."""
    labels = batch_of().labels
    labels[1:, 2] = torch.nan
    shares = (~labels.isnan()).double()
    model = made("shared_bottom", TOWERS)
    with torch.no_grad():
        model.towers[2][-1].bias += 1000.0 - model.scores(batch_of())[:, 2].max()
        shares[0, 2], labels[0, 2] = 0.0, torch.nan
    model.loss(batch_of(labels, shares)).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert not any(parameter.grad.any() for parameter in model.towers[2].parameters())
    assert any(parameter.grad.any() for parameter in model.towers[1].parameters())


@pytest.mark.parametrize("kind", ["poisson", "exponential"])
def test_likelihoods_of_counts_and_durations(kind):
    scores = torch.randn(40, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(40, dtype=torch.float64) % 7
    rate = scores.exp()
    known = torch.distributions.Poisson(rate) if kind == "poisson" else torch.distributions.Exponential(1 / rate)
    constant = torch.lgamma(labels + 1) if kind == "poisson" else 0.0
    expected = -known.log_prob(labels) - constant
    torch.testing.assert_close(pointwise_loss(kind, scores, labels), expected)
    assert torch.autograd.gradcheck(lambda z: pointwise_loss(kind, z, labels), (scores,))


# --- how it is built -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(False, False), (True, True)])
@pytest.mark.parametrize(("kind", "fields"), VARIANTS)
def test_the_size_is_the_parameters(kind, fields, options):
    fields = {**fields, "residual": options[0], "batch_norm": options[1]}
    model = made(kind, fields)
    size = model_spec(kind, embedding_dim=DIM, **fields).size(F, num_dense=N, num_labels=len(TASKS))
    assert size.parameters == sum(parameter.numel() for _, parameter in model.dense_parameters())


def linear(*sizes: int) -> int:
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


def test_parameters_are_as_many_as_the_documents_say():
    width, last = F * DIM + N, HIDDEN[-1]
    expert, later, tower = linear(width, *HIDDEN), linear(last, *HIDDEN), linear(last, *TOWER, 1)
    expected = [
        expert + 3 * tower,
        3 * expert + 3 * 3 * width + 3 * tower,
        7 * (expert + later) + 3 * 3 * (width + last) + 7 * width + 3 * tower,
        5 * expert + 3 * 3 * width + 3 * tower,
    ]
    for (kind, fields), count in zip(VARIANTS[:4], expected, strict=True):
        assert sum(p.numel() for _, p in made(kind, fields).dense_parameters()) == count, (kind, fields)
    of_esmm = made(*VARIANTS[-1]).dense_parameters()
    assert sum(parameter.numel() for _, parameter in of_esmm) == 3 * linear(width, *HIDDEN, 1)


def test_experts_and_gates_start_differently_and_alike_on_every_rank():
    first, again = made("ple", TOWERS), made("ple", TOWERS)
    for (name, one), (_, other) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    weights = [p for name, p in first.named_parameters() if p.dim() == 2 and "levels.0" in name]
    assert not any(
        torch.equal(a, b) for n, a in enumerate(weights) for b in weights[:n] if a.shape == b.shape
    )  # fmt: skip


def test_labels_are_needed():
    with pytest.raises(ValueError, match="mmoe learns several labels: give labels of the dataset"):
        made("mmoe", TOWERS, labels=())
