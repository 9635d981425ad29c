"""Compiled passes of dense layers, without matrix products: bias, ReLU and cross layers, forward and backward.

Tensors are contiguous, float32 and on the CPU. Bits are the same for any number of threads.
"""

from __future__ import annotations

from ctypes import byref

import torch

from embeddings.kernels.cpu import library as native
from embeddings.kernels.cpu.kernel import num_threads
from embeddings.kernels.cpu.library import library


def add_bias_and_relu(output: torch.Tensor, bias: torch.Tensor) -> None:
    """Replace ``output`` [n, width] by max(output + bias, 0)."""
    call = native.DenseCall(
        output=output.data_ptr(), bias=bias.data_ptr(), num_rows=output.shape[0], num_columns=output.shape[1],
        num_threads=num_threads(4 * output.numel()),
    )  # fmt: skip
    library().bias_relu(byref(call))


def relu_backward(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Set ``gradient`` [n, width] to zero where the ReLU's ``output`` is 0, and return its sum over rows [width]."""
    sums = output.new_empty(output.shape[1])
    call = native.DenseCall(
        output=output.data_ptr(), gradient=gradient.data_ptr(), sums=sums.data_ptr(), num_rows=output.shape[0],
        num_columns=output.shape[1], num_threads=num_threads(4 * output.numel()),
    )  # fmt: skip
    _check(library().relu_backward(byref(call)))
    return sums


def cross(first: torch.Tensor, x: torch.Tensor, mapped: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``first`` * (mapped + bias) + x, elementwise, where mapped is W x; all but the bias are [n, width]."""
    output = torch.empty_like(x)
    call = native.CrossCall(
        first=first.data_ptr(), input=x.data_ptr(), mapped=mapped.data_ptr(), bias=bias.data_ptr(),
        output=output.data_ptr(), num_rows=x.shape[0], num_columns=x.shape[1],
        num_threads=num_threads(4 * x.numel()),
    )  # fmt: skip
    library().cross(byref(call))
    return output


def cross_backward(
    gradient: torch.Tensor,
    first: torch.Tensor,
    mapped: torch.Tensor,
    bias: torch.Tensor,
    first_gradient: torch.Tensor,
    *,
    adds: bool,
    input_is_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of ``mapped`` [n, width] and its sum over rows [width], from the output's gradient.

    The gradient of ``first`` is written to ``first_gradient``, or with ``adds`` added to it. With ``input_is_first`` it
    includes the gradient of x.
    """
    mapped_gradient, sums = torch.empty_like(mapped), mapped.new_empty(mapped.shape[1])
    call = native.CrossCall(
        first=first.data_ptr(), mapped=mapped.data_ptr(), bias=bias.data_ptr(), gradient=gradient.data_ptr(),
        mapped_gradient=mapped_gradient.data_ptr(), first_gradient=first_gradient.data_ptr(), sums=sums.data_ptr(),
        num_rows=mapped.shape[0], num_columns=mapped.shape[1], adds=adds, input_is_first=input_is_first,
        num_threads=num_threads(4 * mapped.numel()),
    )  # fmt: skip
    _check(library().cross_backward(byref(call)))
    return mapped_gradient, sums


def split_fields(rows: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the fields' rows [v | w], [n, fields * (dim + 1)], of samples.

    Returns:
        The vectors [n, fields * dim], the sum over fields of w [n], the sum over pairs of fields f < g of <v_f, v_g>
        [n], and the sum over fields of v [n, dim].
    """
    num_samples, num_fields = rows.shape[0], rows.shape[1] // (dim + 1)
    vectors, sums = rows.new_empty(num_samples, num_fields * dim), rows.new_empty(num_samples, dim)
    first_order, pairs = rows.new_empty(num_samples), rows.new_empty(num_samples)
    call = native.FieldsCall(
        rows=rows.data_ptr(), vectors=vectors.data_ptr(), first_order=first_order.data_ptr(), pairs=pairs.data_ptr(),
        sums=sums.data_ptr(), num_samples=num_samples, num_fields=num_fields, dim=dim,
        num_threads=num_threads(4 * rows.numel()),
    )  # fmt: skip
    _check(library().fields(byref(call)))
    return vectors, first_order, pairs, sums


def split_fields_backward(
    vectors: torch.Tensor, sums: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    """Return the gradient of the rows from ``gradients``, those of the first three results of :func:`split_fields`."""
    num_samples, dim = sums.shape
    num_fields = vectors.shape[1] // dim
    of_rows = vectors.new_empty(num_samples, num_fields * (dim + 1))
    of_vectors, of_first_order, of_pairs = (None if one is None else one.data_ptr() for one in gradients)
    call = native.FieldsCall(
        vectors=vectors.data_ptr(), sums=sums.data_ptr(), vector_gradient=of_vectors,
        first_order_gradient=of_first_order, pair_gradient=of_pairs, row_gradient=of_rows.data_ptr(),
        num_samples=num_samples, num_fields=num_fields, dim=dim, num_threads=num_threads(4 * of_rows.numel()),
    )  # fmt: skip
    library().fields_backward(byref(call))
    return of_rows


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for the sums of a dense layer's gradient: use smaller batches")
