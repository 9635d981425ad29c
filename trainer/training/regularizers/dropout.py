"""Dropout taken apart: its explicit regularizer and its noise, for any torch module.

Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of Dropout.

h_i are the hidden layers, q the probability, eta_i -1 with probability q and else q / (1 - q), F(x, eta) the outputs
with (1 + eta_i) * h_i in the place of each h_i. For one sample:

    l_k     = 1/k sum_j l(F(x, eta_j))                                         DROPOUT_k (3.2, Algorithm 1)
    xi~     = grad l(F(x, eta_1)) - grad l(F(x, eta_2))                        of twice the covariance of DROPOUT_1's
    R       = sum_i <J_{F,i}^T H_out J_{F,i}, diag(h_i^2)>                     R_approx (4.4)
    R~      = sum_i J_{loss,i} diag(h_i^2) J_{loss,i}^T                        (5.1)
    xi      = grad sum_i J_{loss,i} (eta_i * h_i), eta_i of signs              xi_approx (4.6)

and a single number is differentiated, so that a step needs one backward pass through the layers below (the tables):

    masks k > 0:  l_k + f (l(F(x, eta_1)) - l(F(x, eta_2)))      f = sqrt((1 - 1/k) / 2)             section 3.1
                  l_k + f sum_i J_{loss,i} (eta_i * h_i)         f = sqrt(q / (1 - q)) sqrt(1 - 1/k)  Algorithm 4
    no masks:     l(F(x)) + lambda_1 R + the same with k = infinity                                    Algorithm 2

Samples must not see each other (no batch norm in training mode): derivatives of the sum of a batch's losses are then
those of each.

Differences from the paper: eta and its variance have q / (1 - q) where it prints q / (q - 1), a slip of the sign.
``coefficient: taylor`` gives R the 1/2 that equation 4.1 leaves out. For a Bernoulli output the Hessian p (1 - p) is
computed, and Algorithm 3's sampling of labels is an option. So is C.4's sampling of signs for the identity in the place
of H_out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.spec.regularizers import DropoutMethod
from trainer.training.regularizers.draws import EXACT_NOISE, IDENTITY_SIGNS, SIGNS, Draws, multipliers, signs
from trainer.training.regularizers.layers import HiddenLayers
from trainer.training.regularizers.outputs import BinaryCrossEntropy, Factor, OutputLoss, identity

Losses = Callable[[], Tensor]
"""A forward pass: the losses of the samples [b]."""


class Objective(NamedTuple):
    """The objective of a step.

    ``value`` [b]: its gradient is the step's. ``loss`` [b]: the part of it that is a loss, for people to read.
    """

    value: Tensor
    loss: Tensor


class DropoutObjective:
    """The objective that a step with dropout differentiates, by ``method``.

    dropout = DropoutObjective(net, [net[1], net[3]], rate=0.4, method=DropoutMethod(masks=8, noise="approximate"))
    dropout(lambda: cross_entropy(net(x), y, reduction="none"), GeneratorDraws(generator)).value.mean().backward()

    Args:
        module: the network; its output [b], [b, c] or, for sequences, [b, ..., c] is F(x). If the output is a tuple, as
            of recurrent modules with their state, F(x) is its first element.
        layers: modules whose outputs (the first element of a tuple) are the h_i, with samples along the first
            dimension; recurrent modules need ``batch_first=True``.
        rate: q.
        output: the loss as a function of F(x), for the output Hessian.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        rate: float,
        method: DropoutMethod | None = None,
        output: OutputLoss | None = None,
    ):
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"the probability of dropout must lie in [0, 1), not {rate}")
        self.module, self.hidden, self.rate = module, HiddenLayers(layers), rate
        self.method, self.output = method or DropoutMethod(), output or BinaryCrossEntropy()

    def __call__(self, losses: Losses, draws: Draws) -> Objective:
        """Return the objective of a step.

        ``losses`` is called for each forward pass that is needed: it must run ``module``, and without dropout give the
        same values each time.
        """
        method = self.method
        if method.masks:
            loss = dropout_k(losses, self.hidden, self.rate, method.masks, draws)
            value = loss
        needs_derivatives = method.noise == "approximate" or method.explicit != "none"
        if not method.masks or needs_derivatives:
            with self.hidden.recorded() as layers, _outputs_of(self.module) as outputs:
                plain = losses()
        if not method.masks:
            loss = value = plain
        if method.explicit != "none":
            value = value + method.lambda_1(self.rate) * self._explicit(plain, outputs, layers, draws)
        if method.noise == "exact":
            value = value + method.noise_factor(self.rate) * exact_noise(losses, self.hidden, self.rate, draws)
        elif method.noise == "approximate":
            value = value + method.noise_factor(self.rate) * approximate_noise(plain, layers, draws)
        return Objective(value, loss)

    def _explicit(self, loss: Tensor, outputs: list[Tensor], layers: Sequence[Tensor], draws: Draws) -> Tensor:
        if self.method.explicit == "loss_jacobian":
            return explicit_regularizer([Factor(loss, 1.0)], layers)
        (output,) = outputs
        if self.method.explicit == "identity":
            num_signs = self.method.sign_samples
            if num_signs is not None:
                return sampled_identity_regularizer(output, layers, draws, num_signs)
            return explicit_regularizer(identity(output), layers)
        count = self.method.label_samples
        factors = self.output.hessian(output) if count is None else self.output.sampled(output, count, draws)
        return explicit_regularizer(factors, layers)


