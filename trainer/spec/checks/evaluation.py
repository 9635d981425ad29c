"""Checks that losses, labels, metrics and calibrated outputs fit together; each problem has a remedy. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.checks.labels import label_fit_problems
from trainer.spec.checks.regularizers import has_validation
from trainer.spec.evaluation import (
    DEFAULT_METRICS,
    VALUE_METRICS,
    metrics_of_items,
    metrics_of_users,
    ranking_parts,
)
from trainer.spec.label_tasks import label_tasks, metrics_of_job, needs_users
from trainer.spec.losses import LOSSES, VALUE_LOSSES, loss_of
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec

_CALIBRATED_FIELD = "output_calibration"


def ranks_catalogue(job: JobSpec) -> bool:
    """Return True if the job asks for metrics of all items ranked for each user."""
    return job.model.ranks_all_items and any(ranking_parts(name) is not None for name in job.evaluation.metrics)


def evaluation_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings of ``model.loss`` and ``evaluation`` that the job's model does not support."""
    kind, loss = spec.model.kind, spec.model.loss
    losses = spec.model.losses
    if loss not in losses and loss != "bce":
        remedy = f"use {' or '.join(losses)}" if losses else "leave it out"
        yield FieldProblem("model.loss", f"{kind} has no {loss}", remedy)
    elif spec.model.is_softmax_of_batch and spec.micro_batches > 1:
        yield FieldProblem(
            "micro_batches",
            f"{loss} takes its negatives from the whole batch",
            "use 1, or a smaller batch_size",
        )
    elif spec.model.is_softmax_of_batch and spec.regularizers.label_smoothing:
        yield FieldProblem(
            "regularizers.label_smoothing", f"{loss} of {kind} has no class labels to smooth", "leave it 0"
        )
    for owner, name in ((owner, name) for owner, one in LOSSES.items() for name in one.settings.values()):
        field = type(spec.model).model_fields.get(name)
        if loss != owner and field is not None and getattr(spec.model, name) != field.default:
            yield FieldProblem(f"model.{name}", f"{loss} has none", f"use loss {owner}, or leave it out")
    if spec.evaluation.sample_users is not None and not (spec.model.reads_sequences or ranks_catalogue(spec)):
        why = "it samples users for rankings, but no metric ranks items"
        yield FieldProblem("evaluation.sample_users", why, "leave it out, or ask for metrics such as ndcg_10_full")
    yield from _metric_problems(spec)
    if spec.evaluation.intervals is not None and spec.evaluation.intervals.by == "user" and spec.model.reads_sequences:
        yield FieldProblem("evaluation.intervals.by", f"{kind} has one held-out example for a user", "use row")
    yield from _training_problems(spec)


def _training_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield obstacles to evaluating training rows like held-out rows."""
    if not spec.evaluation.training:
        return
    if spec.model.reads_sequences or not LOSSES[loss_of(spec)].of_labels:
        yield FieldProblem(
            "evaluation.training",
            f"{spec.model.kind} trained by {loss_of(spec)} has no label of its own for a training row",
            "leave it out",
        )
    of_users = metrics_of_users(spec.evaluation.metrics)
    ranked = [name for name in spec.evaluation.metrics if ranking_parts(name) is not None or name in of_users]
    if ranked:
        yield FieldProblem(
            "evaluation.training",
            f"metrics of users need held-out rows: {', '.join(ranked)}",
            "leave one of the two out",
        )
    if spec.evaluation.intervals is not None:
        yield FieldProblem("evaluation.training", "only held-out rows have intervals", "leave one of the two out")


def _metric_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    kind, metrics = spec.model.kind, spec.evaluation.metrics
    if metrics == DEFAULT_METRICS:
        return
    sequence = spec.model.reads_sequences
    pointwise = ("auc",) if sequence else LOSSES[loss_of(spec)].metrics
    for name in dict.fromkeys(metrics):
        if ranking_parts(name) is None:
            if name not in pointwise and not (sequence and name == "logloss" and "auc" in metrics):
                what = "ranks and" if sequence else f"trained by {loss_of(spec)}"
                yield FieldProblem("evaluation.metrics", f"{kind} {what} has no {name}", f"use {', '.join(pointwise)}")
        elif not sequence and not spec.model.ranks_all_items:
            yield FieldProblem(
                "evaluation.metrics",
                f"{kind} has no {name}, because it cannot rank all items for a user",
                f"use {', '.join(pointwise)}",
            )


def evaluation_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    tasks = label_tasks(dataset)
    metrics = metrics_of_job(job, tasks)
    yield from label_fit_problems(job, dataset)
    if dataset.label is not None and dataset.label.value is not None:
        yield from _value_problems(job, dataset.label.value)
    elif not tasks and LOSSES[loss_of(job)].least_label is not None:
        yield FieldProblem(
            "model.loss", f"{job.model.loss} needs counts or durations", "use label: {value: COLUMN}, or loss bce"
        )
    if needs_users(job, tasks):
        yield from _needs_ids("evaluation", "users", "user", dataset)
    for name in metrics_of_items(metrics):
        yield from _needs_ids("evaluation.metrics", name, "item", dataset)
    yield from _slice_problems(job, dataset)


def _slice_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield a problem for each of ``evaluation.slices`` by which the served model and the job's cannot be compared."""
    slices = job.evaluation.slices
    if slices and (job.publish is None or job.publish.gate.mode == "off"):
        why = "slices are for the comparison with the served version, but the job has no gate"
        yield FieldProblem("evaluation.slices", why, "set publish, or leave it out")
    ids = [name for name in job.model.looked_up(dataset) if name in dataset.features]
    numbers = [name for name, one in dataset.features.items() if one.type == "dense" and job.model.reads_numbers]
    single = [name for name in ids if not dataset.features[name].is_list]
    for name in slices:
        if name not in single and name not in numbers:
            remedy = f"name some of {', '.join([*single, *numbers])}"
            why = f"'{name}' is no feature of single ids or numbers that {job.model.kind} reads"
            yield FieldProblem("evaluation.slices", why, remedy)


