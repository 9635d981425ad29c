"""Sources of the randomness of dropout regularizers: counters, as in a job, or a torch generator.

A draw is named by ``draw`` (which of the step's draws) and ``site`` (which hidden layer, in the order of the forward
pass). Counters make it a function of (seed, step, sample, draw, site, column): the same for any ranks, cuts of a batch
and resumes.
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
"""Draws 0 .. k - 1 are the masks of DROPOUT_k."""
EXACT_NOISE = (128, 129)
"""The two draws of xi~ (Wei, Kakade and Ma, section 3.1)."""
SIGNS, LABELS = 130, 132
IDENTITY_SIGNS = 192
"""Draws from here on are those of the sampled identity (C.4), 64 at most."""
_MAX_SITES = 256


class Draws(Protocol):
    """Random numbers for outputs ``like`` [b, ...] of a hidden layer."""

    def keep_mask(self, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
        """Return bool, of the shape of ``like``: False with probability ``rate``."""
        ...

    def uniforms(self, draw: int, count: int, like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1), [b, count], of the type of ``like``."""
        ...


class CounterDraws:
    """Draws as :mod:`trainer.models.layers.dropout` has them.

    They are of the samples from ``sample_offset`` on of step ``step``.
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
    """Draws from a torch generator, in the order in which they are asked for."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def keep_mask(self, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, device=like.device) >= rate

    def uniforms(self, draw: int, count: int, like: Tensor) -> Tensor:
        return torch.rand(len(like), count, generator=self.generator, device=like.device, dtype=like.dtype)


def multipliers(draws: Draws, draw: int, site: int, like: Tensor, rate: float) -> Tensor:
    """Return 1 + eta: 0 with probability q = ``rate``, else 1 / (1 - q), of mean 1.

    Wei, Kakade and Ma print eta = q / (q - 1) for what is kept, a slip of the sign: of mean zero is q / (1 - q).
    """
    return draws.keep_mask(draw, site, like, rate).to(like.dtype) / (1.0 - rate)


def signs(draws: Draws, draw: int, site: int, like: Tensor) -> Tensor:
    """Return -1 or 1, each with probability 1/2."""
    return 2.0 * draws.keep_mask(draw, site, like, 0.5).to(like.dtype) - 1.0
