"""DLRM: dot products of all pairs of vectors (Naumov et al., 2019)."""

from __future__ import annotations

from typing import Literal

from trainer.spec.models.base import OF_PRODUCTS, ClickSpec, Init
from trainer.spec.models.size import ModelSize


class DLRMSpec(ClickSpec):
    """DLRM: ``hidden`` layers both below the products, on the numeric features, and above them."""

    kind: Literal["dlrm"]
    reads_vectors = True

    learns_products = "without_numbers"

    def learns_from_padding(self, has_numbers: bool) -> bool:
        return has_numbers  # by the products with their vector

    @property
    def default_init(self) -> Init:
        return OF_PRODUCTS

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim, vectors = self.embedding_dim, num_features + bool(num_dense)
        pairs = vectors * (vectors - 1) // 2
        square = vectors * vectors
        size = ModelSize(0, num_features * dim, square + vectors * dim, square, square * dim)
        if num_dense:
            size += self.tower(num_dense, dim, logits=False)
        return size + self.tower(pairs + (dim if num_dense else 0), 1)
