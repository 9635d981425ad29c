"""Checks of jobs that train on rows as they are read: what would need all rows before the first step. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from embeddings.optim.registry import KINDS
from trainer.spec.evaluation import metrics_of_users
from trainer.spec.label_tasks import label_tasks, metrics_of_job, needs_users
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec, Feature
    from trainer.spec.job import JobSpec

_LEAVE_OUT = "or leave dataset.one_pass out"


def one_pass_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield what of the job needs all rows before its first step, or the raw ids of rows of tables."""
    if not spec.dataset.one_pass:
        return
    if spec.epochs != 1:
        yield FieldProblem("epochs", "dataset.one_pass reads the rows to train on once", f"use 1, {_LEAVE_OUT}")
    split = spec.evaluation.split
    if split.kind in ("time", "per_user_last"):
        yield FieldProblem(
            "evaluation.split.kind",
            f"{split.kind} is decided by all rows, and dataset.one_pass trains on the first before it has them",
            f"use random, or column with validation: 0, {_LEAVE_OUT}",
        )
    if split.kind == "column" and split.validation:
        yield FieldProblem(
            "evaluation.split.validation",
            "a share of the other rows validates where the column names none, which is known after all rows",
            f"set it to 0: rows that the column calls validation validate all the same; {_LEAVE_OUT}",
        )
    if spec.evaluation.training:
        yield FieldProblem(
            "evaluation.training", "dataset.one_pass keeps no training row", f"leave it out, {_LEAVE_OUT}"
        )
    if KINDS[spec.optimizer.kind].takes("alpha") and not isinstance(spec.optimizer.alpha, float):
        yield FieldProblem(
            "optimizer.alpha",
            f"{spec.optimizer.alpha} comes from the number of training rows, which dataset.one_pass does not know",
            f"give a number, such as that of an earlier run's log, or another optimizer.kind, {_LEAVE_OUT}",
        )
    if spec.publish is not None:
        yield FieldProblem(
            "publish", "dataset.one_pass holds no raw ids of items to publish", f"leave it out, {_LEAVE_OUT}"
        )


def one_pass_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the tables, features and labels that need all rows before the first step."""
    if not job.dataset.one_pass:
        return
    ids = {name: feature for name, feature in dataset.features.items() if feature.type != "dense"}
    for table in dict.fromkeys(feature.shares or name for name, feature in ids.items()):
        if table not in job.tables or job.tables[table].capacity is None:
            yield FieldProblem(
                f"tables.{table}.capacity",
                "with dataset.one_pass ids get their rows as they are read",
                f"set how many ids may have a row at once, {_LEAVE_OUT}",
            )
    for name, feature in dataset.features.items():
        yield from _feature_problems(name, feature)
    if dataset.negatives is not None:
        yield FieldProblem(
            "label.negatives", "what a user never had is known after all rows", f"use column or rule, {_LEAVE_OUT}"
        )
    if dataset.max_bad_rows is not None:
        yield FieldProblem(
            "max_bad_rows", "the share of bad rows is known after all rows", f"leave it out, {_LEAVE_OUT}"
        )
    tasks = label_tasks(dataset)
    if needs_users(job, tasks):
        named = ", ".join(metrics_of_users(metrics_of_job(job, tasks)))
        field, what = ("evaluation.metrics", named) if named else ("evaluation.intervals.by", "user")
        yield FieldProblem(field, f"{what}: dataset.one_pass does not number users", f"leave it out, {_LEAVE_OUT}")


def _feature_problems(name: str, feature: Feature) -> Iterator[FieldProblem]:
    where = f"features.{name}"
    if feature.derive is not None:
        yield FieldProblem(
            f"{where}.derive", "rows are not in the order of time", f"write the history into a column, {_LEAVE_OUT}"
        )
    if feature.join is not None:
        yield FieldProblem(
            f"{where}.join", "joins are not looked up as rows are read yet", f"write it into a column, {_LEAVE_OUT}"
        )
    if feature.type != "dense":
        return
    if feature.transform not in ("none", "log1p"):
        yield FieldProblem(
            f"{where}.transform",
            f"{feature.transform} takes statistics of all rows",
            f"use none or log1p, {_LEAVE_OUT}",
        )
    if feature.missing in (None, "mean"):
        yield FieldProblem(f"{where}.missing", "the mean is one of all rows", f"give a number, or error, {_LEAVE_OUT}")
