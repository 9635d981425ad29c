"""Exponential vectors of item vectors (Xu et al., "Some Practical Concerns and Solutions", section 4.3).

    e(h) = [exp(<h, a_1>) .. exp(<h, a_m>)]

h and the a_i are unit vectors of items of one training. If the anchors are a regression's training items, e(h) are its
Nadaraya-Watson weights, up to normalisation. A rotation of all vectors does not change them.

The anchors a_i of a view are items, the most frequent items when the view is made. Each version uses its own vectors of
the anchors, so consumers need neither an alignment nor a map to read another training.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from embeddings.rff.feature_map import FeatureMap, MapParameters
from embeddings.vectors.item_vectors import Array, unit_rows

DEFAULT_DIM = 256


def exponential(vectors: Array, anchors: Array) -> Array:
    """Return e(h) [n, m] of the rows of ``vectors`` [n, d], for the rows of ``anchors`` [m, d]."""
    return np.asarray(np.exp(unit_rows(vectors)[0] @ unit_rows(anchors)[0].T))


class ExponentialVectors(FeatureMap):
    """The map of views of kind ``exponential``; its matrix has a version's vectors of the anchors, [m, d].

    The coordinate of an anchor that the version does not have is 1.
    """

    reads_items: ClassVar[bool] = True

    @classmethod
    def define(
        cls, dim_in: int, *, dim: int | None, sigma: float | None, seed: int | None, frequencies: str | None
    ) -> MapParameters:
        """Return the parameters of a new view; ``dim`` is the number of anchors, ``DEFAULT_DIM`` if left out."""
        return MapParameters(dim_in, DEFAULT_DIM if dim is None else dim, None, None, None)

    def transform(self, h: Array) -> Array:
        h = np.asarray(h)
        assert self.matrix is not None
        features = exponential(h, self.matrix).astype(np.float32)
        features[~h.any(axis=1)] = 0.0
        return features
