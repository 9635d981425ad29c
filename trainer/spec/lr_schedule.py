"""The learning-rate schedule that a job's settings describe. Torch-free."""

from __future__ import annotations

from embeddings.optim.lr_schedules import Constant, Cosine, LinearWarmup, Schedule, StepDecay
from trainer.spec.optimizer import LearningRateSchedule


def schedule_of(spec: LearningRateSchedule) -> Schedule:
    """Return the schedule as :mod:`embeddings.optim.lr_schedules` implements it.

    Raises:
        ValueError: That module refuses the settings.
    """
    warmup = (spec.warmup_steps, spec.start_factor)
    if spec.kind == "linear_warmup":
        return LinearWarmup(*warmup)
    if spec.kind == "cosine":
        return Cosine(*warmup, decay_steps=spec.decay_steps or 0, final_factor=spec.final_factor)
    if spec.kind == "step":
        return StepDecay(*warmup, every_steps=spec.every_steps or 0, gamma=spec.gamma)
    return Constant()
