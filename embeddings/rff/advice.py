"""Advice on a view's dim and sigma, measured on the user's own vectors and compared with a theoretical bound.

K(h, h') = exp(-sigma^2 |h - h'|^2 / 2) is the kernel that features approximate. Two numbers decide whether they can:
the error of phi's inner products against K, which depends on dim, and the variation of K between pairs of items (its
*spread*), which depends on sigma. The error must be small against the spread.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from embeddings.rff.features import DEFAULT_SIGMA
from embeddings.rff.frequencies import draw_frequencies
from embeddings.vectors.item_vectors import Array, unit_rows
from embeddings.vectors.lazy_rows import Rows, Vectors

SAMPLED_ROWS = 512
MAX_DIM = 16_384
MIN_TRIED = 4
MIN_EPSILON = 1e-6
"""Smallest kernel error to ask for: the rounding error of an inner product of float32 features."""
# A spread below this is lost in the rounding of float16, and under it two items look alike to most consumers.
TINY_SPREAD = 0.005
NOISY = 0.5


@dataclass(frozen=True)
class Kernel:
    """K over all pairs of the sampled vectors: its mean and its standard deviation."""

    mean: float
    spread: float


@dataclass(frozen=True)
class DimChoice:
    """The dims that ``dim_for`` found.

    Attributes:
        dim: the smallest dim tried whose largest kernel error is at most ``epsilon`` (None: none is).
        rms_dim: the same for the root mean square error.
        max_errors, rms_errors: kernel errors at each dim tried.
        bound_dim: dim that equation A.6 of Xu et al. requires (:func:`bound_dim`).
    """

    dim: int | None
    rms_dim: int | None
    epsilon: float
    max_errors: dict[int, float]
    rms_errors: dict[int, float]
    kernel: Kernel
    bound_dim: int
    num_vectors: int

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for JSON: errors as a list of {dim, max_error, rms_error, rms_error_over_spread}."""
        plain = asdict(self)
        del plain["max_errors"], plain["rms_errors"]
        plain["measured"] = [
            {
                "dim": dim,
                "max_error": largest,
                "rms_error": self.rms_errors[dim],
                "rms_error_over_spread": self.rms_errors[dim] / self.kernel.spread if self.kernel.spread else None,
            }
            for dim, largest in self.max_errors.items()
        ]
        return plain


def bound_dim(epsilon: float, dim_in: int, sigma: float, failure_probability: float = 0.05) -> int:
    """Return the output dim 2m at which a published bound guarantees a kernel error below ``epsilon`` everywhere.

    The bound is equation A.6 of Xu et al., "Some Practical Concerns and Solutions for Using Pretrained Representation
    in Industrial Systems": 2^8 (sigma_Q d_A / epsilon) exp(-m epsilon^2 / (4 (d + 2))) = failure_probability, sigma_Q =
    sigma sqrt(d), the root of the second moment of u, and d_A = 2 the diameter of the unit sphere. The bound is far
    above what is needed.
    """
    ratio = 2**8 * sigma * math.sqrt(dim_in) * 2.0 / (epsilon * failure_probability)
    return 2 * max(math.ceil(4 * (dim_in + 2) / epsilon**2 * math.log(ratio)), 1)


