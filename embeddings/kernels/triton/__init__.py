"""The GPU kernel, in Triton: what the reference does, bit for bit where bits are drawn, else to rounding."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embeddings.kernels.layout import Layout
    from embeddings.kernels.triton.kernel import TritonKernel


def triton_kernel(layout: Layout) -> TritonKernel:
    """The kernel over ``layout``; ValueError where Triton is not installed or can't run there."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "backend 'triton' needs the package triton, which is not installed: it comes with torch for CUDA "
            "(make setup EXTRA=cuda); on a machine without a GPU use backend 'cpu'"
        )
    # Triton reads TRITON_INTERPRET when it is imported: not before it is needed.
    from embeddings.kernels.triton.kernel import TritonKernel

    return TritonKernel(layout)
