"""Dropout whose masks are a function of counters: the same for any ranks, cuts of a batch and resumes.

Philox4x32-10 with key (seed, crc32("dropout")) and counter (step, sample, site << 16 | position, column >> 2); word
``column & 3`` below rate 2^32 drops. ``sample`` is the index in the global batch, ``site`` the place in the model.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from embeddings.kernels.cpu.philox import philox4x32
from embeddings.philox import table_key
from embeddings.sse import hit_threshold


def keep_mask(
    positions: torch.Tensor, dim: int, rate: float, *, seed: int, step: int, sample_offset: int, site: int
) -> torch.Tensor:
    """bool [b, l, dim], False with probability ``rate``.

    Args:
        positions: int64 [b, l], those of each sample, in [0, 2^16): what is at one position has one mask, wherever it
            lies in the tensor. The mask is drawn on the CPU and given where they are.
        sample_offset: index in the global batch of the first sample.
        site: in [0, 2^16).
    """
    key0, key1 = table_key(seed, "dropout")
    places = positions.cpu().numpy()
    keep = np.empty((*places.shape, -(-dim // 4) * 4), dtype=np.bool_)
    _fill(keep, places, np.uint64(hit_threshold(rate)), np.uint64(step), sample_offset, site, key0, key1)
    return torch.from_numpy(keep)[..., :dim].to(positions.device)


# Not in the kernels' disk cache: that is keyed by their own sources.
@numba.njit(nogil=True)
def _fill(keep, places, threshold, step, sample_offset, site, key0, key1):  # type: ignore[no-untyped-def]
    k0, k1, zero = np.uint64(key0), np.uint64(key1), np.uint64(0)
    for sample in range(keep.shape[0]):
        number = np.uint64(sample_offset + sample)
        for at in range(keep.shape[1]):
            place = np.uint64((site << 16) | places[sample, at])
            for group in range(keep.shape[2] // 4):
                words = philox4x32(step, number, place, np.uint64(group) + zero, k0, k1)
                for lane in range(4):
                    keep[sample, at, 4 * group + lane] = words[lane] >= threshold