def dim_for(
    epsilon: float,
    vectors: Vectors,
    *,
    sigma: float = DEFAULT_SIGMA,
    seed: int = 0,
    frequencies: str = "orthogonal",
    num_sampled: int = SAMPLED_ROWS,
    max_dim: int = MAX_DIM,
) -> DimChoice:
    """Find the smallest dim at which the largest kernel error on the user's own vectors is at most ``epsilon``.

    Multiples of 2d are tried, in growing steps. Errors are measured over all pairs of the sampled vectors, with the
    same frequencies as a view with this seed. Zero rows of ``vectors`` [n, d] are left out.

    Raises:
        ValueError: epsilon outside [MIN_EPSILON, 1), or fewer than two vectors.
    """
    if not MIN_EPSILON <= epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}, expected a kernel error between {MIN_EPSILON:g} and 1")
    directions = _directions(vectors, num_sampled)
    if len(directions) < 2:
        raise ValueError("at least two vectors with a direction are needed to measure a kernel error")
    pairs, exact = _pairs(directions, sigma)
    dim_in = directions.shape[1]
    measured = _Measured(directions, pairs, exact, sigma, seed, frequencies)
    max_errors: dict[int, float] = {}
    rms_errors: dict[int, float] = {}
    num_blocks = 1
    while (dim := 2 * dim_in * num_blocks) <= max(max_dim, 2 * dim_in):
        max_errors[dim], rms_errors[dim] = measured.errors(dim // 2)
        if max_errors[dim] <= epsilon and len(max_errors) >= MIN_TRIED:
            break
        num_blocks = max(num_blocks + 1, num_blocks * 5 // 4)
    return DimChoice(
        next((dim for dim, error in max_errors.items() if error <= epsilon), None),
        next((dim for dim, error in rms_errors.items() if error <= epsilon), None),
        epsilon,
        max_errors,
        rms_errors,
        Kernel(float(exact.mean()), float(exact.std())),
        bound_dim(epsilon, dim_in, sigma),
        len(directions),
    )


def warnings_of(
    dim_in: int,
    dim: int,
    sigma: float = DEFAULT_SIGMA,
    seed: int = 0,
    frequencies: str = "orthogonal",
    vectors: Vectors | None = None,
    drawn: Array | None = None,
    num_sampled: int = 256,
) -> list[dict[str, str]]:
    """Return advice for the consumers of a view, as {code, message, remedy}.

    The codes are ``few-frequencies`` if m < d, ``standardise`` always, and ``narrow-kernel`` and ``noisy`` as measured
    on ``vectors`` [n, d], if given. ``drawn`` is the view's U, if it exists already.
    """
    num_frequencies = dim // 2
    warnings = []
    if num_frequencies < dim_in:
        warnings.append(
            _warning(
                "few-frequencies",
                f"{num_frequencies} frequencies for vectors of {dim_in} coordinates: the view loses directions",
                f"take dim >= {2 * dim_in}",
            )
        )
    if vectors is not None and len(directions := _directions(vectors, num_sampled)) >= 2:
        pairs, exact = _pairs(directions, sigma)
        spread = float(exact.std())
        measured = _Measured(directions, pairs, exact, sigma, seed, frequencies)
        if drawn is not None:
            measured.frequencies = drawn
        rms = measured.errors(num_frequencies)[1]
        if spread < TINY_SPREAD:
            remedy = "raise sigma" if exact.mean() > 0.5 else "lower sigma"
            warnings.append(
                _warning(
                    "narrow-kernel",
                    f"at sigma {sigma:g} the kernel of two items is {exact.mean():.4f} with a spread of {spread:.2g}: "
                    "to this view nearly all pairs look alike",
                    remedy,
                )
            )
        elif rms > NOISY * spread:
            warnings.append(
                _warning(
                    "noisy",
                    f"the rms kernel error is {rms:.2g} where the kernel itself spreads by {spread:.2g}",
                    "take a larger dim, or orthogonal frequencies",
                )
            )
    warnings.append(
        _warning(
            "standardise",
            f"coordinates are at most 1/sqrt(m) = {1 / math.sqrt(num_frequencies):.3g}: "
            "an L2 penalty that was tuned on other features is too strong",
            "standardise the features, or tune the penalty again",
        )
    )
    return warnings


def _warning(code: str, message: str, remedy: str) -> dict[str, str]:
    return {"code": code, "message": message, "remedy": remedy}


# --- measuring -------------------------------------------------------------------------------------------------------


def _directions(vectors: Vectors, num_sampled: int) -> Array:
    """Return at most ``num_sampled`` unit rows, float64 [k, d], evenly spaced by row number; zero rows are left out."""
    if not isinstance(vectors, Rows):
        vectors = np.asarray(vectors)
    # Zero rows are rare: with twice the rows asked for, enough remain after zero rows are left out.
    rows = np.unique(np.linspace(0, len(vectors) - 1, min(len(vectors), 2 * num_sampled)).astype(np.int64))
    directions, norms = unit_rows(vectors[rows])
    directions = directions[np.isfinite(norms) & (norms > 0)]
    if len(directions) > num_sampled:
        directions = directions[np.linspace(0, len(directions) - 1, num_sampled).astype(np.int64)]
    return directions


def _pairs(directions: Array, sigma: float) -> tuple[Any, Array]:
    """Return (indices of all pairs, K of each pair)."""
    pairs = np.triu_indices(len(directions), 1)
    exact = np.exp(-(sigma**2) * (1.0 - np.clip(directions @ directions.T, -1, 1)))[pairs]
    return pairs, exact


class _Measured:
    """Kernel errors at growing numbers of frequencies, each added once: the first m are the same at every dim."""

    def __init__(self, directions: Array, pairs: Any, exact: Array, sigma: float, seed: int, kind: str):
        self._directions = directions.astype(np.float32)
        self._pairs, self._exact = pairs, exact
        self._drawn = (sigma, seed, kind)
        self.frequencies = np.empty((0, directions.shape[1]), dtype=np.float32)
        self._gram = np.zeros((len(directions), len(directions)))
        self._num_summed = 0

    def errors(self, num_frequencies: int) -> tuple[float, float]:
        """Return the (largest, root mean square) error with the first ``num_frequencies``, no fewer than before."""
        if num_frequencies > len(self.frequencies):
            num_drawn = max(num_frequencies, 2 * len(self.frequencies))
            self.frequencies = draw_frequencies(self._directions.shape[1], 2 * num_drawn, *self._drawn)
        for start in range(self._num_summed, num_frequencies, 1024):
            angles = self._directions @ self.frequencies[start : min(start + 1024, num_frequencies)].T
            for part in (np.cos(angles), np.sin(angles)):
                self._gram += part @ part.T
        self._num_summed = num_frequencies
        errors = (self._gram / num_frequencies)[self._pairs] - self._exact
        return float(np.abs(errors).max()), float(np.sqrt(np.mean(errors**2)))
