"""The Numba kernel: table-batched, parallel over samples (lookup) and rows (update), compiled once and cached on disk.

Every row is read or written by one thread, and duplicates of a row are summed in the order in which they occur in the
batch, so results are bitwise the same for any number of threads.
"""

from __future__ import annotations

from embeddings.kernels.cpu.kernel import NumbaKernel
from embeddings.kernels.cpu.swap import swap_feature

__all__ = ["NumbaKernel", "swap_feature"]
