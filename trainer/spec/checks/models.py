"""Checks of what of a model does not fit the rest of a job, or its dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec

UNPOOLED_SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def model_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield the settings of the model that its kind has no use for, or cannot learn from."""
    yield from spec.model.problems(spec)
    if not spec.model.pools:
        for table, sharding in spec.sharding.items():
            if sharding not in UNPOOLED_SHARDINGS:
                yield FieldProblem(
                    f"sharding.{table}",
                    f"{sharding} is of pooled rows, and {spec.model.kind} takes each row by itself",
                    f"use {', '.join(UNPOOLED_SHARDINGS)}",
                )
