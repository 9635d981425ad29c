"""What a row has beside ids: labels, numbers, vectors; and what of it is the item table's. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.data.columns.vectors import Vector, given_columns, vectors_of
from trainer.spec import DatasetSpec, JobSpec


@dataclass(frozen=True)
class RowShape:
    """What sizes of models and batches follow from, beside the ids of an example.

    Attributes:
        num_labels: labels of a row, which models of several have towers for.
        num_dense: numbers that a model reads, vectors as given among them.
        vectors: projected ones.
        item_fields: how many features of ids and projected vectors are of the item table.
        item_numbers: how many of the numbers are.
        published_table: the table whose rows are published, if any.
    """

    num_labels: int = 1
    num_dense: int = 0
    vectors: tuple[Vector, ...] = ()
    item_fields: int = 0
    item_numbers: int = 0
    published_table: str | None = None

    @property
    def columns(self) -> int:
        """Numbers of an example in a batch."""
        return self.num_dense + sum(one.dim for one in self.vectors)

    @staticmethod
    def of(job: JobSpec, dataset: DatasetSpec) -> RowShape:
        """Return that of a job on a dataset."""
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
        """Return that of so many numbers of the rows and of the item table; ``item_ids``: the latter's ids."""
        projected = tuple(one for one in vectors if one.projected)
        return RowShape(
            num_labels,
            sum(numbers) + given_columns(vectors),
            projected,
            len(item_ids) + sum(one.of_item for one in projected),
            numbers[1] + given_columns(vectors, of_item=True),
            published_table,
        )
