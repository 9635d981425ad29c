"""Dense parameters (all but the embedding tables): their optimizer, their gradients and gradient clipping."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Adam, Optimizer

from trainer.spec import JobSpec

if TYPE_CHECKING:
    from trainer.distributed.sharded_model import ShardedModel


def dense_optimizer(job: JobSpec, sharded: ShardedModel) -> Optimizer | None:
    """Return torch's optimizer for the dense parameters; None for a model without dense parameters, such as bpr."""
    parameters = [parameter for _, parameter in sharded.dense_parameters()]
    if not parameters:
        return None
    spec = job.dense_optimizer
    settings = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    if spec.kind == "adam":
        # Fused: one pass over each parameter instead of a dozen. On a GPU its step counter would have to be there too.
        fused = all(parameter.device.type == "cpu" for parameter in parameters)
        return without_compiler(Adam)(parameters, fused=fused or None, **settings)
    return without_compiler(SGD)(parameters, **settings)


def without_compiler(kind: type[Optimizer]) -> Any:
    """Return a subclass of ``kind``, a class of torch.optim, without the wrappers for ``torch.compile``.

    With these wrappers, a process's first optimizer makes torch import its compiler: a second of processor time.
    Results are the same without them.
    """
    methods = ("add_param_group", "load_state_dict", "state_dict", "zero_grad", "step")
    unmarked = {name: inspect.unwrap(getattr(kind, name)) for name in methods}
    unmarked["step"] = torch.no_grad()(unmarked["step"])
    return type(kind.__name__, (kind,), unmarked)


def non_finite_parameters(sharded: ShardedModel) -> list[str]:
    """Return "parameter NAME" for each dense parameter whose gradient is not finite."""
    gradients = [(name, p.grad) for name, p in sharded.dense_parameters() if p.grad is not None]
    # Check the sum of all gradients first: if it is finite, all are. It may overflow although all are finite.
    if not gradients or math.isfinite(torch.stack([grad.sum() for _, grad in gradients]).sum().item()):
        return []
    return [f"parameter {name}" for name, grad in gradients if not bool(torch.isfinite(grad).all())]


def clip(sharded: ShardedModel, limit: float | None, squared_norm: float) -> float:
    """Clip the dense gradients in place, and return the factor by which to scale the tables' gradient.

    Dense parameters and tables are clipped to ``limit`` together, as torch's clip_grad_norm_ would. ``squared_norm`` is
    the squared norm of the tables' gradient over all ranks. If ``limit`` is None, nothing is clipped.
    """
    if limit is None:
        return 1.0
    gradients = [p.grad for _, p in sharded.dense_parameters() if p.grad is not None]
    squared_norm += sum(float(gradient.double().square().sum()) for gradient in gradients)
    scale = min(1.0, limit / (math.sqrt(squared_norm) + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)
    return scale
