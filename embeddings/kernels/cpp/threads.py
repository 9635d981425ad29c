"""How many threads a call of the compiled kernels takes."""

from __future__ import annotations

import torch

# Rows that one thread should have to itself, about 0.1 ms. On a busy machine each thread more is one more to wait for.
BYTES_PER_THREAD = 1 << 18


def num_threads(num_bytes: int) -> int:
    """Return as many threads as torch uses in this process, as far as there is work for them."""
    return max(1, min(torch.get_num_threads(), num_bytes // BYTES_PER_THREAD))
