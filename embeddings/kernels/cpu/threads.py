"""How work is cut into tasks, and how many threads take them."""

from __future__ import annotations

import numba
import torch

# Samples that one task looks up: enough to pay for the task, few enough to balance threads.
BLOCK = 64
# Ids ahead of the current one whose rows are prefetched.
AHEAD = 12
# Rows that one thread should have to itself, about 0.1 ms. On a busy machine each thread more is one more to wait for.
BYTES_PER_THREAD = 1 << 18


def use_threads(num_bytes: int) -> None:
    """As many threads as torch uses in this process, as far as Numba has them and there is work for them."""
    wanted = torch.get_num_threads()
    numba.set_num_threads(max(1, min(wanted, numba.config.NUMBA_NUM_THREADS, num_bytes // BYTES_PER_THREAD)))
    if torch.get_num_threads() != wanted:
        # Starting Numba's threads sets the number of OpenMP threads, which torch's is.
        torch.set_num_threads(wanted)
