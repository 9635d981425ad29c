"""Initial dense weights as a function of the job's seed and of their purpose."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def seeded(seed: int, what: str) -> Iterator[None]:
    """Seed torch's global generator by (seed, what) within the context, and restore it afterwards."""
    # torch's generator of the processor reads the low 32 bits of a seed alone, so both have to be mixed into them.
    mixed = hashlib.blake2b(f"{seed} {what}".encode(), digest_size=4).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(mixed, "little"))
        yield


def uniform(*shape: int, inputs: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter drawn uniformly from [-1, 1] / sqrt(inputs), in float32, then cast.

    This is the initial distribution of torch.nn.Linear with this number of inputs.
    """
    bound = 1.0 / math.sqrt(max(inputs, 1))
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32).uniform_(-bound, bound).to(dtype))
