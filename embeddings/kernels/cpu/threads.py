"""How many threads a call of the compiled kernels takes."""

from __future__ import annotations

import torch

# Bytes of rows for which one thread takes about 0.1 ms: on a busy machine each thread more is one more to wait for.
BYTES_PER_THREAD = 1 << 18


def num_threads(num_bytes: int) -> int:
    """Return one, or where there is work for two all threads that torch uses.

    OpenMP ends the threads that a call leaves out.
    """
    return torch.get_num_threads() if num_bytes >= 2 * BYTES_PER_THREAD else 1
