"""FBGEMM behind the kernel interface: its CPU kernels, its own module on GPUs, its cache of tables.

The CPU kernels run on the storage of :mod:`embeddings.kernels.layout`. Only :mod:`embeddings.embedding_tables` and
the sharding layer create these kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from embeddings.kernels.fbgemm.kernel import FbgemmKernel
    from embeddings.kernels.layout import Layout


def fbgemm_kernel(layout: Layout, device: torch.device) -> FbgemmKernel:
    """Return the kernel for tables on this device: FBGEMM's operators on a CPU, its module on a GPU."""
    # FBGEMM is imported where it is used.
    if device.type == "cpu":
        from embeddings.kernels.fbgemm.kernel import FbgemmKernel

        return FbgemmKernel(layout)
    from embeddings.kernels.fbgemm.module import FbgemmModuleKernel

    return FbgemmModuleKernel(layout, device)
