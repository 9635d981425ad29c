"""Jacobians and covariate shifts by depth, of a trained tower and of its initial weights."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from benchmarks.papers.lecture.covariate_shift import covariate_shifts
from benchmarks.papers.lecture.jacobians import (
    LARGE,
    NUM_ROWS,
    inputs_of,
    jacobian_norms,
    scale_weights,
    with_moments_of,
)
from trainer.generalization.subject import Subject
from trainer.models.base import RankingModel


def by_depth(subject: Subject) -> dict[str, list[float]]:
    """Return the Jacobians and covariate shifts of a model's tower for each hidden layer.

    The Jacobians are computed on the first rows of the sample: ``initial``, ``large`` (initial weights times LARGE) and
    ``trained``. Initial towers read the same inputs as the trained tower, and their batch normalisation uses the
    moments of these rows. The shifts are computed on the whole sample for a step at the dense rate, without the first
    layer: ``initial cosine``, ``initial difference``, ``trained cosine``, ``trained difference``.
    """
    tower: Any = subject.model.tower
    inputs = inputs_of(tower, subject.losses)[:NUM_ROWS]
    found = {"trained": jacobian_norms(tower, inputs), **_shifts("trained", subject, subject.model)}
    for name, factor in (("initial", 1.0), ("large", LARGE)):
        initial: Any = subject.initial_model().tower
        scale_weights(initial, factor)
        with_moments_of(initial, inputs)
        found[name] = jacobian_norms(initial, inputs)
    return found | _shifts("initial", subject, subject.initial_model())


def _shifts(when: str, subject: Subject, model: RankingModel) -> dict[str, list[float]]:
    rate = subject.job.dense_optimizer.learning_rate
    shifts = covariate_shifts(cast(nn.Module, model.tower), lambda: subject.losses(model).mean(), rate)
    return {
        f"{when} cosine": [one.cosine for one in shifts],
        f"{when} difference": [one.difference for one in shifts],
    }
