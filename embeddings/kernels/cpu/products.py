"""Matrix products by the library that uses the widest instructions of the processor."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

_LEAST_WIDTH = 8
"""Least number of rows and columns of a product that oneDNN takes; thinner products gain nothing from its kernels."""


@functools.cache
def _prefers_onednn() -> bool:
    """Return True if the processor has AVX-512 and MKL, torch's library, does not use it: AMD's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    return "AuthenticAMD" in Path("/proc/cpuinfo").read_text("utf-8")


def product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ y``, plus ``bias`` if any.

    The two libraries multiply and add in float32, each in its own order. Where autograd records it is plain torch's.

    Args:
        x: [n, k].
        y: [k, m].
        bias: [m].

    Returns:
        The product [n, m].
    """
    if (
        x.dtype is torch.float32
        and x.is_cpu
        and min(*x.shape, *y.shape) >= _LEAST_WIDTH
        and not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad))
        and _prefers_onednn()
    ):
        # Its fused ReLU is not used: it turns NaN into 0.
        return torch.ops.mkldnn._linear_pointwise(x, y.T, bias, "none", [], "")
    return x @ y if bias is None else torch.addmm(bias, x, y)
