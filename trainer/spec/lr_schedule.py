"""The learning-rate schedule that a job's words stand for. Torch-free."""

from __future__ import annotations

from embeddings.optim.lr_schedules import Constant, Cosine, LinearWarmup, Schedule, StepDecay
from trainer.spec.job import LearningRateSchedule


def schedule_of(spec: LearningRateSchedule) -> Schedule:
    """As :mod:`embeddings.optim.lr_schedules` has it. Raises ValueError like that."""
    warmup = (spec.warmup_steps, spec.start_factor)
    if spec.kind == "linear_warmup":
        return LinearWarmup(*warmup)
    if spec.kind == "cosine":
        return Cosine(*warmup, decay_steps=spec.decay_steps or 0, final_factor=spec.final_factor)
    if spec.kind == "step":
        return StepDecay(*warmup, every_steps=spec.every_steps or 0, gamma=spec.gamma)
    return Constant()
