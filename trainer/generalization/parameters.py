"""A loss as a function of named parameters. Measures of generalization move the parameters and restore them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Point:
    """A loss and the parameters on which it depends.

    ``parameters`` are leaf tensors that require gradients. ``loss()`` returns a scalar at their present values, which
    can be differentiated twice. A vector over all parameters is a list of tensors of their shapes.
    """

    parameters: Mapping[str, Tensor]
    loss: Callable[[], Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.parameters.values())

    def value(self) -> float:
        with torch.no_grad():
            return float(self.loss())

    def gradient(self) -> list[Tensor]:
        """Return the gradient of the loss; zeros for parameters on which the loss does not depend."""
        gradients = torch.autograd.grad(self.loss(), self.leaves, allow_unused=True)
        return [_or_zero(one, leaf) for one, leaf in zip(gradients, self.leaves, strict=True)]

    def hessian_products(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return the function v -> H v for the Hessian H of the loss (Pearlmutter 1994: gradient of <gradient, v>).

        The gradient's graph is built once.
        """
        leaves = self.leaves
        gradient = torch.autograd.grad(self.loss(), leaves, create_graph=True, allow_unused=True)
        read = [index for index, one in enumerate(gradient) if one is not None and one.requires_grad]

        def product(vector: Sequence[Tensor]) -> list[Tensor]:
            dots = [(gradient[index] * vector[index]).sum() for index in read]
            if not dots:
                return [torch.zeros_like(leaf) for leaf in leaves]
            products = torch.autograd.grad(torch.stack(dots).sum(), leaves, retain_graph=True, allow_unused=True)
            return [_or_zero(one, leaf) for one, leaf in zip(products, leaves, strict=True)]

        return product

    @contextlib.contextmanager
    def moved(self, by: Sequence[Tensor]) -> Iterator[None]:
        """Add ``by`` to every parameter within the block; after it, each has the value it had, bit for bit."""
        with restored(self.leaves):
            with torch.no_grad():
                for leaf, one in zip(self.leaves, by, strict=True):
                    leaf.add_(one)
            yield

    def magnitudes(self) -> list[Tensor]:
        """Return abs(theta), element by element. As ``scale`` it makes a measure independent of rescaled layers."""
        return [leaf.detach().abs() for leaf in self.leaves]


@contextlib.contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors after the block, bit for bit."""
    before = [one.detach().clone() for one in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, value in zip(tensors, before, strict=True):
                one.copy_(value)


def norm(vector: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all tensors, in float64."""
    return float(sum(float(one.double().square().sum()) for one in vector)) ** 0.5


def _or_zero(one: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if one is None else one
