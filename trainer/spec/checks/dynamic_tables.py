"""Checks of jobs with dynamic tables: settings that mean nothing with them, or are not available yet. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.checks.evaluation import ranks_catalogue
from trainer.spec.models.base import kinds_that
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


def dynamic_table_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings of the job that mean nothing, or are not available yet, with dynamic tables."""
    dynamic = [name for name, table in spec.tables.items() if table.capacity is not None]
    if not dynamic:
        return
    where = f"tables.{dynamic[0]}.capacity"
    if not spec.model.has_dynamic_tables:
        kinds = ", ".join(kinds_that("has_dynamic_tables"))
        yield FieldProblem(where, f"tables of {spec.model.kind} are not dynamic yet", f"use one of {kinds}")
    if spec.model.loss == "sampled_softmax":
        yield FieldProblem(where, "sampled_softmax weighs items by how often their row occurs", "use loss bce or mse")
    if ranks_catalogue(spec):
        yield FieldProblem(where, "items that share a row cannot be ranked yet", "leave ranking metrics out")
    if spec.publish is not None and (spec.publish.anchor is not None or spec.publish.frozen_context is not None):
        yield FieldProblem(
            where,
            "publish.anchor and publish.frozen_context need rows that keep their ids",
            "leave them or capacity out",
        )
    if spec.model.effective_init.kind == "normal":
        yield FieldProblem(
            where,
            "a row passes from one id to another, so its initial values must depend on the id",
            "use model.init hash or zero",
        )
    if spec.regularizers.meda:
        yield FieldProblem(where, "regularizers.meda resets rows, not which ids have them", "leave one of them out")
    if spec.init_from is not None and spec.init_from.retire_after_runs is not None:
        yield FieldProblem(where, "dynamic tables retire ids by ttl_steps", "leave init_from.retire_after_runs out")
    if "frequency_buckets" in spec.evaluation.metrics:
        yield FieldProblem(where, "frequency_buckets needs a row for each item", "leave it out of evaluation.metrics")


def dynamic_table_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the settings that swap or compare rows of dynamic tables."""
    if any(table.capacity is not None for table in job.tables.values()):
        for name, label in dataset.labels.items():
            if "frequency_buckets" in (label.metrics or ()):
                yield FieldProblem(
                    f"labels.{name}.metrics",
                    "frequency_buckets needs a row for each item, but the job has dynamic tables",
                    "leave it out, or tables.NAME.capacity",
                )
    for name, feature in dataset.features.items():
        table = feature.shares or name
        if table in job.tables and job.tables[table].capacity is not None:
            if name in job.sse and job.sse[name].graph is not None:
                yield FieldProblem(
                    f"sse.{name}.graph",
                    f"table '{table}' is dynamic, but a graph needs ids that are known in advance",
                    "leave one of them out",
                )
            if name in job.sse and job.sse[name].include_unknown:
                yield FieldProblem(
                    f"sse.{name}.include_unknown",
                    f"table '{table}' is dynamic: ids without a row yet train the row of unknown ids",
                    "leave it out",
                )
            if job.regularizers.laplacian is not None:
                yield FieldProblem(
                    "regularizers.laplacian",
                    f"table '{table}' is dynamic, but a graph needs ids that are known in advance",
                    "leave one out",
                )
