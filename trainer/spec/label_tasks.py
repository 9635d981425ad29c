"""Tasks of a model with several labels: the loss, the weight and the metrics of each label. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.spec.evaluation import (
    CALIBRATED,
    CALIBRATED_METRICS,
    DEFAULT_METRICS,
    METRIC_PATTERN,
    POINTWISE,
    SEQUENCE_METRICS,
    VALUE_METRICS,
    WATCHED_METRICS,
    is_table,
)
from trainer.spec.losses import LOSSES, loss_of, settings_of

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class LabelTask(NamedTuple):
    """One of several labels, as models and evaluation see it.

    ``settings``: keyword arguments of its loss, in addition to scores and labels. ``is_value``: True if labels are real
    numbers, not classes. ``metrics``: metrics that the dataset names; None if it names none.
    """

    name: str
    loss: str = "bce"
    weight: float = 1.0
    settings: Mapping[str, float | None] = {}
    is_value: bool = False
    metrics: tuple[str, ...] | None = None

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> LabelTask:
        """Return the task from the result of ``_asdict``, once that was stored as JSON and read again."""
        metrics = document["metrics"]
        return cls(**{**document, "metrics": None if metrics is None else tuple(metrics)})

    @property
    def available_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that can be computed from the label's scores."""
        return VALUE_METRICS if self.is_value else LOSSES[self.loss].metrics

    @property
    def of_classes(self) -> bool:
        """True if its labels are classes, which can be smoothed and swapped."""
        return not self.is_value and LOSSES[self.loss].of_classes

    def measured(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """Return the label's metrics: as the dataset names them, else those in ``asked`` that suit it, else defaults.

        ``asked``: the job's ``evaluation.metrics``.
        """
        if self.metrics is not None:
            return tuple(dict.fromkeys(self.metrics))
        has = [] if asked == DEFAULT_METRICS else [n for n in dict.fromkeys(asked) if n in self.available_metrics]
        return tuple(has) or (VALUE_METRICS if self.is_value else LOSSES[self.loss].default_metrics)


def label_tasks(dataset: DatasetSpec) -> tuple[LabelTask, ...]:
    """Return the tasks of the dataset's ``labels`` in their order; () where each row has one ``label``."""
    return tuple(
        LabelTask(name, loss, label.weight, settings_of(loss, label), label.value is not None, label.metrics)
        for name, label in dataset.labels.items()
        for loss in (label.effective_loss,)
    )


def metrics_of_job(job: JobSpec, tasks: Iterable[LabelTask]) -> tuple[str, ...]:
    """Return the metrics that the job's evaluation names, followed by those that labels of the dataset name."""
    named = (metric for task in tasks for metric in task.metrics or ())
    return tuple(dict.fromkeys((*job.evaluation.metrics, *named)))


def needs_users(job: JobSpec, tasks: Iterable[LabelTask]) -> bool:
    """Return True if evaluation needs the user of each row."""
    of_users = (name in POINTWISE and POINTWISE[name].of_users for name in metrics_of_job(job, tasks))
    return job.evaluation.needs_users or any(of_users)


def least_labels(job: JobSpec, dataset: DatasetSpec) -> dict[str, float]:
    """Return {label: smallest valid value} of labels whose loss has such a value; a single label is "label"."""
    losses = {"label": loss_of(job)} if not dataset.labels else {one.name: one.loss for one in label_tasks(dataset)}
    least = ((name, LOSSES[loss].least_label) for name, loss in losses.items())
    return {name: value for name, value in least if value is not None}


def of_label(metric: str, label: str) -> str:
    """Return the name of a label's metric: ``auc/click``; for a single label ("") the metric's own name."""
    return f"{metric}/{label}" if label else metric


def metric_names(job: JobSpec, is_value: bool) -> tuple[str, ...]:
    """Return the metrics of a job with a single label: those of ``evaluation.metrics``, else defaults.

    ``is_value``: True if labels are real numbers. Defaults depend on the model and its loss.
    """
    asked, loss = job.evaluation.metrics, LOSSES[loss_of(job)]
    sequence = job.model.reads_sequences
    if asked != DEFAULT_METRICS:
        return tuple(name for name in dict.fromkeys(asked) if not (sequence and name == "logloss"))
    if sequence:
        return SEQUENCE_METRICS
    return VALUE_METRICS if is_value and loss.of_values else loss.default_metrics


def measured_numbers(job: JobSpec, dataset: DatasetSpec) -> tuple[str, ...]:
    """Return the metrics of held-out rows by which epochs are compared: numbers, not tables, in their order.

    If every row is a positive, these are only ranking metrics: an AUC needs both classes, and the best logloss would
    belong to a model that predicts 1 for everything.
    """
    tasks, asked = label_tasks(dataset), job.evaluation.metrics
    if tasks:
        figures = [of_label(name, task.name) for task in tasks for name in task.measured(asked)]
    else:
        figures = list(metric_names(job, dataset.label is not None and dataset.label.value is not None))
        if dataset.has_positives_alone and not job.model.reads_sequences:
            figures = [name for name in figures if name not in POINTWISE]
    if job.output_calibration != "none":
        losses = {task.name: task.loss for task in tasks} or {"": loss_of(job)}
        labels = [label for label, loss in losses.items() if LOSSES[loss].is_logit]
        names = [name + end for name in CALIBRATED_METRICS for end in ("", CALIBRATED)]
        figures += [of_label(name, label) for label in labels for name in names]
    return tuple(name for name in dict.fromkeys(figures) if not is_table(name))


def watched_metric(job: JobSpec, dataset: DatasetSpec) -> str | None:
    """Return the metric by which the best epoch is chosen: NDCG among all items, else the first measured number.

    None: there is no such number.
    """
    measured = measured_numbers(job, dataset)
    return next((name for name in (*_ndcg_of_all(measured), *measured)), None)


def best_by(measured: Iterable[str], label: str = "") -> str | None:
    """Return the metric that early stopping watches if it names none: NDCG among all items, if it is measured.

    Otherwise the first of WATCHED_METRICS, otherwise the first ranking metric; None if there is none. ``label``: name
    of the metrics' label if there are several labels.
    """
    names = list(measured)
    rankings = (name for name in names if name not in POINTWISE and re.match(METRIC_PATTERN, name))
    candidates = (*_ndcg_of_all(names), *(of_label(name, label) for name in WATCHED_METRICS), *rankings)
    return next((name for name in candidates if name in names), None)


def _ndcg_of_all(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("ndcg_") and name.endswith("_full")]


def in_topological_order(given: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (label, parent) for each item of ``given``, such that a label comes after its parent.

    ``given``: the label that each label depends on, by label. ``names``: all labels.

    Raises:
        ValueError: the labels' ``given`` form a cycle.
    """
    done = {name for name in names if name not in given}
    left = dict(given)
    while left:
        ready = [name for name, parent in left.items() if parent in done]
        if not ready:
            raise ValueError(f"given forms a cycle: {', '.join(left)}")
        for name in ready:
            done.add(name)
            yield name, left.pop(name)
