"""Checks of what of a model does not fit the rest of a job, or its dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from embeddings.tables.shardings import shardings_for
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec


def model_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield the settings of the model that its kind has no use for, or cannot learn from."""
    yield from spec.model.problems(spec)
    if not spec.model.pools:
        available = shardings_for(sequences=True)
        for table, sharding in spec.sharding.items():
            if sharding not in available:
                yield FieldProblem(
                    f"sharding.{table}",
                    f"{sharding} is of pooled rows, and {spec.model.kind} takes each row by itself",
                    f"use {', '.join(available)}",
                )
