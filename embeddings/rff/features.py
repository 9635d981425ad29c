"""Random Fourier features of item vectors: a fixed non-linear map whose inner product is a Gaussian kernel.

The user chooses the output dimension (Rahimi and Recht 2007; Xu et al., "Some Practical Concerns and Solutions for
Using Pretrained Representation in Industrial Systems", section 5).

    phi(h) = m^{-1/2} [cos(u_1.h) .. cos(u_m.h), sin(u_1.h) .. sin(u_m.h)],    dim = 2m
    <phi(h), phi(h')>  ~  K(h - h') = exp(-sigma^2 |h - h'|^2 / 2)

``sigma`` is the standard deviation of the frequencies u. Orthogonal frequencies come in blocks of d with the lengths of
independent normal vectors; at equal m they err less than independent frequencies. Structured frequencies are
orthogonal, equally long, and made of signs. U is drawn by a documented recipe (:mod:`embeddings.rff.frequencies`) and
published with its sha256, which consumers check. :mod:`embeddings.rff.advice` helps to choose dim and sigma.
"""

from __future__ import annotations

import hashlib
import math
import warnings

import numpy as np

from embeddings.rff.feature_map import FeatureMap, MapParameters
from embeddings.rff.frequencies import draw_frequencies
from embeddings.vectors.item_vectors import CHUNK_ROWS, Array, chunks, unit_rows

DEFAULT_SIGMA = 0.4
# Angles computed at a time, to stay in the second-level cache: 2048 rows for m = 64, fewer for larger m.
_CHUNK_ANGLES = 2048 * 64
_MIN_CHUNK_ROWS = 64


