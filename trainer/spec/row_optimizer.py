"""Row optimizer of a job's settings. Torch-free."""

from __future__ import annotations

from embeddings.optim.base import RowOptimizer
from embeddings.optim.registry import KINDS
from trainer.spec.lr_schedule import schedule_of
from trainer.spec.optimizer import Optimizer


def row_optimizer(spec: Optimizer, alpha: float | None, epoch_steps: int | None = None) -> RowOptimizer:
    """Return the optimizer of the embedding tables.

    Args:
        spec: The settings; settings that the optimizer's kind does not have are not used.
        alpha: The value of ``spec.alpha`` as a number; None for kinds without it.
        epoch_steps: The number of steps in an epoch of the tables' first training, for ``decay: by_epoch``.

    Raises:
        ValueError: The settings do not go together.
    """
    kind = KINDS[spec.kind]
    settings = spec.model_dump() | {"schedule": schedule_of(spec.schedule), "alpha": alpha}
    settings["epoch_steps"] = epoch_steps if spec.decay == "by_epoch" else None
    return kind.optimizer(**{name: value for name, value in settings.items() if kind.takes(name)})
