"""Dropout split into its explicit regularizer and its noise, for any torch module.

Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of Dropout.

h_i are the hidden layers and q is the probability of dropout. eta_i is -1 with probability q, and else q / (1 - q).
F(x, eta) are the outputs of the network if each h_i is replaced by (1 + eta_i) * h_i. For one sample:

    l_k     = 1/k sum_j l(F(x, eta_j))                                         DROPOUT_k (3.2, Algorithm 1)
    xi~     = grad l(F(x, eta_1)) - grad l(F(x, eta_2))                        twice the covariance of DROPOUT_1's noise
    R       = sum_i <J_{F,i}^T H_out J_{F,i}, diag(h_i^2)>                     R_approx (4.4)
    R~      = sum_i J_{loss,i} diag(h_i^2) J_{loss,i}^T                        (5.1)
    xi      = grad sum_i J_{loss,i} (eta_i * h_i), eta_i random signs          xi_approx (4.6)

A step differentiates a single number, so it needs one backward pass through the layers below, such as the tables:

    masks k > 0:  l_k + f (l(F(x, eta_1)) - l(F(x, eta_2)))      f = sqrt((1 - 1/k) / 2)             section 3.1
                  l_k + f sum_i J_{loss,i} (eta_i * h_i)         f = sqrt(q / (1 - q)) sqrt(1 - 1/k)  Algorithm 4
    no masks:     l(F(x)) + lambda_1 R + the same noise with k = infinity                              Algorithm 2

A sample's outputs must not depend on other samples, so batch norm in training mode is not allowed. Derivatives of the
sum of a batch's losses are then the derivatives for each sample.

Differences from the paper: eta and its variance have q / (1 - q), because the paper's q / (q - 1) has a wrong sign.
``coefficient: taylor`` gives R the factor 1/2 that equation 4.1 leaves out. For a Bernoulli output the exact Hessian
p (1 - p) is the default; Algorithm 3, which samples labels, is an option. The identity instead of H_out (section 5.2)
can be exact or sampled by signs (C.4).
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
"""Function that runs one forward pass and returns the loss of each sample [b]."""


class Objective(NamedTuple):
    """The objective of a step.

    ``value`` [b] is differentiated. ``loss`` [b] is its part without penalties and noise, which is reported to users.
    """

    value: Tensor
    loss: Tensor


class DropoutObjective:
    """The objective that a step with dropout differentiates.

    dropout = DropoutObjective(net, [net[1], net[3]], rate=0.4, method=DropoutMethod(masks=8, noise="approximate"))
    dropout(lambda: cross_entropy(net(x), y, reduction="none"), GeneratorDraws(generator)).value.mean().backward()

    Args:
        module: the network. Its output F(x) is [b], [b, c] or, for sequences, [b, ..., c]. If it returns a tuple, as
            recurrent modules do, F(x) is the first element.
        layers: modules whose outputs (the first element of a tuple) are the h_i, with samples along the first
            dimension; recurrent modules need ``batch_first=True``.
        rate: the probability q of dropout.
        method: the terms of the objective; None: the defaults of DropoutMethod.
        output: the loss as a function of F(x), for the output Hessian; None: binary cross-entropy.
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

        ``losses`` is called once for each forward pass. The function must run ``module``, and must return the same
        values each time if there is no dropout.
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
    """Return l_k [b] (equation 3.2): the loss averaged over k = ``masks`` draws of dropout. k = 1 is usual dropout."""
    return torch.stack([_masked(losses, hidden, rate, draw, draws) for draw in range(masks)]).mean(0)


def exact_noise(losses: Losses, hidden: HiddenLayers, rate: float, draws: Draws) -> Tensor:
    """Return the difference of the losses [b] under two independent draws; its gradient is xi~ (section 3.1)."""
    first, second = (_masked(losses, hidden, rate, draw, draws) for draw in EXACT_NOISE)
    return first - second


def explicit_regularizer(factors: Sequence[Factor], layers: Sequence[Tensor]) -> Tensor:
    """Return sum_i <J_i^T (sum_y w_y a_y a_y^T) J_i, diag(h_i^2)> [b], differentiable.

    For exact or sampled factors of the output Hessian it is R_approx (4.4). For the one factor of the loss it is
    R~ (5.1). For the factors of the identity it is <J_i^T J_i, diag(h_i^2)> (C.4). ``layers``: the h_i from which the
    factors were computed.
    """
    total: Tensor | None = None
    for value, weight in factors:
        for gradient, layer in zip(_derivatives(value, layers), layers, strict=True):
            term = weight * (gradient * layer).square().flatten(1).sum(1)
            total = term if total is None else total + term
    assert total is not None
    return total


def approximate_noise(loss: Tensor, layers: Sequence[Tensor], draws: Draws) -> Tensor:
    """Return sum_i J_{loss,i} (eta_i * h_i) [b] with random signs as eta_i; its gradient is xi_approx (4.6).

    Signs have variance 1, so the caller must multiply the result by sqrt(q / (1 - q)) (the paper, note 5).
    """
    terms = [
        (gradient * layer * signs(draws, SIGNS, site, layer)).flatten(1).sum(1)
        for site, (gradient, layer) in enumerate(zip(_derivatives(loss, layers), layers, strict=True))
    ]
    return torch.stack(terms).sum(0)


def sampled_identity_regularizer(outputs: Tensor, layers: Sequence[Tensor], draws: Draws, count: int = 1) -> Tensor:
    """Return sum_i |J_{F,i} (eta_i * h_i)|^2 [b], averaged over ``count`` draws of random signs eta_i.

    Its expectation is sum_i <J_i^T J_i, diag(h_i^2)> (C.4). It takes one backward pass, and one more for each layer and
    draw, for any number of outputs. The exact value is :func:`explicit_regularizer` of
    :func:`trainer.training.regularizers.outputs.identity`, which takes a backward pass for each output.
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
    """Return the derivatives of ``value`` by each layer h_i, in the shape of h_i and differentiable.

    The derivatives are 0 for layers on which ``value`` does not depend.
    """
    gradients = torch.autograd.grad(value.sum(), layers, create_graph=True, allow_unused=True)
    return [torch.zeros_like(layer) if each is None else each for each, layer in zip(gradients, layers, strict=True)]


@contextlib.contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list; the module's forward passes within the block append their outputs to it."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(
        lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        yield outputs
    finally:
        handle.remove()
