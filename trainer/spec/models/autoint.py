"""AutoInt: self-attention over fields (Song et al., CIKM 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from trainer.spec.base import later
from trainer.spec.models.base import OF_PRODUCTS, ClickSpec, Init
from trainer.spec.models.size import ModelSize
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class AutoIntSpec(ClickSpec):
    """AutoInt: ``attention_layers`` layers of ``attention_heads`` heads with ``attention_units`` units each.

    ``hidden: []`` leaves the deep part out.
    """

    kind: Literal["autoint"]
    reads_vectors = True
    adds_features = "none"
    attention_layers: int = later(3, ge=1, le=16)
    attention_heads: int = later(2, ge=1, le=64)
    attention_units: int = later(32, ge=1, le=4096)

    @property
    def default_init(self) -> Init:
        return super().default_init if self.hidden else OF_PRODUCTS

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        fields, heads = num_features + num_dense, self.attention_heads
        width, units = self.embedding_dim, heads * self.attention_units
        size = ModelSize(parameters=num_dense * width, tower=fields * width)
        if self.hidden:
            size += self.tower(fields * width, 1)
        for _ in range(self.attention_layers):
            # Kept for backward: four projections, the outputs of attention, and the attention weights of pairs.
            held = fields * (width + 6 * units) + heads * fields * fields
            multiply_adds = 4 * fields * width * units + 2 * fields * fields * units
            size += ModelSize(4 * width * units, 0, held, held, multiply_adds)
            width = units
        return size + ModelSize(fields * units + (not self.hidden), 0, fields * units, 0, fields * units)

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from super().fit_problems(job, dataset)
        has_dense = any(feature.gives_numbers for feature in dataset.features.values())
        if not (has_dense or self.hidden) and self.effective_init.kind == "zero":
            yield FieldProblem(
                "model.init.kind",
                (
                    "zero gives autoint no gradient if no feature is dense and there is no deep part, because "
                    "ReLU has no gradient at 0"
                ),
                "use hash or normal, set model.hidden, or leave it out",
            )
