"""Batch normalisation over the global batch (Ioffe and Szegedy, Batch Normalization, ICML 2015, algorithms 1 and 2).

On several ranks the moments are computed over the global batch, so that, up to rounding, the result does not depend on
the number of ranks. torch's SyncBatchNorm does so only on GPUs, and does not support ranks without a sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embeddings.sharding.exchange.collectives import all_reduce


class BatchNorm(nn.Module):
    """y = gamma (x - E[x]) / sqrt(Var[x] + eps) + beta for x [n, width], moments over the samples of all ranks.

    Training forwards and their backwards are collective: every rank takes part, even without a sample (n = 0).
    Evaluation uses running moments and needs no communication: mean <- (1 - momentum) mean + momentum E[x], and
    likewise the variance, from n / (n - 1) Var[x]. The running moments are buffers, so that checkpoints contain them.
    With micro-batches each part is normalised by its own moments, and updates the running moments.

    ``affine``: True for parameters gamma (initially 1) and beta (initially 0), each [width].
    """

    running_mean: Tensor
    running_variance: Tensor

    momentum = 0.1
    """Weight of the newest batch in the running moments."""

    def __init__(self, width: int, *, affine: bool = True, eps: float = 1e-5, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width, dtype=dtype))
        self.register_buffer("running_variance", torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            out, mean, variance, count = _Normalise.apply(x, self.eps)
            self._follow(mean, variance, int(count))
        else:
            out = (x - self.running_mean) * torch.rsqrt(self.running_variance + self.eps)
        return out if self.weight is None or self.bias is None else out * self.weight + self.bias

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if count == 0:
            return
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_variance.lerp_(unbiased.to(self.running_variance.dtype), self.momentum)


class _Normalise(torch.autograd.Function):
    """Normalisation x -> (x - E[x]) / sqrt(Var[x] + eps), with float64 moments over the samples of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Sum in float64, in which the squares lose none of the inputs' digits.
        wide, width = x.double(), x.shape[1]
        sums = torch.cat([wide.sum(0), wide.square().sum(0), wide.new_full((1,), float(len(x)))])
        sums = _over_ranks(sums)
        count = sums[-1]
        mean, square = (sums[:-1] / count.clamp(min=1)).split(width)
        variance = (square - mean.square()).clamp(min=0)
        scale = torch.rsqrt(variance + eps)
        normalised = ((wide - mean) * scale).to(x.dtype)
        ctx.save_for_backward(normalised, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        normalised, scale, count = ctx.saved_tensors
        wide, normalised64 = gradient.double(), normalised.double()
        sums = _over_ranks(torch.cat([wide.sum(0), (wide * normalised64).sum(0)]))
        mean, projected = (sums / count.clamp(min=1)).chunk(2)
        return (scale * (wide - mean - normalised64 * projected)).to(gradient.dtype), None


def _over_ranks(sums: Tensor) -> Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sums
    return all_reduce("batch norm", sums)
