"""Initial dense weights as a function of the job's seed and of what they are for."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def drawn(seed: int, what: str) -> Iterator[None]:
    """Within it torch draws from (seed, what) alone; its global generator is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed << 32) | zlib.crc32(what.encode()))
        yield


def uniform(*shape: int, inputs: int, dtype: torch.dtype) -> nn.Parameter:
    """Uniform in [-1, 1] / sqrt(inputs), as torch.nn.Linear starts for so many inputs; drawn in float32, then cast."""
    bound = 1.0 / math.sqrt(max(inputs, 1))
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32).uniform_(-bound, bound).to(dtype))
