"""How work is cut into tasks, and how many threads take them."""

from __future__ import annotations

import numba
import torch

# Samples that one task looks up at most, as prefetching starts anew with each: 8 x 4096 rows of 16 floats take 0.47 ms
# with 64, 0.39 ms with 512, 0.45 ms with 4096. SAMPLES_PER_TASK at least, and TASKS_PER_THREAD tasks for each thread to
# balance them.
BLOCK = 512
SAMPLES_PER_TASK = 64
TASKS_PER_THREAD = 4
# Ids ahead of the current one whose rows are prefetched.
AHEAD = 12
# Rows that one thread should have to itself, about 0.1 ms. On a busy machine each thread more is one more to wait for.
BYTES_PER_THREAD = 1 << 18


def block_size(num_features: int, batch_size: int, threads: int) -> int:
    """Samples of a task; one thread has nothing to balance."""
    if threads == 1:
        return BLOCK
    return max(SAMPLES_PER_TASK, min(BLOCK, num_features * batch_size // (TASKS_PER_THREAD * threads)))


def use_threads(num_bytes: int) -> int:
    """As many threads as torch uses in this process, as far as Numba has them and there is work for them."""
    wanted = torch.get_num_threads()
    chosen = max(1, min(wanted, numba.config.NUMBA_NUM_THREADS, num_bytes // BYTES_PER_THREAD))
    numba.set_num_threads(chosen)
    if torch.get_num_threads() != wanted:
        # Starting Numba's threads sets the number of OpenMP threads, which torch's is.
        torch.set_num_threads(wanted)
    return chosen
