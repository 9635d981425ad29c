"""Hard negatives: items near a positive in the vectors of the last published version, for the models that draw them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainer.spec.base import May, Spec, later
from trainer.spec.models.base import ModelSpec
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec

WHERE = "model.hard_negatives"


class HardNegatives(Spec):
    """Items near a positive by the last published version, in the place of a share of the drawn negatives.

    ``share``: of the drawn negatives, how many are hard in expectation. ``nearest``: each is one of so many neighbours
    of a positive, all alike, once the ``skip`` nearest are left out, which are the likeliest to be liked too
    (trainer.data.batches.hard_negatives).
    """

    share: float = Field(default=0.1, gt=0.0, le=1.0, allow_inf_nan=False)
    nearest: int = Field(default=100, ge=1, le=10_000)
    skip: int = Field(default=0, ge=0, le=10_000)


class HardNegativesSpec(ModelSpec):
    """A model some of whose drawn negatives can be hard."""

    hard_negatives: Annotated[HardNegatives | None, May.DIFFER_ON_WARM_START] = later(None)

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.hard_negatives is None:
            return
        if job.publish is None or job.publish.feature != "item":
            why = "neighbours come from the collection that the job publishes items to"
            yield FieldProblem(WHERE, why, "set publish with feature: item, or leave it out")
        if job.dataset.one_pass:
            yield FieldProblem(
                WHERE, "neighbours are of ids that are known before the first step", "leave it or dataset.one_pass out"
            )
        for name, table in job.tables.items():
            if table.capacity is not None:
                why = f"rows of '{name}' with a capacity come and go, and neighbours are of rows that stay"
                yield FieldProblem(WHERE, why, "leave it or the capacity out")


def hard_negatives_of(job: JobSpec) -> HardNegatives | None:
    """Return what the job says of hard negatives, None where it has none."""
    return job.model.hard_negatives if isinstance(job.model, HardNegativesSpec) else None
