"""Checks of which jobs have probabilities to calibrate, and rows to do it on, with the remedy. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.checks.regularizers import has_validation
from trainer.spec.label_tasks import label_tasks
from trainer.spec.losses import LOSSES, loss_of
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec

_FIELD = "output_calibration"


def output_calibration_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield reasons why a job's outputs cannot be calibrated, whatever the dataset."""
    kind, model = spec.output_calibration, spec.model
    if kind == "none":
        return
    loss = loss_of(spec)
    if model.reads_sequences:
        yield FieldProblem(_FIELD, f"{model.kind} ranks items and gives no probabilities", "leave it out")
    elif not model.reads_labels and not LOSSES[loss].is_logit:
        yield FieldProblem(
            _FIELD, f"{model.kind} trained by {loss} gives no probabilities", "use model.loss bce, or leave it out"
        )
    if spec.dataset.one_pass:
        yield FieldProblem(
            _FIELD, "outputs of jobs with dataset.one_pass are not calibrated yet", "leave one of the two out"
        )
    elif not has_validation(spec):
        yield FieldProblem(
            _FIELD,
            f"{kind} is fitted on validation rows, and there is no validation split",
            "set evaluation.split.validation, or leave it out",
        )


def output_calibration_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield reasons why outputs cannot be calibrated for a dataset of several labels."""
    tasks = label_tasks(dataset)
    if job.output_calibration != "none" and tasks and not any(LOSSES[task.loss].is_logit for task in tasks):
        yield FieldProblem(
            _FIELD,
            "none of the labels " + ", ".join(f"{task.name} ({task.loss})" for task in tasks) + " gives probabilities",
            "leave it out, or give one of them loss: bce",
        )
