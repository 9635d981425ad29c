"""Random Fourier features of item vectors: a fixed non-linear map of chosen dimension, whose inner product is a
Gaussian kernel of the vectors (Rahimi and Recht 2007; Xu et al., "Featurizing pretrained representations", section 5).

    phi(h) = m^{-1/2} [cos(u_1.h) .. cos(u_m.h), sin(u_1.h) .. sin(u_m.h)],    dim = 2m
    <phi(h), phi(h')>  ~  K(h - h') = exp(-sigma^2 |h - h'|^2 / 2)

``sigma`` is the standard deviation of the frequencies. Orthogonal frequencies (Yu et al. 2016) come in blocks of d:
rows of a random orthogonal matrix, each with the length of an independent d-dimensional normal vector (chi). At equal m
they err less than independent ones.

**The generator is pinned**, because a seed alone gives other bits in other builds of a library. Word j of
``normals(seed, stream, n)``: Philox4x32-10 with key (seed, crc32("evenkeel.rff")) and counter (j, 0, stream, 0) gives
words w0 .. w3; with a = ((w0 * 2^32 + w1) >> 11) + 0.5 and b = ((w2 * 2^32 + w3) >> 11) + 0.5, both over 2^53, normals
2j and 2j+1 are sqrt(-2 ln a) cos(2 pi b) and sqrt(-2 ln a) sin(2 pi b) (Box-Muller). Stream 0 gives the entries of the
Gaussian matrices row by row, block after block; stream 1 gives, in the same layout, the matrices whose row lengths are
the chi lengths. A block is orthogonalised by QR with the signs of R's diagonal made positive, which makes it unique. U
= sigma times that, rounded to float32. U is published with its sha256, and that is what consumers trust.
"""

from __future__ import annotations

import hashlib
import math
import warnings
import zlib
from dataclasses import dataclass

import numpy as np

from embeddings.philox import philox4x32
from embeddings.vectors import Array, chunks, unit_rows

FREQUENCIES = ("orthogonal", "gaussian")
DEFAULT_SIGMA = 0.4
_KEY = zlib.crc32(b"evenkeel.rff")


class RandomFourierFeatures:
    """phi of the module's formula, for vectors of ``dim_in`` coordinates.

    dim: output coordinates, even (2m). sigma > 0. seed: uint32. frequencies: "orthogonal" or "gaussian".
    Attributes: ``kind`` (that word), ``frequencies`` U [m, dim_in] (float32; float64 once a rotation is folded in),
    ``sha256`` of U's little-endian bytes. Warns where m < dim_in: such a view loses directions. Raises ValueError.
    """

    def __init__(
        self, dim_in: int, dim: int, sigma: float = DEFAULT_SIGMA, seed: int = 0, frequencies: str = "orthogonal"
    ):
        if dim_in < 1:
            raise ValueError(f"dim_in is {dim_in}, expected at least 1")
        if dim < 2 or dim % 2:
            raise ValueError(f"dim is {dim}: a cosine and a sine for each frequency make it even")
        if not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"sigma is {sigma}, expected a positive number")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed}, expected 0 <= seed < 2^32")
        if frequencies not in FREQUENCIES:
            raise ValueError(f"frequencies is '{frequencies}', expected one of {', '.join(FREQUENCIES)}")
        num_frequencies = dim // 2
        if num_frequencies < dim_in:
            warnings.warn(
                f"{num_frequencies} frequencies for vectors of {dim_in} coordinates: the view loses directions; "
                f"take dim >= {2 * dim_in}",
                stacklevel=2,
            )
        draw = _orthogonal if frequencies == "orthogonal" else _gaussian
        self._set(frequencies, sigma, seed, (sigma * draw(seed, num_frequencies, dim_in)).astype(np.float32))

    def _set(self, kind: str, sigma: float, seed: int, frequencies: Array) -> None:
        self.kind = kind
        self.sigma = float(sigma)
        self.seed = seed
        self.frequencies = frequencies
        self.sha256 = digest(frequencies)

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
        """The features of a published U [m, dim_in]. Raises ValueError where its bytes are not those of ``sha256``."""
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
        """Features U R^T, for which phi(h; U R^T) = phi(h R; U): a rotation at no cost at fetch. float64."""
        folded = self.frequencies.astype(np.float64) @ np.asarray(rotation, dtype=np.float64).T
        return self.from_frequencies(folded, sigma=self.sigma, seed=self.seed, kind=self.kind)

    def transform(self, h: Array) -> Array:
        """phi of each row of ``h`` [n, dim_in], float32 [n, dim]. Rows are unit-normalised first (the kernel is one of
        directions); each row of phi then has norm 1 and coordinates of at most m^{-1/2}. A zero row, which has no
        direction, gives a zero row. Raises ValueError for other shapes and for rows that are not finite."""
        h = np.asarray(h)
        if h.ndim != 2 or h.shape[1] != self.dim_in:
            raise ValueError(f"vectors have shape {h.shape}, expected [n, {self.dim_in}]")
        num_frequencies = len(self.frequencies)
        directions_of_u = np.ascontiguousarray(self.frequencies.T)
        scale = self.frequencies.dtype.type(1.0 / math.sqrt(num_frequencies))
        phi = np.empty((len(h), self.dim), dtype=np.float32)
        for part in chunks(len(h)):
            directions, empty = _directions(h[part], directions_of_u.dtype)
            angles = directions @ directions_of_u
            np.cos(angles, out=phi[part, :num_frequencies], casting="same_kind")
            np.sin(angles, out=phi[part, num_frequencies:], casting="same_kind")
            phi[part] *= np.float32(scale)
            if len(empty):
                phi[part.start + empty] = 0.0
        return phi


