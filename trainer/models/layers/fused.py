"""Stacks of dense layers as one function of autograd, whose passes besides matrix products are compiled.

Training in float32 on the CPU takes them. All else runs layer by layer in plain torch: other types and devices,
evaluation and export, layers with hooks, transforms of torch.func and torch.compile. Gradients of gradients are plain
torch's too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from embeddings.kernels.cpu import (
    add_bias_and_relu,
    cross,
    cross_backward,
    product,
    relu_backward,
    split_fields,
    split_fields_backward,
)

_PLAIN_TYPES = (Tensor, nn.Parameter)


def is_fusible(x: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return True if the functions of this module take ``x`` and ``parameters``."""
    # In plain loops: after a matrix product has filled the caches, each line of Python here takes microseconds.
    if not torch.is_grad_enabled() or x.dim() != 2 or not _is_plain(x):
        return False
    for parameter in parameters:
        if not _is_plain(parameter) or not parameter.is_contiguous():
            return False
    return not (
        torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and tensor.dtype is torch.float32 and tensor.is_cpu


def is_hooked(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


class Stack(nn.Sequential):
    """Sequential layers; in training, :class:`LinearLayers` if all of them are linear, with or without a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        layers = _linear_layers(self) if self.training else None
        if layers is not None:
            relus, parameters = layers
            if is_fusible(x, parameters):
                fused: Tensor = LinearLayers.apply(x, relus, *parameters)
                return fused
        output: Tensor = super().forward(x)
        return output


def _linear_layers(modules: Iterable[nn.Module]) -> tuple[tuple[bool, ...], list[Tensor]] | None:
    """Return for each linear layer True if a ReLU follows, and weights and biases; None if there is another layer."""
    relus: list[bool] = []
    parameters: list[Tensor] = []
    for module in modules:
        if is_hooked(module):
            return None
        if type(module) is nn.ReLU and relus and not relus[-1]:
            relus[-1] = True
            continue
        linear = None if type(module) is nn.Linear else getattr(module, "linear_with_relu", None)
        layer = module if linear is None else linear
        if type(layer) is not nn.Linear or layer.bias is None or is_hooked(layer):
            return None
        relus.append(linear is not None)
        parameters += (layer.weight, layer.bias)
    return (tuple(relus), parameters) if relus else None


class LinearLayers(torch.autograd.Function):
    """(x [n, d], for each layer True if a ReLU follows, weight and bias of each layer) -> the last layer's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relus: tuple[bool, ...], *parameters: Tensor) -> Tensor:
        values = [x]
        for relu, (weight, bias) in zip(relus, _with_biases(parameters), strict=True):
            if relu:
                output = product(values[-1], weight.T)
                add_bias_and_relu(output, bias)
            else:
                output = product(values[-1], weight.T, bias)
            values.append(output)
        ctx.relus = relus
        # An output that backward does not read may be changed in place.
        ctx.save_for_backward(*parameters, *(values if relus[-1] else values[:-1]))
        return values[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        relus: tuple[bool, ...] = ctx.relus
        parameters, values = ctx.saved_tensors[: 2 * len(relus)], ctx.saved_tensors[2 * len(relus) :]
        if torch.is_grad_enabled():
            return _plain_gradients(ctx, _linear_layers_in_torch, gradient, values[0], relus, *parameters)
        found: list[Tensor | None] = [None] * (2 + len(parameters))
        if relus[-1]:
            # Below, gradients are changed in place; this one belongs to the caller.
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        for number in reversed(range(len(relus))):
            of_bias = relu_backward(gradient, values[number + 1]) if relus[number] else gradient.sum(0)
            found[2 + 2 * number : 4 + 2 * number] = product(gradient.T, values[number]), of_bias
            if number or ctx.needs_input_grad[0]:
                weight = parameters[2 * number]
                # As a matrix product, a product of a column and a row takes four times as long.
                gradient = gradient * weight if len(weight) == 1 else product(gradient, weight)
        found[0] = gradient if ctx.needs_input_grad[0] else None
        return tuple(found)


def _linear_layers_in_torch(x: Tensor, relus: tuple[bool, ...], *parameters: Tensor) -> Tensor:
    for relu, (weight, bias) in zip(relus, _with_biases(parameters), strict=True):
        x = functional.linear(x, weight, bias)
        x = x.relu() if relu else x
    return x


class CrossLayers(torch.autograd.Function):
    """(x_0 [n, d] contiguous, weight and bias of each layer) -> x_L, with x_{l+1} = x_0 o (W_l x_l + b_l) + x_l."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *parameters: Tensor) -> Tensor:
        x, inputs, mapped = first, [], []
        for weight, bias in _with_biases(parameters):
            inputs.append(x)
            mapped.append(product(x, weight.T))
            x = cross(first, x, mapped[-1], bias)
        ctx.save_for_backward(*parameters, *inputs, *mapped)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        count = len(saved) // 4
        parameters, inputs, mapped = saved[: 2 * count], saved[2 * count : 3 * count], saved[3 * count :]
        first = inputs[0]
        if torch.is_grad_enabled():
            return _plain_gradients(ctx, _cross_layers_in_torch, gradient, first, *parameters)
        found: list[Tensor | None] = [None] * (1 + len(parameters))
        gradient, of_first = gradient.contiguous(), torch.empty_like(first)
        for number in reversed(range(count)):
            weight, bias = parameters[2 * number : 2 * number + 2]
            of_mapped, of_bias = cross_backward(
                gradient, first, mapped[number], bias, of_first, adds=number < count - 1, input_is_first=number == 0
            )
            found[1 + 2 * number : 3 + 2 * number] = product(of_mapped.T, inputs[number]), of_bias
            if number:
                gradient = product(of_mapped, weight).add_(gradient)
            elif ctx.needs_input_grad[0]:
                found[0] = of_first.add_(product(of_mapped, weight))
        return tuple(found)


def _cross_layers_in_torch(first: Tensor, *parameters: Tensor) -> Tensor:
    x = first
    for weight, bias in _with_biases(parameters):
        x = first * (x @ weight.T + bias) + x
    return x


class SplitFields(torch.autograd.Function):
    """(rows [v | w] of fields [n, fields * (dim + 1)], dim) -> vectors, first-order terms, products of pairs.

    The results are [n, fields * dim], [n] and [n]: see :func:`embeddings.kernels.cpu.split_fields`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        vectors, first_order, pairs, sums = split_fields(rows, dim)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(vectors, sums)
        return vectors, first_order, pairs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:  # type: ignore[override]
        vectors, sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _split_fields_gradient(vectors, sums.shape[1], *gradients), None
        parts = tuple(None if one is None else one.contiguous() for one in gradients)
        return split_fields_backward(vectors, sums, parts), None


def _split_fields_gradient(
    vectors: Tensor, dim: int, of_vectors: Tensor | None, of_first_order: Tensor | None, of_pairs: Tensor | None
) -> Tensor:
    """Return the gradient of the rows, by functions of plain torch, so that it can be differentiated again."""
    fields = vectors.unflatten(1, (-1, dim))
    found = torch.zeros_like(fields) if of_vectors is None else of_vectors.unflatten(1, (-1, dim))
    if of_pairs is not None:
        found = found + of_pairs[:, None, None] * (fields.sum(1, keepdim=True) - fields)
    of_weights = vectors.new_zeros(len(vectors)) if of_first_order is None else of_first_order
    return torch.cat([found, of_weights[:, None, None].expand(-1, fields.shape[1], 1)], dim=2).flatten(1)


def pairs(vectors: Tensor) -> Tensor:
    """Return sum over f < g of <v_f, v_g>, [b], from vectors [b, F, d].

    The sum is computed as (|sum_f v_f|^2 - sum_f |v_f|^2) / 2 (Rendle, Factorization Machines, ICDM 2010, lemma 3.1).
    """
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)


def _with_biases(parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(parameters[::2], parameters[1::2], strict=True)


def _plain_gradients(
    ctx: Any, function: Callable[..., Tensor], gradient: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of plain torch's ``function``, which can be differentiated again."""
    # Views, so that an argument that is passed twice gets the gradients of both uses.
    arguments = tuple(one.view_as(one) if isinstance(one, Tensor) else one for one in arguments)
    needed: tuple[bool, ...] = ctx.needs_input_grad
    wanted = [one for one, wants in zip(arguments, needed, strict=True) if wants]
    found = iter(torch.autograd.grad(function(*arguments), wanted, gradient, create_graph=True))
    return tuple(next(found) if wants else None for wants in needed)
