"""Matrix products compared with float64, for the shapes and strides that layers give."""

from __future__ import annotations

import pytest
import torch

from embeddings.kernels.cpu import product

SHAPES = [(2048, 416, 256), (64, 8, 8), (33, 127, 65), (7, 64, 64), (64, 64, 1), (0, 64, 64), (64, 0, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", ["neither", "left", "right"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_the_product_to_float32(shape: tuple[int, int, int], strided: str, with_bias: bool) -> None:
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)

    def values(*size: int, transposed: bool = False) -> torch.Tensor:
        return (
            torch.randn(*size[::-1], generator=generator).T if transposed else torch.randn(*size, generator=generator)
        )

    x, y = values(rows, inner, transposed=strided == "left"), values(inner, columns, transposed=strided == "right")
    bias = values(columns) if with_bias else None
    expected = x.double() @ y.double() + (0.0 if bias is None else bias.double())
    found = product(x, y, bias)
    assert found.dtype is torch.float32
    # Products in bfloat16 would differ by some thousandths.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * max(1, inner) ** 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_visible(value: float) -> None:
    x = torch.ones(64, 64)
    x[3, 5] = value
    found = product(x, torch.ones(64, 64), torch.zeros(64))
    assert torch.equal(found.isfinite().all(1), torch.arange(64) != 3)


def test_autograd_follows_it_where_it_records() -> None:
    x, y = torch.randn(32, 16, requires_grad=True), torch.randn(16, 24, requires_grad=True)
    product(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.detach().sum(1).expand(32, 16))
    torch.testing.assert_close(y.grad, x.detach().sum(0)[:, None].expand(16, 24))


def test_other_types_are_multiplied_too() -> None:
    x, y = torch.randn(32, 16, dtype=torch.float64), torch.randn(16, 24, dtype=torch.float64)
    assert torch.equal(product(x, y), x @ y)
