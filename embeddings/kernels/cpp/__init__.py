"""The CPU kernel in C++, not yet the default and not built by set-up (docs/adr/0046-cpu-kernel-in-cpp.md).

Table-batched, parallel over samples (lookup) and rows (update), built by ``python -m embeddings.kernels.cpp.build``.

Every row is read or written by one thread, duplicates of a row are summed in the order in which they occur in the
batch, and no operations are fused or reordered, so results are bitwise the same for any number of threads and on any
processor.
"""

from __future__ import annotations

from embeddings.kernels.cpp.kernel import CpuKernel, philox_words, swap_feature

__all__ = ["CpuKernel", "philox_words", "swap_feature"]
