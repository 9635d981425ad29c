"""FM: the factorization machine alone (Rendle, ICDM 2010)."""

from __future__ import annotations

from typing import Literal

from trainer.spec.models.base import OF_PRODUCTS, Init, PointwiseSpec
from trainer.spec.models.size import ModelSize


class FMSpec(PointwiseSpec):
    """Products of all pairs of vectors, and a weight for each id."""

    kind: Literal["fm"]
    reads_vectors = True
    adds_features = "own_rows"

    learns_products = "without_numbers"
    determines_vectors = True

    @property
    def default_init(self) -> Init:
        return OF_PRODUCTS

    def table_columns(self, table: str) -> int:
        return self.embedding_dim + 1

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim = self.embedding_dim
        fields = (num_features + num_dense) * dim
        return ModelSize(1 + num_dense + num_dense * dim, 0, fields + dim, fields, 2 * fields)
