"""Wukong: stacked factorization machines (Zhang et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from trainer.spec.base import later
from trainer.spec.models.base import ClickSpec, Layers
from trainer.spec.models.size import ModelSize, linear_layers
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec


class WukongSpec(ClickSpec):
    """Wukong: ``interaction_layers`` layers, each of which returns ``fm_vectors`` and ``linear_vectors`` vectors.

    ``fm_vectors`` come from an MLP of ``fm_hidden`` layers on pair products compressed to ``fm_rank``,
    ``linear_vectors`` from a linear compression.
    """

    kind: Literal["wukong"]
    reads_vectors = True
    adds_features = "none"
    counts_columns = "it normalises each vector over its columns"
    interaction_layers: int = later(2, ge=1, le=64)
    fm_vectors: int = later(16, ge=1, le=4096)
    linear_vectors: int = later(16, ge=1, le=4096)
    fm_rank: int = later(24, ge=1, le=4096)
    fm_hidden: Layers = later((128,), max_length=16)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim, rank, outputs = self.embedding_dim, self.fm_rank, self.fm_vectors + self.linear_vectors
        vectors = num_features + bool(num_dense)
        size = ModelSize(tower=vectors * dim)
        if num_dense:
            parameters, multiply_adds = linear_layers([num_dense, *self.hidden, dim])
            size += ModelSize(parameters, 0, num_dense + sum(self.hidden) + dim, 0, multiply_adds)
        for _ in range(self.interaction_layers):
            sizes = [vectors * rank, *self.fm_hidden, self.fm_vectors * dim]
            parameters, multiply_adds = linear_layers(sizes)
            linear = self.linear_vectors * vectors + (outputs * vectors if outputs != vectors else 0)
            parameters += linear + vectors * rank + 2 * vectors * rank + 2 * dim
            held = dim * rank + 2 * vectors * rank + sum(sizes) + 4 * outputs * dim
            size += ModelSize(parameters, 0, held, held, multiply_adds + (linear + 2 * vectors * rank) * dim)
            vectors = outputs
        return size + self.tower(vectors * dim, 1)

    def reads_in_order(self, num_vectors: int) -> bool:
        return num_vectors == self.fm_vectors + self.linear_vectors

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.embedding_dim < 2:
            yield FieldProblem(
                "model.embedding_dim",
                "wukong normalises each vector, which leaves nothing of a single column",
                "use 2 or more",
            )
