"""Sources of randomness for dropout regularizers: counters, which jobs use, or a torch generator.

A draw is identified by ``draw``, its number within the step, and ``site``, the number of the hidden layer in the order
of the forward pass. Counters make it a function of (seed, step, sample, draw, site, column). So draws do not change
with the number of ranks, the split of a batch, or a resume.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from embeddings.tables.philox import philox4x32, table_key
from trainer.models.layers.dropout import keep_mask

MAX_MASKS = 64
"""Largest number k of masks of DROPOUT_k; its masks are the draws 0 .. k - 1."""
EXACT_NOISE = (128, 129)
"""The two draws of xi~ (Wei, Kakade and Ma, section 3.1)."""
SIGNS, LABELS = 130, 132
IDENTITY_SIGNS = 192
"""First draw for the sampled identity (C.4), which takes at most 64 draws from this number on."""
_MAX_SITES = 256


class Draws(Protocol):
    """Source of random numbers for the outputs of a hidden layer, shaped as ``like`` [b, ...]."""

    def keep_mask(self, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
        """Return a bool tensor of the shape of ``like`` whose elements are False with probability ``rate``."""
        ...

    def uniforms(self, draw: int, count: int, like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1), [b, count], of the type of ``like``."""
        ...


class CounterDraws:
    """Draws that are functions of counters, as in :mod:`trainer.models.layers.dropout`.

    Sample i of a tensor is sample ``sample_offset + i`` of the global batch of step ``step``.
    """

    def __init__(self, seed: int, step: int, sample_offset: int = 0):
        self.seed, self.step, self.sample_offset = seed, step, sample_offset

    def keep_mask(self, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
        if site >= _MAX_SITES:
            raise ValueError(f"dropout has room for {_MAX_SITES} hidden layers, and this is number {site + 1}")
        positions = torch.zeros(len(like), 1, dtype=torch.int64, device=like.device)
        columns = math.prod(like.shape[1:])
        samples = torch.arange(self.sample_offset, self.sample_offset + len(like))
        mask = keep_mask(positions, samples, columns, rate, seed=self.seed, step=self.step, site=draw << 8 | site)
        return mask.view(like.shape)

    def uniforms(self, draw: int, count: int, like: Tensor) -> Tensor:
        samples = np.arange(len(like), dtype=np.uint64)[:, None] + np.uint64(self.sample_offset)
        groups = np.arange(-(-count // 4), dtype=np.uint64)[None, :]
        words = philox4x32((self.step, samples, draw << 24, groups), table_key(self.seed, "dropout"))
        columns = np.stack(words, axis=2).reshape(len(like), 4 * groups.size)[:, :count]
        return torch.from_numpy(columns * 2.0**-32).to(like.device, like.dtype)


class GeneratorDraws:
    """Draws from a torch generator, which depend on the order of the calls."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def keep_mask(self, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, device=like.device) >= rate

    def uniforms(self, draw: int, count: int, like: Tensor) -> Tensor:
        return torch.rand(len(like), count, generator=self.generator, device=like.device, dtype=like.dtype)


def multipliers(draws: Draws, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
    """Return 1 + eta in the shape of ``like``: 0 with probability q = ``rate``, else 1 / (1 - q). Its mean is 1.

    Wei, Kakade and Ma print eta = q / (q - 1) for kept elements, with a wrong sign: only q / (1 - q) gives mean 0.
    """
    return draws.keep_mask(draw, site, like, rate).to(like.dtype) / (1.0 - rate)


def signs(draws: Draws, draw: int, site: int, like: Tensor) -> Tensor:
    """Return -1 or 1, each with probability 1/2, in the shape of ``like``."""
    return 2.0 * draws.keep_mask(draw, site, like, 0.5).to(like.dtype) - 1.0
