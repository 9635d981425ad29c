"""Dropout regularizers: against sums over every mask of tiny nets, averages over many draws, and finite differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.spec.regularizers import DropoutMethod
from trainer.training.regularizers.draws import (
    EXACT_NOISE,
    IDENTITY_SIGNS,
    SIGNS,
    CounterDraws,
    GeneratorDraws,
    multipliers,
)
from trainer.training.regularizers.dropout import (
    DropoutObjective,
    approximate_noise,
    explicit_regularizer,
    sampled_identity_regularizer,
)
from trainer.training.regularizers.layers import HiddenLayers
from trainer.training.regularizers.outputs import (
    OUTPUT_LOSSES,
    BinaryCrossEntropy,
    CrossEntropy,
    Factor,
    OutputLoss,
    PointwiseLoss,
    SquaredError,
    identity,
    stability,
)

RATE = 0.3
VARIANCE = RATE / (1 - RATE)


def number(value: Tensor) -> float:
    return value.detach().item()


def net(outputs: int = 1, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """3 -> 2 -> 2 -> outputs in float64: four hidden units, sixteen masks."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 2), activation(), nn.Linear(2, 2), activation(), nn.Linear(2, outputs)
    ).double()  # fmt: skip


LAYERS = (1, 3)


def data(count: int = 4, classes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


def hidden_of(model: nn.Sequential) -> HiddenLayers:
    return HiddenLayers([model[i] for i in LAYERS])


def gradient_of(model: nn.Module, value: Tensor) -> Tensor:
    """d value / d parameters, flat."""
    found = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([
        torch.zeros_like(p).flatten() if g is None else g.flatten()
        for g, p in zip(found, model.parameters(), strict=True)
    ])  # fmt: skip


def bce(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: BinaryCrossEntropy().loss(model(x), y)


def every_mask(model: nn.Sequential, losses: Callable[[], Tensor]) -> list[tuple[float, Tensor]]:
    """(probability, losses [b]) of each of the sixteen masks, the same for all samples."""
    found = []
    for bits in itertools.product((0, 1), repeat=4):
        masks = torch.tensor(bits, dtype=torch.float64).view(2, 2) / (1 - RATE)
        probability = math.prod(1 - RATE if bit else RATE for bit in bits)
        with hidden_of(model).multiplied(lambda site, like, masks=masks: masks[site].expand_as(like)):
            found.append((probability, losses()))
    assert sum(probability for probability, _ in found) == pytest.approx(1.0)
    return found


# --- DROPOUT_k -------------------------------------------------------------------------------------------------------


def test_masks_have_mean_one_and_the_variance_of_dropout():
    """eta of the kept is q / (1 - q): with q / (q - 1), as it is printed, the mean would be 1 - 2 q."""
    draws, like = CounterDraws(seed=1, step=1), torch.ones(20_000, 5, dtype=torch.float64)
    found = multipliers(draws, 0, 0, like, RATE)
    assert set(found.unique().tolist()) == {0.0, 1 / (1 - RATE)}
    # Standard error of the mean sqrt(.43 / 1e5) = .002.
    assert number(found.mean()) == pytest.approx(1.0, abs=0.01)
    assert number(found.var()) == pytest.approx(VARIANCE, abs=0.01)


def test_counters_name_samples_not_places():
    """The masks of a batch are those of its parts, and differ by step, draw, site and seed."""
    like = torch.ones(12, 7, dtype=torch.float64)
    whole = CounterDraws(3, 9).keep_mask(2, 1, like, 0.5)
    parts = [CounterDraws(3, 9, start).keep_mask(2, 1, like[start : start + 4], 0.5) for start in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), whole)
    others = [
        (CounterDraws(3, 10), 2, 1),
        (CounterDraws(4, 9), 2, 1),
        (CounterDraws(3, 9), 3, 1),
        (CounterDraws(3, 9), 2, 0),
    ]
    for draws, draw, site in others:
        assert not torch.equal(draws.keep_mask(draw, site, like, 0.5), whole)
    words = CounterDraws(3, 9).uniforms(132, 5, like)
    assert torch.equal(words[4:8], CounterDraws(3, 9, 4).uniforms(132, 5, like[4:8]))
    assert number(words.min()) >= 0.0
    assert number(words.max()) < 1.0


def test_dropout_k_averages_the_losses_under_its_masks():
    model, (x, y) = net(), data()
    draws = CounterDraws(1, 7, sample_offset=40)
    objective = DropoutObjective(model, [model[i] for i in LAYERS], RATE, DropoutMethod(masks=3))(
        bce(model, x, y), draws
    )
    by_hand = []
    for draw in range(3):
        masks = [multipliers(draws, draw, site, torch.ones(4, 2, dtype=torch.float64), RATE) for site in (0, 1)]
        h = torch.tanh(model[0](x)) * masks[0]
        h = torch.tanh(model[2](h)) * masks[1]
        by_hand.append(BinaryCrossEntropy().loss(model[4](h), y))
    expected = torch.stack(by_hand).mean(0)
    torch.testing.assert_close(objective.value, expected, rtol=1e-12, atol=0)
    assert objective.loss is objective.value
    assert not model[1]._forward_hooks  # nothing stays behind


def test_dropout_k_has_the_expected_loss_and_a_kth_of_the_variance():
    """Against the sum over all masks: the mean over draws, and the covariance of the gradient by 1/k."""
    model, (x, y) = net(), data(1)
    losses = every_mask(model, bce(model, x, y))
    mean = sum(p * number(loss) for p, loss in losses)
    gradients = torch.stack([gradient_of(model, loss.sum()) for _, loss in losses])
    weights = torch.tensor([p for p, _ in losses], dtype=torch.float64)
    mean_gradient = weights @ gradients
    variance = number(weights @ (gradients - mean_gradient).square().sum(1))
    for k in (1, 4):
        values, drawn = many_draws(DropoutMethod(masks=k))
        assert number(values.mean()) == pytest.approx(mean, rel=0.02)
        # Relative error of a variance of so many samples: about sqrt(2 / 20000) = .01, heavier tails included .03.
        assert number((drawn - mean_gradient).square().sum(1).mean()) == pytest.approx(variance / k, rel=0.05)


class Copies(nn.Module):
    """The net with weights of its own for each sample [b, ...]: a backward of all gives the gradient of each."""

    def __init__(self, model: nn.Sequential, count: int):
        super().__init__()
        self.maps = nn.ParameterList(
            p.detach().expand(count, *p.shape).clone() for p in model.parameters()
        )  # fmt: skip
        self.activations = nn.ModuleList([nn.Tanh(), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        for number_, activation in enumerate((*self.activations, lambda h: h)):
            weight, bias = self.maps[2 * number_], self.maps[2 * number_ + 1]
            x = activation(torch.einsum("bi,boi->bo", x, weight) + bias)
        return x


def many_draws(method: DropoutMethod, rate: float = RATE, count: int = 20_000) -> tuple[Tensor, Tensor]:
    """Values of one sample under so many draws [count], and the gradient of each [count, parameters]."""
    x, y = data(1)
    model = Copies(net(), count)
    objective = DropoutObjective(model, list(model.activations), rate, method)
    value = objective(bce(model, x.expand(count, 3), y.expand(count)), CounterDraws(4, 1)).value
    found = torch.autograd.grad(value.sum(), list(model.maps))
    return value.detach(), torch.cat([part.flatten(1) for part in found], dim=1)


@pytest.mark.parametrize("k", [0, 2, 8])
def test_noise_added_back_gives_the_covariance_of_one_mask(k):
    """Section 3.1: Cov(grad l_k) + f^2 Cov(xi~) = Cov(grad l_1), f = sqrt((1 - 1/k) / 2); without masks f = sqrt(1/2)
    and the mean is the plain gradient."""
    model, (x, y) = net(), data(1)
    losses = every_mask(model, bce(model, x, y))
    weights = torch.tensor([p for p, _ in losses], dtype=torch.float64)
    gradients = torch.stack([gradient_of(model, loss.sum()) for _, loss in losses])
    mean = weights @ gradients
    covariance = (gradients - mean).T @ ((gradients - mean) * weights[:, None])
    if k == 0:
        mean = gradient_of(model, bce(model, x, y)().sum())
    _, drawn = many_draws(DropoutMethod(masks=k, noise="exact"))
    found = torch.cov(drawn.T, correction=0)
    scale = number(covariance.diagonal().sum())
    assert number((drawn.mean(0) - mean).norm()) < 4 * math.sqrt(scale / len(drawn))
    assert number((found - covariance).norm()) < 0.05 * number(covariance.norm())
    if k > 1:
        less = torch.cov(many_draws(DropoutMethod(masks=k))[1].T, correction=0)
        assert number(less.diagonal().sum()) < 0.65 * scale  # what the noise makes up for


# --- explicit regularizers -------------------------------------------------------------------------------------------


def jacobians(model: nn.Sequential, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """By layer h_i [d] and J_{F,i} [c, d] of one sample, and its outputs, by torch.func."""
    h1 = torch.tanh(model[0](x))
    h2 = torch.tanh(model[2](h1))
    after1 = lambda h: model[4](torch.tanh(model[2](h)))  # noqa: E731
    found = [torch.func.jacrev(after1)(h1), torch.func.jacrev(model[4])(h2)]
    return [h1, h2], found, model[4](h2)


@pytest.mark.parametrize(("loss", "outputs"), [(BinaryCrossEntropy(), 1), (CrossEntropy(), 3), (SquaredError(), 2)])
def test_the_explicit_regularizer_is_that_of_its_definition(loss: OutputLoss, outputs):
    """R_approx (4.4), C.4 and R~ (5.1) by Jacobians and Hessians formed for each sample."""
    model, (x, y) = net(outputs), data(classes=max(outputs, 2))
    targets = torch.randn(4, 2, dtype=torch.float64) if isinstance(loss, SquaredError) else y
    with hidden_of(model).recorded() as layers:
        out = model(x)
    losses = loss.loss(out, targets)
    found = {
        "output_hessian": explicit_regularizer(loss.hessian(out), layers),
        "identity": explicit_regularizer(identity(out), layers),
        "loss_jacobian": explicit_regularizer([Factor(losses, 1.0)], layers),
    }
    for i in range(4):
        hs, js, f = jacobians(model, x[i])
        one = lambda f, i=i: loss.loss(f[None], targets[i : i + 1])[0]  # noqa: E731
        hessian = torch.func.hessian(one)(f.detach())
        first = torch.func.grad(one)(f.detach())
        for name, inner in (
            ("output_hessian", hessian), ("identity", torch.eye(outputs)), ("loss_jacobian", torch.outer(first, first)),
        ):  # fmt: skip
            expected = sum(
                number((j.T @ inner.double() @ j).diagonal() @ h.square()) for h, j in zip(hs, js, strict=True)
            )
            assert number(found[name][i]) == pytest.approx(expected, rel=1e-10), name
    if isinstance(loss, BinaryCrossEntropy):
        p = torch.sigmoid(out[:, 0])
        torch.testing.assert_close(loss.hessian(out)[0].weight, (p * (1 - p)).detach())


@pytest.mark.parametrize("kind", ["bce", "mse"])
def test_the_output_hessian_of_a_loss_of_its_function_alone_is_the_same(kind):
    found = []
    for loss in (PointwiseLoss(kind), OUTPUT_LOSSES[kind]()):
        z = torch.linspace(-3.0, 3.0, 7, dtype=torch.float64, requires_grad=True)
        ((value, constant),), ((_, weight),) = loss.hessian(z), loss.hessian(z, through=True)
        assert torch.equal(value, z)
        assert not torch.as_tensor(constant).requires_grad
        (moved,) = torch.autograd.grad((z * weight).sum(), z)
        found.append([constant + 0 * z.detach(), weight + 0 * z, moved])
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="label_samples"):
        PointwiseLoss(kind).sampled(z, 1, CounterDraws(1, 1))


def test_the_regularizer_is_the_second_order_of_what_dropout_adds():
    """q / (1 - q) / 2 times the trace of (D_h^2 l) diag(h^2), equation 4.2 with Taylor's 1/2, is what dropout adds to
    the loss to second order: here exactly so, as the last layer is dropped alone and the loss is a square."""
    model, (x, _) = net(), data()
    y = torch.randn(4, 1, dtype=torch.float64)
    losses = lambda: SquaredError().loss(model(x), y)  # noqa: E731
    last = HiddenLayers([model[3]])
    expected = torch.zeros(4, dtype=torch.float64)
    for bits in itertools.product((0, 1), repeat=2):
        mask = torch.tensor(bits, dtype=torch.float64) / (1 - RATE)
        with last.multiplied(lambda site, like, mask=mask: mask.expand_as(like)):
            expected += math.prod(1 - RATE if bit else RATE for bit in bits) * losses()
    expected -= losses()
    method = DropoutMethod(masks=0, explicit="output_hessian", coefficient="taylor")
    objective = DropoutObjective(model, [model[3]], RATE, method, SquaredError())(losses, CounterDraws(1, 1))
    torch.testing.assert_close(objective.value - objective.loss, expected, rtol=1e-10, atol=1e-12)
    published = DropoutMethod(masks=0, explicit="output_hessian")
    assert published.lambda_1(0.4) == pytest.approx(2 / 3)  # the lambda_1 of appendix D
    assert published.lambda_1(0.1) == pytest.approx(0.11, abs=0.002)
    assert method.lambda_1(0.4) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("loss", "outputs"), [(BinaryCrossEntropy(), 1), (CrossEntropy(), 3)])
def test_sampled_labels_are_unbiased_and_their_gradient_leaves_the_probabilities_alone(loss: OutputLoss, outputs):
    """Algorithm 3: the mean over labels from the model is R_approx (claim C.1); and the mean of its gradient is that of
    R with the probabilities held fixed (note 7), not that of R."""
    model, (x, _) = net(outputs), data(1)
    classes = max(outputs, 2)
    with hidden_of(model).recorded() as layers:
        out = model(x)
    p = (
        torch.softmax(out, 1)[0]
        if outputs > 1
        else torch.stack([1 - torch.sigmoid(out)[0, 0], torch.sigmoid(out)[0, 0]])
    )
    values = [explicit_regularizer([Factor(loss.loss(out, torch.tensor([c])), 1.0)], layers)[0] for c in range(classes)]
    exact, through = (explicit_regularizer(loss.hessian(out, through=t), layers)[0] for t in (False, True))
    mean = sum(number(p[c]) * values[c] for c in range(classes))
    assert number(mean) == pytest.approx(number(exact), rel=1e-10)
    assert number(exact) == pytest.approx(number(through), rel=1e-12)
    torch.testing.assert_close(gradient_of(model, mean), gradient_of(model, exact), rtol=1e-8, atol=1e-12)
    assert number((gradient_of(model, through) - gradient_of(model, exact)).norm()) > 1e-3

    many = x.expand(5000, 3)
    with hidden_of(model).recorded() as layers:
        out = model(many)
    sampled = explicit_regularizer(loss.sampled(out, 4, CounterDraws(1, 1)), layers)
    error = 4 * number(sampled.std()) / math.sqrt(len(many))
    assert number(sampled.mean()) == pytest.approx(number(exact), abs=error)
    assert error < 0.1 * number(exact)


def test_the_identity_can_be_sampled():
    """C.4: the mean over signs of |J (eta * h)|^2, by every sign of two hidden layers of two."""
    model, (x, _) = net(3), data(1)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=2)), dtype=torch.float64)

    class EverySign:
        def keep_mask(self, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
            return signs > 0

        def uniforms(self, draw: int, count: int, like: Tensor) -> Tensor:
            raise AssertionError

    with hidden_of(model).recorded() as layers:
        out = model(x.expand(4, 3))
    exact = explicit_regularizer(identity(out), layers)
    found = sampled_identity_regularizer(out, layers, EverySign())
    assert number(found.mean()) == pytest.approx(number(exact[0]), rel=1e-10)
    assert number(found.std()) > 1e-3


@pytest.mark.parametrize("count", [1, 8])
def test_drawn_signs_have_the_identity_for_their_mean_and_a_countth_of_the_variance(count):
    """As an objective of one logit, [b]: by Jacobians for each draw of the signs, and in the mean over many."""
    model, (x, y) = net(), data(1)
    flat = nn.Sequential(*model, nn.Flatten(0))
    method = DropoutMethod(masks=0, explicit="identity", sign_samples=count, explicit_strength=1.0)
    objective = DropoutObjective(flat, [model[i] for i in LAYERS], RATE, method)
    num = 5000
    draws = CounterDraws(3, 2)
    many = objective(bce(flat, x.expand(num, 3), y.expand(num)), draws)
    terms = many.value - many.loss
    like = torch.ones(num, 2, dtype=torch.float64)
    hs, js, _ = jacobians(model, x[0])
    by_hand = torch.zeros(num, dtype=torch.float64)
    for draw in range(count):
        for site, (h, j) in enumerate(zip(hs, js, strict=True)):
            eta = 2.0 * draws.keep_mask(IDENTITY_SIGNS + draw, site, like, 0.5).double() - 1.0
            by_hand += ((eta * h) @ j[0]).square() / count
    torch.testing.assert_close(terms, by_hand, rtol=1e-9, atol=1e-12)
    exact = DropoutMethod(masks=0, explicit="identity", explicit_strength=1.0)
    once = DropoutObjective(flat, [model[i] for i in LAYERS], RATE, exact)(bce(flat, x, y), draws)
    expected = number((once.value - once.loss)[0])
    # Of one draw, two units each: sum_i 4 (a_i b_i)^2 with a_i, b_i the units' parts.
    variance = sum(4.0 * number((h * j[0]).prod()) ** 2 for h, j in zip(hs, js, strict=True)) / count
    assert number(terms.mean()) == pytest.approx(expected, abs=4 * math.sqrt(variance / num))
    assert number(terms.var()) == pytest.approx(variance, rel=0.1)  # about sqrt(2 / 5000) = .02 of a variance


# --- noise by derivatives --------------------------------------------------------------------------------------------


def test_approximate_noise_is_that_of_its_equation():
    """(4.6): sum_i J_{loss,i} (eta_i * h_i) with the signs of the draws, by Jacobians of each sample."""
    model, (x, y) = net(), data()
    draws = CounterDraws(8, 2, sample_offset=5)
    with hidden_of(model).recorded() as layers:
        loss = bce(model, x, y)()
    found = approximate_noise(loss, layers, draws)
    like = torch.ones(4, 2, dtype=torch.float64)
    for i in range(4):
        hs, js, f = jacobians(model, x[i])
        first = torch.func.grad(lambda f, i=i: BinaryCrossEntropy().loss(f[None], y[i : i + 1])[0])(f.detach())
        expected = 0.0
        for site, (h, j) in enumerate(zip(hs, js, strict=True)):
            eta = 2.0 * draws.keep_mask(SIGNS, site, like, 0.5)[i].double() - 1.0
            expected += number(first @ j @ (eta * h))
        assert number(found[i]) == pytest.approx(expected, rel=1e-10)


def test_approximate_noise_matches_exact_noise_for_little_dropout():
    """To first order in delta both are the same: at q = .001 their covariances differ by little."""
    model, (x, y) = net(), data(1)
    rate = 0.001
    plain = gradient_of(model, bce(model, x, y)().sum())
    _, drawn = many_draws(DropoutMethod(masks=0, noise="approximate"), rate)
    assert number((drawn.mean(0) - plain).norm()) < 4 * number(drawn.std(0).norm()) / math.sqrt(len(drawn))

    masks = []
    for unit in range(4):  # one unit dropped at a time: more at once have a probability of 1e-6
        mask = torch.full((2, 2), 1 / (1 - rate), dtype=torch.float64)
        mask.view(-1)[unit] = 0.0
        with hidden_of(model).multiplied(lambda site, like, mask=mask: mask[site].expand_as(like)):
            masks.append(gradient_of(model, bce(model, x, y)().sum()))
    exact = sum(rate * torch.outer(g - plain, g - plain) for g in masks)
    found = torch.cov(drawn.T, correction=0)
    cosine = number((found * exact).sum() / (found.norm() * exact.norm()))
    assert cosine > 0.8  # a whole unit dropped is not a small perturbation, but the directions are those
    assert 0.4 < number(found.diagonal().sum() / exact.diagonal().sum()) < 2.5


def test_factors_of_the_noise():
    """Section 3.1, Algorithm 4, and lambda_2 of appendix D."""
    assert DropoutMethod(masks=4, noise="exact").noise_factor(0.3) == pytest.approx(math.sqrt(0.375))
    assert DropoutMethod(masks=4, noise="approximate").noise_factor(0.4) == pytest.approx(math.sqrt(2 / 3 * 0.75))
    assert DropoutMethod(masks=0, noise="approximate").noise_factor(0.4) == pytest.approx(math.sqrt(2 / 3))
    assert DropoutMethod(masks=0, noise="approximate", noise_strength=0.1).noise_factor(0.4) == 0.1


# --- what a step differentiates --------------------------------------------------------------------------------------

METHODS = [
    DropoutMethod(),
    DropoutMethod(masks=3, noise="exact"),
    DropoutMethod(masks=3, noise="approximate"),
    DropoutMethod(masks=0, explicit="loss_jacobian"),
    DropoutMethod(masks=0, explicit="identity", noise="exact"),
    DropoutMethod(masks=0, explicit="identity", sign_samples=2),
    DropoutMethod(masks=0, noise="approximate"),
]


@pytest.mark.parametrize(
    "method", METHODS, ids=lambda method: f"{method.masks}-{method.explicit}-{method.noise}-{method.sign_samples}"
)
def test_gradients_are_those_of_finite_differences(method):
    """The whole objective under fixed draws is a smooth function of the weights (tanh), and its gradient its slope."""
    model, (x, y) = net(), data()
    objective = DropoutObjective(model, [model[i] for i in LAYERS], RATE, method)

    def value() -> Tensor:
        return objective(bce(model, x, y), CounterDraws(1, 3)).value.sum()

    gradient = gradient_of(model, value())
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    step, numeric = 1e-6, torch.zeros_like(gradient)
    for i in range(len(parameters)):
        ends = []
        for sign in (1.0, -1.0):
            moved = parameters.clone()
            moved[i] += sign * step
            nn.utils.vector_to_parameters(moved, model.parameters())
            ends.append(number(value()))
        numeric[i] = (ends[0] - ends[1]) / (2 * step)
    # Rounding of differences of numbers near 1: 1e-16 / 1e-6.
    torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("explicit", ["output_hessian", "loss_jacobian", "identity"])
def test_algorithm_2_adds_its_parts(explicit):
    model, (x, y) = net(), data()
    layers, draws = [model[i] for i in LAYERS], CounterDraws(1, 3)
    method = DropoutMethod(masks=0, explicit=explicit, noise="approximate", explicit_strength=0.7, noise_strength=0.2)
    found = DropoutObjective(model, layers, RATE, method)(bce(model, x, y), draws)
    with hidden_of(model).recorded() as hs:
        out = model(x)
        loss = BinaryCrossEntropy().loss(out, y)
    factors = {
        "output_hessian": BinaryCrossEntropy().hessian(out),
        "loss_jacobian": [Factor(loss, 1.0)],
        "identity": identity(out),
    }
    expected = loss + 0.7 * explicit_regularizer(factors[explicit], hs)
    expected = expected + 0.2 * approximate_noise(loss, hs, draws)
    torch.testing.assert_close(found.value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)


def test_eight_labels_are_the_mean_of_eight():
    """Algorithm 3 with n labels: the mean of n draws, so an nth of the variance of one."""
    model, (x, y) = net(), data(1)
    layers, num = [model[i] for i in LAYERS], 5000
    variances = []
    for count in (1, 8):
        method = DropoutMethod(masks=0, explicit="output_hessian", label_samples=count)
        found = DropoutObjective(model, layers, RATE, method)(
            bce(model, x.expand(num, 3), y.expand(num)), CounterDraws(2, 1)
        )
        variances.append(number((found.value - found.loss).var()))
    assert variances[0] / variances[1] == pytest.approx(8.0, rel=0.15)  # each to about sqrt(2 / 5000) = .02


def test_any_module_and_any_layer_shape():
    """A recurrent net over sequences, with the states of all places as one layer [b, l, d]: beyond towers."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.recurrent, self.states = (
                nn.Embedding(9, 4),
                nn.RNN(4, 5, batch_first=True),
                nn.Identity(),
            )
            self.output = nn.Linear(5, 7)

        def forward(self, ids: Tensor) -> Tensor:
            return self.output(self.states(self.recurrent(self.embedding(ids))[0])[:, -1])

    model, ids, y = Net(), torch.randint(9, (6, 3)), torch.randint(7, (6,))
    method = DropoutMethod(masks=0, explicit="output_hessian", noise="approximate", label_samples=2)
    objective = DropoutObjective(model, [model.embedding, model.states], 0.2, method, CrossEntropy())
    draws = GeneratorDraws(torch.Generator().manual_seed(1))
    found = objective(lambda: cross_entropy(model(ids), y, reduction="none"), draws)
    assert found.value.shape == (6,)
    found.value.mean().backward()
    assert all(number(p.grad.abs().sum()) > 0 for p in model.parameters())


def test_stability_is_what_bounds_the_gap():
    """mu and nu of theorem 4.1 in closed form: |p - y| and p (1 - p); |p - 1_y| and 1 - |p|^2."""
    z, y = torch.randn(50, 3, dtype=torch.float64), torch.randint(3, (50,))
    p = torch.softmax(z, 1)
    error = (p - nn.functional.one_hot(y, 3)).norm(dim=1).mean()
    assert stability(CrossEntropy(), z, y) == pytest.approx((number(error), number((1 - p.square().sum(1)).mean())))
    p, y = torch.sigmoid(z[:, 0]), y.clamp(max=1)
    expected = number((p - y).abs().mean()), number((p * (1 - p)).mean())
    assert stability(BinaryCrossEntropy(), z[:, 0], y) == pytest.approx(expected)


def test_nothing_to_regularize_is_an_error():
    with pytest.raises(ValueError, match="no hidden layers"):
        DropoutObjective(net(), [], 0.5)
    with pytest.raises(ValueError, match="probability of dropout"):
        DropoutObjective(net(), [nn.Tanh()], 1.0)
    with pytest.raises(ValueError, match="one logit"):
        BinaryCrossEntropy().loss(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(ValueError, match="label_samples"):
        SquaredError().sampled(torch.zeros(3), 1, CounterDraws(0, 1))
    assert len(EXACT_NOISE) == 2
