"""PNN: a product-based neural network with inner products (Qu et al., ICDM 2016)."""

from __future__ import annotations

from typing import Literal

from trainer.spec.models.base import ClickSpec
from trainer.spec.models.size import ModelSize


class PNNSpec(ClickSpec):
    """IPNN: a tower over all vectors, all numbers, and the inner product of each pair of vectors."""

    kind: Literal["pnn"]
    reads_vectors = True

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        fields, square = num_features * self.embedding_dim, num_features * num_features
        products = ModelSize(0, 0, square + fields, square, square * self.embedding_dim)
        return products + self.tower(fields + num_dense + (square - num_features) // 2, 1)