def dropout_k(losses: Losses, hidden: HiddenLayers, rate: float, masks: int, draws: Draws) -> Tensor:
    """Return l_k [b] (equation 3.2): the loss averaged over ``masks`` draws of dropout.

    One draw is dropout as it is usually defined.
    """
    return torch.stack([_masked(losses, hidden, rate, draw, draws) for draw in range(masks)]).mean(0)


def exact_noise(losses: Losses, hidden: HiddenLayers, rate: float, draws: Draws) -> Tensor:
    """Return [b], whose gradient is xi~ (section 3.1): the difference of the losses under two independent draws."""
    first, second = (_masked(losses, hidden, rate, draw, draws) for draw in EXACT_NOISE)
    return first - second


def explicit_regularizer(factors: Sequence[Factor], layers: Sequence[Tensor]) -> Tensor:
    """Return sum_i <J_i^T (sum_y w_y a_y a_y^T) J_i, diag(h_i^2)> [b], differentiable.

    It is R_approx (4.4) for the factors of the output Hessian or for sampled ones (Algorithm 3), R~ (5.1) for that of
    the loss, <J_i^T J_i, ..> (C.4) for those of the identity. ``layers``: the h_i that the factors were computed from.
    """
    total: Tensor | None = None
    for value, weight in factors:
        for gradient, layer in zip(_derivatives(value, layers), layers, strict=True):
            term = weight * (gradient * layer).square().flatten(1).sum(1)
            total = term if total is None else total + term
    assert total is not None
    return total


def approximate_noise(loss: Tensor, layers: Sequence[Tensor], draws: Draws) -> Tensor:
    """Return sum_i J_{loss,i} (eta_i * h_i) [b], whose gradient is xi_approx (4.6), with signs for eta_i.

    Signs have variance 1, so it is to be multiplied with sqrt(q / (1 - q)) (the paper, note 5).
    """
    terms = [
        (gradient * layer * signs(draws, SIGNS, site, layer)).flatten(1).sum(1)
        for site, (gradient, layer) in enumerate(zip(_derivatives(loss, layers), layers, strict=True))
    ]
    return torch.stack(terms).sum(0)


def sampled_identity_regularizer(outputs: Tensor, layers: Sequence[Tensor], draws: Draws, count: int = 1) -> Tensor:
    """Return the mean over ``count`` draws of signs eta_i of sum_i |J_{F,i} (eta_i * h_i)|^2 [b].

    Its expectation is sum_i <J_i^T J_i, diag(h_i^2)> (C.4). It takes one backward pass, and one for each draw, however
    many outputs there are; exactly, it is :func:`explicit_regularizer` of
    :func:`trainer.training.regularizers.outputs.identity`, with one backward pass for each output.
    """
    probe = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, layers, probe, create_graph=True, allow_unused=True)
    total = torch.zeros(len(outputs), dtype=outputs.dtype, device=outputs.device)
    for site, (back, layer) in enumerate(zip(pulled, layers, strict=True)):
        if back is None:
            continue
        for draw in range(IDENTITY_SIGNS, IDENTITY_SIGNS + count):
            # back is J^T probe: its derivative by the probe in the direction v is J v.
            moved = layer * signs(draws, draw, site, layer)
            (forward,) = torch.autograd.grad(back, probe, moved, create_graph=True)
            total = total + forward[:, None].flatten(1).square().sum(1) / count
    return total


def _masked(losses: Losses, hidden: HiddenLayers, rate: float, draw: int, draws: Draws) -> Tensor:
    with hidden.multiplied(lambda site, like: multipliers(draws, draw, site, like, rate)):
        return losses()


def _derivatives(value: Tensor, layers: Sequence[Tensor]) -> list[Tensor]:
    """Return D_{h_i} value of each sample, of the shape of h_i, differentiable; 0 where value is constant in h_i."""
    gradients = torch.autograd.grad(value.sum(), layers, create_graph=True, allow_unused=True)
    return [torch.zeros_like(layer) if each is None else each for each, layer in zip(gradients, layers, strict=True)]


@contextlib.contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that the module's forward passes within fill with their outputs."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(
        lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        yield outputs
    finally:
        handle.remove()
