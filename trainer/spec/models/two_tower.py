"""Two towers: a tower over user and context against the item's own row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from trainer.spec.evaluation import ranking_parts
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
    has_distances = True

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

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.loss != "bce" and "label" in job.sse and job.sse["label"].probability:
            yield FieldProblem("sse.label", f"{self.loss} has no class labels to flip", "leave it out, or use loss bce")

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from pair_fit_problems(self.kind, dataset)
        joined = [name for name, one in dataset.features.items() if one.join is not None and one.join.on == "item"]
        if joined:
            yield FieldProblem(
                "model.kind", f"item-side features ({', '.join(joined)}) in two_tower are not available yet"
            )
        yield from super().fit_problems(job, dataset)
        others = sorted(set(dataset.features) - {"user", "item"})
        if others and any(ranking_parts(name) is not None for name in job.evaluation.metrics):
            yield FieldProblem(
                "evaluation.metrics",
                "two_tower ranks all items for a user only where its features are user and item",
                f"leave {', '.join(others)} out of the dataset, or use metrics without ranking",
            )
        if job.publish is not None and job.publish.frozen_context is not None:
            yield from _frozen_context_problems(job.publish.feature, dataset)


def _frozen_context_problems(items: str, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the features whose rows cannot be frozen while those of ``items`` are trained."""
    if items not in dataset.features:
        return
    table = dataset.features[items].shares or items
    for name, feature in dataset.features.items():
        if name != items and (feature.shares or name) == table:
            yield FieldProblem(
                "publish.frozen_context",
                f"'{name}' reads rows of '{items}', which are trained",
                "give it a table of its own",
            )
        if feature.type == "id_list" and feature.pooling == "mean":
            yield FieldProblem(
                "publish.frozen_context",
                f"a mean over '{name}' mixes frozen and trained rows",
                "use pooling sum, or the anchor",
            )