class RandomFourierFeatures(FeatureMap):
    """phi of the module's formula, for vectors of ``dim_in`` coordinates.

    Warns if m < dim_in, since such features lose directions.

    Args:
        dim_in: coordinates of the vectors.
        dim: output coordinates, even (2m).
        sigma: standard deviation of the frequencies, > 0.
        seed: uint32.
        frequencies: one of ``FREQUENCIES``.

    Attributes:
        kind: the argument ``frequencies``.
        frequencies: U [m, dim_in] (float32; float64 once a rotation is folded in).
        sha256: of U's little-endian bytes.

    Raises:
        ValueError: an argument outside these bounds.

    Example:
        >>> import numpy as np
        >>> from embeddings.rff import RandomFourierFeatures
        >>> features = RandomFourierFeatures(dim_in=16, dim=512, sigma=1.0)
        >>> vectors = np.eye(16, dtype=np.float32)[:2]  # two unit vectors at a right angle
        >>> phi = features.transform(vectors)
        >>> phi.shape
        (2, 512)
        >>> bool(abs(phi[0] @ phi[1] - np.exp(-1)) < 0.05)  # the kernel exp(-sigma^2 |h - h'|^2 / 2), |h - h'|^2 = 2
        True
    """

    def __init__(
        self, dim_in: int, dim: int, sigma: float = DEFAULT_SIGMA, seed: int = 0, frequencies: str = "orthogonal"
    ):
        drawn = draw_frequencies(dim_in, dim, sigma, seed, frequencies)
        if len(drawn) < dim_in:
            warnings.warn(
                f"{len(drawn)} frequencies for vectors of {dim_in} coordinates: the view loses directions; "
                f"take dim >= {2 * dim_in}",
                stacklevel=2,
            )
        self._set(frequencies, sigma, seed, drawn)

    @classmethod
    def define(
        cls, dim_in: int, *, dim: int | None, sigma: float | None, seed: int | None, frequencies: str | None
    ) -> MapParameters:
        """Return the parameters of a new view; ``dim`` is 2 dim_in if left out."""
        sigma = DEFAULT_SIGMA if sigma is None else float(sigma)
        return MapParameters(dim_in, 2 * dim_in if dim is None else dim, sigma, seed, frequencies)

    @classmethod
    def draw(cls, parameters: MapParameters) -> Array:
        """Return U, float32 [dim / 2, dim_in]."""
        return draw_frequencies(parameters.dim_in, parameters.dim, *_drawn_by(parameters))

    @classmethod
    def load(cls, parameters: MapParameters, matrix: Array | None) -> RandomFourierFeatures:
        """Return the features of a published view, whose U is ``matrix``."""
        assert matrix is not None
        sigma, seed, frequencies = _drawn_by(parameters)
        return cls.from_frequencies(matrix, sigma=sigma, seed=seed, kind=frequencies)

    def _set(self, kind: str, sigma: float, seed: int, frequencies: Array) -> None:
        self.kind = kind
        self.sigma = float(sigma)
        self.seed = seed
        self.frequencies = frequencies
        self.sha256 = digest(frequencies)
        self._transposed = np.ascontiguousarray(frequencies.T)

    @classmethod
    def from_frequencies(
        cls,
        frequencies: Array,
        *,
        sigma: float = DEFAULT_SIGMA,
        seed: int = 0,
        kind: str = "orthogonal",
        sha256: str | None = None,
    ) -> RandomFourierFeatures:
        """Return the features of a published U [m, dim_in].

        Raises:
            ValueError: the bytes of U are not those of ``sha256``, or U has another dtype or shape.
        """
        frequencies = np.asarray(frequencies)
        if frequencies.ndim != 2 or frequencies.dtype not in (np.float32, np.float64):
            raise ValueError(
                f"frequencies are {frequencies.dtype} {frequencies.shape}: expected float32 or float64 [m, d]"
            )
        if sha256 is not None and digest(frequencies) != sha256:
            raise ValueError(
                f"the frequencies have sha256 {digest(frequencies)}, published was {sha256}: fetch them again"
            )
        features = cls.__new__(cls)
        features._set(kind, sigma, seed, frequencies)
        return features

    @property
    def dim_in(self) -> int:
        return int(self.frequencies.shape[1])

    @property
    def dim(self) -> int:
        return 2 * int(self.frequencies.shape[0])

    def fold(self, rotation: Array) -> RandomFourierFeatures:
        """Return features with frequencies U R^T, float64, so that phi(h; U R^T) = phi(h R; U) for a rotation R [d, d].

        Raises:
            ValueError: a rotation of another shape.
        """
        rotation = np.asarray(rotation, dtype=np.float64)
        if rotation.shape != (self.dim_in, self.dim_in):
            raise ValueError(f"the rotation has shape {rotation.shape}, the vectors {self.dim_in} coordinates")
        folded = self.frequencies.astype(np.float64) @ rotation.T
        return self.from_frequencies(folded, sigma=self.sigma, seed=self.seed, kind=self.kind)

    def transform(self, h: Array) -> Array:
        """Return phi of each row of ``h`` [n, dim_in], float32 [n, dim].

        Rows are unit-normalised first (the kernel is one of directions); each row of phi then has norm 1 and
        coordinates of at most m^{-1/2}. A zero row, which has no direction, gives a zero row.

        Raises:
            ValueError: other shapes, or rows that are not finite.
        """
        h = np.asarray(h)
        if h.ndim != 2 or h.shape[1] != self.dim_in:
            raise ValueError(f"vectors have shape {h.shape}, expected [n, {self.dim_in}]")
        num_frequencies = len(self.frequencies)
        dtype = self.frequencies.dtype
        scale = np.float32(1.0 / math.sqrt(num_frequencies))
        phi = np.empty((len(h), self.dim), dtype=np.float32)
        num_rows = min(max(_CHUNK_ANGLES // num_frequencies, _MIN_CHUNK_ROWS), CHUNK_ROWS)
        buffer = np.empty((min(num_rows, len(h)), num_frequencies), dtype=dtype)
        for part in chunks(len(h), num_rows):
            directions, empty = _directions(h[part], dtype)
            angles = np.matmul(directions, self._transposed, out=buffer[: len(directions)])
            out = phi[part]
            np.cos(angles, out=out[:, :num_frequencies], casting="same_kind")
            np.sin(angles, out=out[:, num_frequencies:], casting="same_kind")
            out *= scale
            if len(empty):
                out[empty] = 0.0
        return phi


def _drawn_by(parameters: MapParameters) -> tuple[float, int, str]:
    sigma, seed, frequencies = parameters.sigma, parameters.seed, parameters.frequencies
    assert sigma is not None
    assert seed is not None
    assert frequencies is not None
    return sigma, seed, frequencies


def _directions(rows: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """Return (unit rows in ``dtype``, indices of zero rows); rows whose squares do not fit float32 are scaled first."""
    if dtype != np.float32 or rows.dtype not in (np.float32, np.float16):
        return _scaled(rows, dtype)
    rows = rows.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        squares = np.einsum("nd,nd->n", rows, rows)
        odd = np.flatnonzero(~((squares > 1e-20) & (squares < 1e20)))
        directions = rows * (np.float32(1.0) / np.sqrt(squares))[:, None]
    if not len(odd):
        return directions, odd
    directions[odd], empty = _scaled(rows[odd], dtype)
    return directions, odd[empty]


def _scaled(rows: Array, dtype: np.dtype) -> tuple[Array, Array]:
    directions, norms = unit_rows(rows)
    if not np.isfinite(directions).all():
        raise ValueError("a vector is not finite, so it has no features")
    return directions.astype(dtype, copy=False), np.flatnonzero(norms == 0)


def digest(frequencies: Array) -> str:
    """Return the sha256 of the array's values, row by row, little-endian."""
    little = np.ascontiguousarray(frequencies, dtype=frequencies.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()
