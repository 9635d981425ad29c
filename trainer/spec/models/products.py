"""PNN, DLRM, DCN-V2, xDeepFM: products of vectors below, above or beside a tower.

Qu et al., ICDM 2016; Naumov et al., 2019; Wang et al., WWW 2021; Lian et al., KDD 2018.
"""

from __future__ import annotations

import itertools
from typing import Literal

from trainer.spec.base import later
from trainer.spec.models.base import OF_PRODUCTS, ClickSpec, FirstOrderSpec, Init, Units
from trainer.spec.models.size import ModelSize


class PNNSpec(ClickSpec):
    """IPNN: a tower over all vectors, all numbers, and the inner product of each pair of vectors."""

    kind: Literal["pnn"]
    reads_vectors = True

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        fields, square = num_features * self.embedding_dim, num_features * num_features
        products = ModelSize(0, 0, square + fields, square, square * self.embedding_dim)
        return products + self.tower(fields + num_dense + (square - num_features) // 2, 1)


class DLRMSpec(ClickSpec):
    """DLRM: ``hidden`` layers both below the products, on the numeric features, and above them."""

    kind: Literal["dlrm"]
    reads_vectors = True

    multiplies_rows = "without_numbers"

    def learns_from_padding(self, has_numbers: bool) -> bool:
        return has_numbers  # the numbers' vector is multiplied with the rows

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


class DCNv2Spec(ClickSpec):
    """DCN-V2: ``cross_layers`` cross layers before (``stacked``) or beside (``parallel``) the tower.

    The cross layers' matrices have rank ``low_rank``; without it they are full matrices.
    """

    kind: Literal["dcnv2"]
    reads_vectors = True
    structure: Literal["stacked", "parallel"] = later("stacked")
    cross_layers: int = later(2, ge=1, le=64)
    low_rank: int | None = later(None, ge=1, le=4096)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        width, rank = num_features * self.embedding_dim + num_dense, self.low_rank
        weights = width * width if rank is None else 2 * width * rank
        size = ModelSize()
        for _ in range(self.cross_layers):
            size += ModelSize(weights + width, 0, 3 * width + (rank or 0), 3 * width, weights + width)
        if self.structure == "stacked":
            return size + self.tower(width, 1)
        output = width + [width, *self.hidden][-1]
        return size + self.tower(width, logits=False) + ModelSize(output + 1, 0, output, output, output)


class XDeepFMSpec(FirstOrderSpec):
    """xDeepFM. ``cin_layers``: number of feature maps of each layer of the CIN."""

    kind: Literal["xdeepfm"]
    reads_vectors = True
    cin_layers: Units = later((100, 100), min_length=1, max_length=16)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        return super().size(num_features, num_dense=num_dense) + self._cin(num_features)

    def _cin(self, num_fields: int) -> ModelSize:
        dim, maps = self.embedding_dim, self.cin_layers
        size = ModelSize(parameters=sum(maps))
        *inner, last = itertools.pairwise([num_fields, *maps])
        for before, after in inner:
            products = before * num_fields
            held = dim * (products + after)
            size += ModelSize(after * products, 0, held, 2 * held, dim * after * products)
        # The last layer keeps only its sums over columns.
        before, after = last
        products = before * num_fields
        held = products + after
        return size + ModelSize(after * products, 0, held, 2 * held + dim * before, (dim + after) * products)
