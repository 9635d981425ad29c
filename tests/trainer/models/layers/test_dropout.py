"""Dropout in one pass: the bits and derivatives of plain products."""

import torch

from trainer.models.layers.dropout import Dropped


def test_what_is_dropped_and_scaled_in_one_pass_has_the_bits_of_two():
    generator = torch.Generator().manual_seed(0)
    x, keep = torch.randn(3, 5, 7, generator=generator), torch.rand(3, 5, 7, generator=generator) < 0.8
    assert torch.equal(Dropped.apply(x, keep, 1.25), x * (keep.to(x.dtype) * 1.25))
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: Dropped.apply(y, keep, 1.25), (x,))
    assert torch.autograd.gradgradcheck(lambda y: Dropped.apply(y, keep, 1.25), (x,))
