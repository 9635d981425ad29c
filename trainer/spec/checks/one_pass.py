"""Checks of jobs that train on rows as they are read: no setting may need all rows before a step. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from embeddings.optim.registry import KINDS
from trainer.spec.evaluation import metrics_of_users
from trainer.spec.label_tasks import label_tasks, metrics_of_job, needs_users
from trainer.spec.problems import FieldProblem
from trainer.spec.uri_schemes import is_topic

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec, Feature
    from trainer.spec.job import JobSpec

_LEAVE_OUT = "or leave dataset.one_pass out"


def one_pass_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings of the job that need all rows before its first step."""
    yield from _without_one_pass(spec)
    if not spec.dataset.one_pass:
        return
    yield from _follow_problems(spec)
    if spec.epochs != 1:
        yield FieldProblem("epochs", "dataset.one_pass reads training rows once", f"use 1, {_LEAVE_OUT}")
    split = spec.evaluation.split
    if split.kind in ("time", "per_user_last"):
        yield FieldProblem(
            "evaluation.split.kind",
            f"a split by {split.kind} needs all rows, but dataset.one_pass trains before it has read them",
            f"use random, or column with validation: 0, {_LEAVE_OUT}",
        )
    if split.kind == "column" and split.validation:
        yield FieldProblem(
            "evaluation.split.validation",
            "it is used if the column names no validation rows, which is only known after all rows",
            f"set it to 0: rows that the column calls validation validate all the same; {_LEAVE_OUT}",
        )
    if spec.evaluation.training:
        yield FieldProblem(
            "evaluation.training", "dataset.one_pass keeps no training row", f"leave it out, {_LEAVE_OUT}"
        )
    if KINDS[spec.optimizer.kind].takes("alpha") and not isinstance(spec.optimizer.alpha, float):
        yield FieldProblem(
            "optimizer.alpha",
            "default comes from the number of training rows, which dataset.one_pass does not know",
            f"give a number, such as that of an earlier run's log, or another optimizer.kind, {_LEAVE_OUT}",
        )
    if spec.optimizer.decay == "by_epoch":
        yield FieldProblem(
            "optimizer.decay",
            "by_epoch begins with the second epoch, and dataset.one_pass has one",
            f"use at_read, which is its default, {_LEAVE_OUT}",
        )


def _without_one_pass(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings that only a job of one pass supports."""
    publish = spec.publish
    asked = {
        "dataset.follow": spec.dataset.follow,
        "evaluation.progressive_rows": spec.evaluation.progressive_rows,
        "publish.every_seconds": None if publish is None else publish.every_seconds,
        "publish.every_rows": None if publish is None else publish.every_rows,
    }
    for field, value in asked.items():
        if value is not None and not spec.dataset.one_pass:
            yield FieldProblem(
                field,
                "it is only for jobs that train on rows as they are read",
                "set dataset.one_pass, or leave it out",
            )
    if publish is not None and publish.every_seconds is not None and publish.every_rows is not None:
        yield FieldProblem("publish.every_rows", "every_seconds is set too", "give one of the two")


def _follow_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings that mean nothing for rows without an end."""
    if spec.dataset.follow is None:
        return
    split = spec.evaluation.split
    if split.kind != "random" or split.validation or split.test:
        yield FieldProblem(
            "evaluation.split",
            "held-out rows are read at the end, which dataset.follow never reaches",
            "use kind: random with validation: 0 and test: 0, and evaluation.progressive_rows for figures",
        )
    if spec.dataset.window is not None:
        yield FieldProblem(
            "dataset.window", "dataset.follow reads all files of the folder, in their order", "leave one of them out"
        )


def one_pass_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the tables, features and labels that need all rows before the first step."""
    yield from _topic_problems(job, dataset)
    if not job.dataset.one_pass:
        return
    ids = {name: feature for name, feature in dataset.features.items() if feature.has_ids}
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
            "label.negatives",
            "items that a user never had are only known after all rows",
            f"use column or rule, {_LEAVE_OUT}",
        )
    if dataset.max_bad_rows is not None and dataset.messages is None:
        yield FieldProblem(
            "max_bad_rows", "the share of bad rows is only known after all rows", f"leave it out, {_LEAVE_OUT}"
        )
    tasks = label_tasks(dataset)
    if needs_users(job, tasks):
        named = ", ".join(metrics_of_users(metrics_of_job(job, tasks)))
        field, what = ("evaluation.metrics", named) if named else ("evaluation.intervals.by", "user")
        yield FieldProblem(field, f"{what}: dataset.one_pass does not number users", f"leave it out, {_LEAVE_OUT}")


def _topic_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield settings of ``dataset.follow`` that do not fit the followed source."""
    follow, of_topic = job.dataset.follow, is_topic(dataset.uri)
    if of_topic and (follow is None or not job.dataset.one_pass):
        yield FieldProblem(
            "dataset.follow", "the rows are messages of a topic, which has no end", "set it, and dataset.one_pass: true"
        )
    if follow is None:
        return
    for name in ("until", "settle_seconds", "late") if of_topic else ("start", "away_seconds"):
        if getattr(follow, name) != type(follow).model_fields[name].default:
            what, other = ("a folder", "a topic") if of_topic else ("a topic", "a folder")
            yield FieldProblem(
                f"dataset.follow.{name}", f"it is for {what}, but the dataset is {other}", "leave it out"
            )


def _feature_problems(name: str, feature: Feature) -> Iterator[FieldProblem]:
    where = f"features.{name}"
    if feature.derive is not None:
        yield FieldProblem(
            f"{where}.derive", "rows are not in the order of time", f"write the history into a column, {_LEAVE_OUT}"
        )
    if feature.join is not None:
        yield FieldProblem(
            f"{where}.join", "dataset.one_pass does not read joins yet", f"write it into a column, {_LEAVE_OUT}"
        )
    if feature.type == "vector":
        yield FieldProblem(
            f"{where}.type", "vectors are not read with dataset.one_pass yet", f"leave it out, {_LEAVE_OUT}"
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
        yield FieldProblem(f"{where}.missing", "the mean needs all rows", f"give a number, or error, {_LEAVE_OUT}")
