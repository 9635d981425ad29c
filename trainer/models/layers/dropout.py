"""Dropout whose masks are a function of counters: the same for any number of ranks, micro-batches and resumes.

Philox4x32-10 with key (seed, crc32("dropout")) and counter (step, sample, site << 16 | position, column >> 2); word
``column & 3`` below rate 2^32 drops. ``sample`` is the index in the global batch, ``site`` the place in the model.
"""

from __future__ import annotations

from typing import Any

import torch

from embeddings.kernels.cpu import fill_keep_mask
from embeddings.sse.swap import hit_threshold
from embeddings.tables.philox import table_key


def keep_mask(
    positions: torch.Tensor, samples: torch.Tensor, dim: int, rate: float, *, seed: int, step: int, site: int
) -> torch.Tensor:
    """Return the mask of elements that dropout keeps: bool [b, l, dim], False with probability ``rate``.

    Args:
        positions: int64 [b, l], numbers of the positions of each sample, in [0, 2^16): an element's mask depends on
            this number, not on its index in the tensor. The mask is drawn on the CPU and moved to their device.
        samples: int64 [b], index of each sample in the global batch.
        dim: number of columns of the mask.
        rate: probability of a drop, independent for each position and column.
        seed: the job's seed; with "dropout" it is the key of the draws.
        step: the training step, a part of the counter of the draws.
        site: place in the model, in [0, 2^16).
    """
    key0, key1 = table_key(seed, "dropout")
    keep = torch.empty(*positions.shape, -(-dim // 4) * 4, dtype=torch.bool)
    fill_keep_mask(keep, positions.cpu(), samples.cpu(), hit_threshold(rate), (step, site), (key0, key1))
    return keep[..., :dim].to(positions.device)


class Dropped(torch.autograd.Function):
    """Product ``x * keep * scale`` in one pass, forward and backward; ``keep``: bool, with the shape of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.keep, ctx.scale = keep, scale
        return torch.ops.aten.native_dropout_backward(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return Dropped.apply(gradient, ctx.keep, ctx.scale), None, None
