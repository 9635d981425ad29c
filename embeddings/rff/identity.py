"""The identity: vectors served as they were published."""

from __future__ import annotations

import numpy as np

from embeddings.rff.feature_map import FeatureMap, MapParameters
from embeddings.vectors.lazy_rows import Array


class Identity(FeatureMap):
    """The map of views of kind ``identity``."""

    computes = False

    @classmethod
    def define(
        cls, dim_in: int, *, dim: int | None, sigma: float | None, seed: int | None, frequencies: str | None
    ) -> MapParameters:
        if dim not in (None, dim_in):
            raise ValueError(f"an identity view has the collection's dim {dim_in}, not {dim}")
        return MapParameters(dim_in, dim_in, None, None, None)

    def transform(self, h: Array) -> Array:
        return np.asarray(h, dtype=np.float32)
