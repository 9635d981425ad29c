"""Sharpness-aware minimization (SAM): a step moves the parameters w by the gradient at w + e(w).

Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.

e(w) = rho g / |g|_2 (equation 2 with p = 2). g is the gradient at w on the same batch with the same draws of SSE and
dropout, and |g| its norm over all perturbed parameters of all ranks. Rows that the batch does not touch have no
gradient and stay. Rows are perturbed as lookups read them, so pending decay and momentum are not affected
(embeddings.perturbation). Afterwards the parameters are restored bit for bit. The AdamAR slides name SAM as a baseline
without a value of rho; 0.05 is from Foret et al.
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
    """Return |g|^2 over the parameters that ``sam`` perturbs.

    ``tables_squared_norm`` is the squared norm of the tables' gradient over all ranks. Dense gradients must have been
    summed over ranks before.
    """
    total = tables_squared_norm if sam.of != "dense" else 0.0
    if sam.of != "tables":
        total += sum(float(p.grad.double().square().sum()) for _, p in sharded.dense_parameters() if p.grad is not None)
    return total


@contextlib.contextmanager
def ascended(sam: Sam, sharded: ShardedModel, squared_norm: float) -> Iterator[None]:
    """Move the parameters from w to w + e(w) within the block, and drop their gradients at its start.

    After the block the parameters are w again, with the gradients that the block computed. Buffers, such as running
    moments, are restored too. ``squared_norm`` is |g|^2 (:func:`gradient_squared_norm`).
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
