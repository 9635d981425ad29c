"""The GPU kernel, in Triton: the reference's bits where bits are drawn, else its values up to rounding."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embeddings.kernels.layout import Layout
    from embeddings.kernels.triton.kernel import TritonKernel


def triton_kernel(layout: Layout) -> TritonKernel:
    """Return the kernel over ``layout``.

    Raises:
        ValueError: Triton is not installed or can't run there.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "backend 'triton' needs the package triton, which is not installed: it comes with torch for CUDA "
            "(make setup EXTRA=cuda); on a machine without a GPU use backend 'cpu'"
        )
    # Triton reads TRITON_INTERPRET when it is imported: not before it is needed.
    from embeddings.kernels.triton.kernel import TritonKernel

    return TritonKernel(layout)
