"""Two towers: a tower over user and context against the item's own row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from trainer.spec.models.base import OF_PRODUCTS, Init, TowerSpec, pair_fit_problems
from trainer.spec.models.size import ModelSize
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class TwoTowerSpec(TowerSpec):
    """Two towers. ``loss``: bce or mse of a label, or sampled_softmax over the items of the batch."""

    kind: Literal["two_tower"]

    losses = ("bce", "mse", "sampled_softmax")
    publishes = True
    ranks_all_items = True
    has_dynamic_tables = True
    has_context = True

    @property
    def default_init(self) -> Init:
        return OF_PRODUCTS

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim = self.embedding_dim
        width = num_features * dim + num_dense
        return self.tower(width - dim, dim) + ModelSize(1, dim, 0, 0, dim)

    @property
    def is_softmax_of_batch(self) -> bool:
        return self.loss == "sampled_softmax"

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from pair_fit_problems(self.kind, dataset)
        joined = [name for name, one in dataset.features.items() if one.join is not None and one.join.on == "item"]
        if joined:
            yield FieldProblem(
                "model.kind", f"item-side features ({', '.join(joined)}) in two_tower are not available yet"
            )
        yield from super().fit_problems(job, dataset)
