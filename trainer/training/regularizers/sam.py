"""Sharpness-aware minimization: the gradient of a step is that at w + e(w), and moves w.

Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.

e(w) = rho g / |g|_2 (equation 2 with p = 2), g the gradient at w on the same batch, the same draws of SSE and dropout,
and |g| over all parameters that are perturbed, on all ranks. Rows that the batch does not touch have no gradient and
stay. Rows are perturbed as they are read: decay and momentum are not mixed into it (embeddings.perturbation).
What was perturbed comes back bit for bit. The AdamAR slides name SAM as a baseline without its rho; 0.05 is Foret et
al.'s.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.spec.regularizers import Sam

if TYPE_CHECKING:
    from trainer.distributed.sharded_model import ShardedModel


def gradient_squared_norm(sam: Sam, sharded: ShardedModel, tables_squared_norm: float) -> float:
    """Return |g|^2 over what ``sam`` perturbs; ``tables_squared_norm`` is that of the tables over all ranks.

    The dense part is the same on every rank: call it when gradients have been summed.
    """
    total = tables_squared_norm if sam.of != "dense" else 0.0
    if sam.of != "tables":
        total += sum(float(p.grad.double().square().sum()) for _, p in sharded.dense_parameters() if p.grad is not None)
    return total


@contextlib.contextmanager
def ascended(sam: Sam, sharded: ShardedModel, squared_norm: float) -> Iterator[None]:
    """Put the parameters at w + e(w), without gradients, within the block.

    Afterwards they are at w again, with the gradients of what was differentiated within. Buffers (running moments) are
    those of w: what moves them within is undone.
    """
    scale = sam.rho / (math.sqrt(squared_norm) + 1e-12)
    parameters = [p for _, p in sharded.dense_parameters() if p.grad is not None and sam.of != "tables"]
    before: list[tuple[Tensor, Tensor]] = [(p, p.detach().clone()) for p in parameters]
    before += [(value, value.clone()) for value in sharded.dense_buffers()]
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=scale)
    if sam.of != "dense":
        sharded.perturb_tables(scale)
    try:
        sharded.discard()
        for _, parameter in sharded.dense_parameters():
            parameter.grad = None
        yield
    finally:
        sharded.restore_tables()
        with torch.no_grad():
            for value, saved in before:
                value.copy_(saved)
