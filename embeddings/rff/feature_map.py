"""Interface of a feature map: the definition of a view, the published matrix, and the map itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from embeddings.vectors.lazy_rows import Array


@dataclass(frozen=True)
class MapParameters:
    """Parameters of a view's feature map; a parameter that this kind of map does not use is None.

    ``sigma`` is a positive scale, ``seed`` a uint32, and ``frequencies`` one of ``FREQUENCIES``.
    """

    dim_in: int
    dim: int
    sigma: float | None
    seed: int | None
    frequencies: str | None


class FeatureMap(ABC):
    """A fixed map of item vectors; ``matrix`` is the result of ``draw`` at the creation of its view."""

    computes: ClassVar[bool] = True
    """False for the identity: vectors are served as they are, and the view stores no rows."""
    reads_items: ClassVar[bool] = False
    """True if the matrix has a version's vectors of fixed items, the anchors; ``draw`` is not used then."""

    def __init__(self, parameters: MapParameters, matrix: Array | None):
        self.parameters = parameters
        self.matrix = matrix

    @classmethod
    def define(
        cls, dim_in: int, *, dim: int | None, sigma: float | None, seed: int | None, frequencies: str | None
    ) -> MapParameters:
        """Return the parameters of a new view; ``dim`` None: the dim of the vectors.

        Raises:
            ValueError: a parameter is out of its range.
        """
        return MapParameters(dim_in, dim_in if dim is None else dim, sigma, seed, frequencies)

    @classmethod
    def draw(cls, parameters: MapParameters) -> Array | None:
        """Return the matrix [m, n] that is published with a new view and its sha256, None for a map without one."""
        return None

    @classmethod
    def load(cls, parameters: MapParameters, matrix: Array | None) -> FeatureMap:
        """Return the map of a published view."""
        return cls(parameters, matrix)

    @abstractmethod
    def transform(self, h: Array) -> Array:
        """Return the features float32 [n, dim] of vectors ``h`` [n, dim_in]; a zero row (missing) stays zero."""


class Identity(FeatureMap):
    """The map of views of kind ``identity``: vectors served as they were published."""

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
