"""Checks of several labels and of row weights; each problem has a remedy. Torch-free.

A part of trainer.spec.checks.dataset and trainer.spec.checks.evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.evaluation import CALIBRATED, DEFAULT_METRICS, METRIC_PATTERN, POINTWISE, WATCHED_METRICS, is_table
from trainer.spec.label_tasks import LabelTask, best_by, label_tasks, measured_numbers, of_label
from trainer.spec.losses import LABEL_LOSSES, LOSSES, LossSettings, loss_of
from trainer.spec.models.base import kinds_that
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec, OneOfSeveral
    from trainer.spec.job import JobSpec


def label_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield contradictions within a dataset's label or labels."""
    if spec.label is not None and spec.labels:
        yield FieldProblem("labels", "label is set too", "leave one of the two out")
    elif spec.label is None and not spec.labels:
        yield FieldProblem("label", "Field required", "give label, or labels by name")
    for task in label_tasks(spec):
        yield from _one_of_several_problems(f"labels.{task.name}", spec.labels[task.name], task)


def _one_of_several_problems(field: str, label: OneOfSeveral, task: LabelTask) -> Iterator[FieldProblem]:
    loss = LOSSES[task.loss]
    if label.negatives is not None:
        yield FieldProblem(f"{field}.negatives", "drawn negatives have only one label", "use label, not labels")
    if label.positive is not None:
        yield FieldProblem(f"{field}.positive", "a label that is 1 in every row says nothing", "leave the label out")
    if task.is_value and not loss.of_values:
        fitting = " or ".join(name for name in LABEL_LOSSES if LOSSES[name].of_values)
        yield FieldProblem(f"{field}.loss", f"{task.loss} needs classes, but the label is a value", f"use {fitting}")
    if not task.is_value and loss.least_label is not None:
        yield FieldProblem(f"{field}.loss", f"{task.loss} needs counts or durations", "give value: COLUMN, or use bce")
    for name, of_settings in LossSettings.model_fields.items():
        if getattr(label, name) != of_settings.default and name not in loss.settings.values():
            having = " or ".join(one for one in LABEL_LOSSES if name in LOSSES[one].settings.values())
            yield FieldProblem(f"{field}.{name}", f"{task.loss} has none", f"use loss {having}, or leave it out")
    for metric in label.metrics or ():
        if metric not in task.available_metrics:
            has = ", ".join(task.available_metrics)
            yield FieldProblem(f"{field}.metrics", f"a label of {task.loss} has no {metric}", f"use {has}")


def label_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield conflicts of a job with the number of its dataset's labels, or with the weights of its rows."""
    tasks, kind = label_tasks(dataset), job.model.kind
    if tasks and not job.model.reads_labels:
        yield FieldProblem(
            "model.kind",
            f"{kind} learns one label, and dataset '{dataset.name}' has labels {_words(tasks)}",
            f"use one of {', '.join(kinds_that('reads_labels'))}, or give the dataset one label",
        )
        return
    if not tasks and job.model.reads_labels:
        yield FieldProblem(
            "model.kind",
            f"{kind} learns several labels, and dataset '{dataset.name}' has one",
            "give the dataset labels: {NAME: ...}, or use another model such as dnn",
        )
        return
    if dataset.weight is not None and (job.model.reads_sequences or not LOSSES[loss_of(job)].of_labels):
        yield FieldProblem(
            "model.kind", f"{kind} trained by {loss_of(job)} does not weigh rows", "leave weight of the dataset out"
        )
    if dataset.has_positives_alone and LOSSES[loss_of(job)].of_labels and not job.model.reads_sequences:
        yield FieldProblem(
            "label.positive",
            f"{kind} trained by {loss_of(job)} learns from labels of both classes, and every row is a positive",
            "use label: {negatives: {per_positive: 1, of: item}}, or a model that has negatives of its own: bpr, "
            "item2vec, sasrec, two_tower with loss sampled_softmax",
        )
    yield from _stopping_problems(job, dataset, [task.name for task in tasks])
    if not tasks:
        return
    for metric in job.evaluation.metrics if job.evaluation.metrics != DEFAULT_METRICS else ():
        if not any(metric in task.available_metrics for task in tasks):
            yield FieldProblem("evaluation.metrics", f"none of the labels {_words(tasks)} has {metric}", "leave it out")
    if not any(task.of_classes for task in tasks):
        if "label" in job.sse and job.sse["label"].probability:
            yield FieldProblem("sse.label", f"the labels {_words(tasks)} have no classes to flip", "leave it out")
        if job.regularizers.label_smoothing:
            yield FieldProblem(
                "regularizers.label_smoothing", f"the labels {_words(tasks)} have no classes to smooth", "leave it 0"
            )


def _stopping_problems(job: JobSpec, dataset: DatasetSpec, labels: list[str]) -> Iterator[FieldProblem]:
    """Yield reasons why early stopping cannot watch its metric; otherwise the run would only fail after an epoch."""
    stopping, field = job.regularizers.early_stopping, "regularizers.early_stopping.metric"
    numbers, of_rankings = measured_numbers(job, dataset), dataset.has_positives_alone and not job.model.reads_sequences
    named = "one of rankings, such as recall_20_full," if of_rankings else "one"
    use = f"use one of {', '.join(numbers)}" if numbers else f"name {named} in evaluation.metrics"
    if stopping is None or stopping.metric is None:
        label = labels[0] if labels else ""
        if stopping is not None and best_by(numbers, label) is None:
            watched = [of_label(name, label) for name in WATCHED_METRICS]
            what = "has a meaning if every row is a positive" if of_rankings else "is measured"
            yield FieldProblem(field, f"it is left out, and none of {', '.join(watched)} {what}", use)
        return
    name, _, label = stopping.metric.partition("/")
    if re.match(METRIC_PATTERN, name.removesuffix(CALIBRATED)) is None:
        yield FieldProblem(field, f"no metric is called {name}", "use one of evaluation.metrics")
    elif labels and label not in labels:
        what = f"{stopping.metric} belongs to none of the labels {', '.join(labels)}"
        yield FieldProblem(field, what, f"write METRIC/LABEL, such as {name}/{labels[0]}")
    elif label and not labels:
        yield FieldProblem(field, f"the dataset has one label, without a name such as {label}", f"write {name}")
    elif is_table(name):
        yield FieldProblem(field, f"{stopping.metric} is a table, which cannot compare epochs", use)
    elif of_rankings and name in POINTWISE:
        yield FieldProblem(field, f"{name} has no meaning if every row is a positive", use)
    elif stopping.metric not in numbers:
        more = "set output_calibration" if name.endswith(CALIBRATED) else f"name {name} in evaluation.metrics"
        yield FieldProblem(field, f"{stopping.metric} is not measured", f"{use}, or {more}")


def _words(tasks: tuple[LabelTask, ...]) -> str:
    return ", ".join(task.name for task in tasks)
