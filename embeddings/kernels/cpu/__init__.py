"""The CPU kernel: table-batched C++, parallel over samples (lookup) and rows (update), built by build.py.

Every row is read or written by one thread, duplicates of a row are summed in the order in which they occur in the
batch, and no operations are fused or reordered, so results are bitwise the same for any number of threads and on any
processor.
"""

from __future__ import annotations

from embeddings.kernels.cpu.dense import (
    add_bias_and_relu,
    cross,
    cross_backward,
    relu_backward,
    split_fields,
    split_fields_backward,
)
from embeddings.kernels.cpu.kernel import CpuKernel, fill_keep_mask, swap_feature
from embeddings.kernels.cpu.products import product

__all__ = [
    "CpuKernel", "add_bias_and_relu", "cross", "cross_backward", "fill_keep_mask", "product", "relu_backward",
    "split_fields", "split_fields_backward", "swap_feature",
]  # fmt: skip
