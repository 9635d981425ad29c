"""DNN, Wide & Deep, DeepFM, FM: a tower, a linear part, a factorization machine, alone or side by side."""

from __future__ import annotations

from typing import Literal

from trainer.spec.models.base import OF_PRODUCTS, ClickSpec, FirstOrderSpec, Init, PointwiseSpec
from trainer.spec.models.size import ModelSize


class DNNSpec(ClickSpec):
    """The plain deep CTR model: all vectors and numbers side by side into a tower."""

    kind: Literal["dnn"]
    reads_vectors = True


class WideDeepSpec(FirstOrderSpec):
    """A linear model of ids and numbers, added to the tower (Cheng et al., DLRS 2016)."""

    kind: Literal["wide_deep"]
    reads_vectors = True


class DeepFMSpec(FirstOrderSpec):
    """A factorization machine added to the tower (Guo et al., IJCAI 2017)."""

    kind: Literal["deepfm"]
    reads_vectors = True

    @property
    def default_init(self) -> Init:
        # From zeros its products begin to learn only once the tower has moved the vectors apart
        # (docs/reports/ctr_libraries.md has the figures).
        return Init(kind="hash", std=0.02)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        fields = num_features * self.embedding_dim
        machine = ModelSize(interaction=fields + self.embedding_dim, widest=fields, multiply_adds=2 * fields)
        return super().size(num_features, num_dense=num_dense) + machine


class FMSpec(PointwiseSpec):
    """Products of all pairs of vectors, and a weight for each id."""

    kind: Literal["fm"]
    reads_vectors = True
    adds_features = "own_rows"

    multiplies_rows = "without_numbers"
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