def _directions(rows: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """(unit rows in ``dtype``, indices of zero rows). The quick way for float32 rows of ordinary size, else by
    scaling."""
    if rows.dtype == np.float32 and dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("nd,nd->n", rows, rows)
        if bool(np.all((squares > 1e-20) & (squares < 1e20))):
            return rows * (np.float32(1.0) / np.sqrt(squares))[:, None], np.empty(0, dtype=np.int64)
    directions, norms = unit_rows(rows)
    if not np.isfinite(directions).all():
        raise ValueError("a vector is not finite: there is no feature of it")
    return directions.astype(dtype, copy=False), np.flatnonzero(norms == 0)


def digest(frequencies: Array) -> str:
    """sha256 of the array's values, row by row, little-endian."""
    little = np.ascontiguousarray(frequencies, dtype=frequencies.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()


# --- the pinned generator --------------------------------------------------------------------------------------------


def normals(seed: int, stream: int, count: int) -> Array:
    """``count`` standard normals, float64, by the generator that the module's text fixes."""
    num_pairs = (count + 1) // 2
    words = philox4x32((np.arange(num_pairs), 0, stream, 0), (seed, _KEY))
    first, second = (
        ((high << np.uint64(32) | low) >> np.uint64(11)).astype(np.float64)
        for high, low in ((words[0], words[1]), (words[2], words[3]))
    )
    radius = np.sqrt(-2.0 * np.log((first + 0.5) * 2.0**-53))
    angle = 2.0 * np.pi * ((second + 0.5) * 2.0**-53)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(-1)[:count]


def _gaussian(seed: int, num_frequencies: int, dim_in: int) -> Array:
    return normals(seed, 0, num_frequencies * dim_in).reshape(num_frequencies, dim_in)


def _orthogonal(seed: int, num_frequencies: int, dim_in: int) -> Array:
    num_blocks = -(-num_frequencies // dim_in)
    shape = (num_blocks, dim_in, dim_in)
    gaussian = normals(seed, 0, math.prod(shape)).reshape(shape)
    lengths = np.linalg.norm(normals(seed, 1, math.prod(shape)).reshape(shape), axis=2)
    # QR of the transpose orthogonalises the rows; positive diagonals make the result the only one there is.
    basis, triangle = np.linalg.qr(np.swapaxes(gaussian, 1, 2))
    signs = np.where(np.diagonal(triangle, axis1=1, axis2=2) < 0, -1.0, 1.0)
    rows = np.swapaxes(basis * signs[:, None, :], 1, 2) * lengths[:, :, None]
    return rows.reshape(-1, dim_in)[:num_frequencies]


# --- how many --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DimChoice:
    """What ``dim_for`` found. ``dim`` is the smallest power-of-two multiple tried that reached ``epsilon`` (None: none
    did). ``max_errors``, ``rms_errors``: measured at each dim tried. ``kernel_spread``: standard deviation of K over
    the pairs; an rms error means little until it is small against that. ``bound_dim``: what equation A.6 asks for."""

    dim: int | None
    epsilon: float
    max_errors: dict[int, float]
    rms_errors: dict[int, float]
    kernel_spread: float
    bound_dim: int


def bound_dim(epsilon: float, dim_in: int, sigma: float, failure_probability: float = 0.05) -> int:
    """Output dim 2m at which the printed bound A.6 of Xu et al. promises a kernel error below ``epsilon`` everywhere:
    2^8 (sigma_Q d_A / epsilon) exp(-m epsilon^2 / (4 (d + 2))) = failure_probability, sigma_Q = sigma sqrt(d), the root
    of the second moment of u, and d_A = 2 the diameter of the unit sphere. It is far above what is needed."""
    ratio = 2**8 * sigma * math.sqrt(dim_in) * 2.0 / (epsilon * failure_probability)
    return 2 * math.ceil(4 * (dim_in + 2) / epsilon**2 * math.log(ratio))


def dim_for(
    epsilon: float,
    vectors: Array,
    *,
    sigma: float = DEFAULT_SIGMA,
    seed: int = 0,
    frequencies: str = "orthogonal",
    num_sampled: int = 512,
    max_dim: int = 65_536,
) -> DimChoice:
    """The dim at which the largest kernel error over all pairs of ``num_sampled`` of the user's own vectors [n, d]
    (zero rows left out) is at most ``epsilon``, tried at 2d, 4d, 8d, ... Raises ValueError for epsilon outside (0,
    1)."""
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}, expected a kernel error between 0 and 1")
    directions, norms = unit_rows(np.asarray(vectors))
    directions = directions[np.isfinite(norms) & (norms > 0)]
    if len(directions) < 2:
        raise ValueError("at least two vectors with a direction are needed to measure a kernel error")
    generator = np.random.Generator(np.random.Philox(seed))
    if len(directions) > num_sampled:
        directions = directions[np.sort(generator.choice(len(directions), num_sampled, replace=False))]
    pairs = np.triu_indices(len(directions), 1)
    exact = np.exp(-(sigma**2) * (1.0 - np.clip(directions @ directions.T, -1, 1)))[pairs]
    dim_in = directions.shape[1]
    max_errors: dict[int, float] = {}
    rms_errors: dict[int, float] = {}
    chosen = None
    dim = 2 * dim_in
    while dim <= max_dim and chosen is None:
        phi = RandomFourierFeatures(dim_in, dim, sigma, seed, frequencies).transform(directions).astype(np.float64)
        errors = (phi @ phi.T)[pairs] - exact
        max_errors[dim] = float(np.abs(errors).max())
        rms_errors[dim] = float(np.sqrt(np.mean(errors**2)))
        if max_errors[dim] <= epsilon:
            chosen = dim
        dim *= 2
    return DimChoice(chosen, epsilon, max_errors, rms_errors, float(exact.std()), bound_dim(epsilon, dim_in, sigma))