def _value_problems(job: JobSpec, column: str) -> Iterator[FieldProblem]:
    """Yield the settings that cannot be used with a real-valued label."""
    kind = job.model.kind
    rule = f"use label: {{rule: '{column} >= ...'}}"
    if not any(LOSSES[loss].of_values for loss in job.model.losses):
        yield FieldProblem(
            "model.kind", f"{kind} cannot learn a real-valued label", f"{rule}, or a model with loss mse such as mf"
        )
        return
    if not LOSSES[job.model.loss].of_values:
        fitting = " or ".join(loss for loss in VALUE_LOSSES if loss in job.model.losses)
        yield FieldProblem("model.loss", f"a real-valued label needs {fitting}", f"set model.loss: mse, or {rule}")
    if "label" in job.sse and job.sse["label"].probability:
        yield FieldProblem("sse.label", "a real-valued label has no classes to flip", f"leave it out, or {rule}")
    if job.regularizers.label_smoothing:
        yield FieldProblem(
            "regularizers.label_smoothing", "a real-valued label has no classes to smooth", f"leave it 0, or {rule}"
        )
    if job.evaluation.metrics == DEFAULT_METRICS:
        return
    for name in job.evaluation.metrics:
        if name not in VALUE_METRICS:
            yield FieldProblem(
                "evaluation.metrics",
                f"a real-valued label has no {name}",
                f"use {' and '.join(VALUE_METRICS)}, or {rule}",
            )


def _needs_ids(field: str, what: str, name: str, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield a problem unless feature ``name`` is a feature of single ids that reads a column."""
    feature = dataset.features.get(name)
    if feature is None or feature.type != "id" or feature.join is not None or feature.derive is not None:
        yield FieldProblem(
            field, f"{what} need a feature named '{name}' of type id that reads a column of dataset '{dataset.name}'"
        )


def output_calibration_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield reasons why a job's outputs cannot be calibrated, whatever the dataset."""
    kind, model = spec.output_calibration, spec.model
    if kind == "none":
        return
    loss = loss_of(spec)
    if model.reads_sequences:
        yield FieldProblem(_CALIBRATED_FIELD, f"{model.kind} ranks items and gives no probabilities", "leave it out")
    elif not model.reads_labels and not LOSSES[loss].is_logit:
        yield FieldProblem(
            _CALIBRATED_FIELD,
            f"{model.kind} trained by {loss} gives no probabilities",
            "use model.loss bce, or leave it out",
        )
    if spec.dataset.one_pass:
        yield FieldProblem(
            _CALIBRATED_FIELD,
            "outputs of jobs with dataset.one_pass are not calibrated yet",
            "leave one of the two out",
        )
    elif not has_validation(spec):
        yield FieldProblem(
            _CALIBRATED_FIELD,
            f"{kind} is fitted on validation rows, and there is no validation split",
            "set evaluation.split.validation, or leave it out",
        )


def output_calibration_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield reasons why outputs cannot be calibrated for a dataset of several labels."""
    tasks = label_tasks(dataset)
    if job.output_calibration != "none" and tasks and not any(LOSSES[task.loss].is_logit for task in tasks):
        yield FieldProblem(
            _CALIBRATED_FIELD,
            "none of the labels " + ", ".join(f"{task.name} ({task.loss})" for task in tasks) + " gives probabilities",
            "leave it out, or give one of them loss: bce",
        )
