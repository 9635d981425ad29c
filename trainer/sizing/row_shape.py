"""Shape of a row's inputs other than ids: labels, numbers and vectors of rows and of the item table. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.data.columns.vectors import Vector, given_columns, vectors_of
from trainer.spec import DatasetSpec, JobSpec


@dataclass(frozen=True)
class RowShape:
    """Counts of a row's inputs, other than ids, that determine the sizes of models and batches.

    ``num_dense`` counts the columns of vectors with ``mode: as_given`` too; ``vectors`` are the projected ones.
    ``item_fields``: number of features in the item table that are ids or projected vectors. ``item_numbers``: number of
    numeric inputs in the item table. ``published_table``: the table whose rows are published, if any.
    """

    num_labels: int = 1
    num_dense: int = 0
    vectors: tuple[Vector, ...] = ()
    item_fields: int = 0
    item_numbers: int = 0
    published_table: str | None = None

    @property
    def columns(self) -> int:
        """Number of columns of a batch's numbers: numeric inputs and projected vectors."""
        return self.num_dense + sum(one.dim for one in self.vectors)

    @staticmethod
    def of(job: JobSpec, dataset: DatasetSpec) -> RowShape:
        """Return the shape of a job's rows on a dataset."""
        numbers = sum(one.type == "dense" for one in dataset.features.values()) if job.model.reads_numbers else 0
        return RowShape.made(
            len(dataset.labels),
            (numbers, dataset.num_item_numbers),
            vectors_of(dataset) if job.model.reads_vectors else (),
            dataset.joined_features.keys() - dataset.features.keys(),
            None if job.publish is None else dataset.features[job.publish.feature].shares or job.publish.feature,
        )

    @staticmethod
    def made(
        num_labels: int,
        numbers: tuple[int, int],
        vectors: Sequence[Vector],
        item_ids: Collection[str],
        published_table: str | None = None,
    ) -> RowShape:
        """Return the shape for counted inputs.

        ``numbers``: (numeric features of the rows, numeric features of the item table). ``vectors``: vectors of both,
        projected or as given. ``item_ids``: names of the item table's features of ids.
        """
        projected = tuple(one for one in vectors if one.projected)
        return RowShape(
            num_labels,
            sum(numbers) + given_columns(vectors),
            projected,
            len(item_ids) + sum(one.of_item for one in projected),
            numbers[1] + given_columns(vectors, of_item=True),
            published_table,
        )
