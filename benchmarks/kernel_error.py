"""How far inner products of random Fourier features are from their kernel: the figures of docs/views.md.

Two tables as Markdown: the smallest dim whose largest kernel error is within epsilon for 4000 random vectors of 32
coordinates, beside the dim that the printed bound asks for; and root mean square errors over pairs of 200 random unit
vectors by kind of frequencies, mean of 10 seeds. Nothing is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from embeddings.rff import RandomFourierFeatures
from embeddings.rff.advice import dim_for
from embeddings.vectors.item_vectors import Array, unit_rows
from trainer.report_pages.markdown import table_of

EPSILONS = ((0.4, 0.02), (1.0, 0.1))
"""(sigma, epsilon)."""
SHAPES = ((32, 32, 0.4), (32, 256, 0.4), (64, 64, 0.4), (50, 64, 0.4), (32, 32, 1.0), (32, 256, 1.0))
"""(d, m, sigma)."""
KINDS = ("orthogonal", "structured", "gaussian")


def dims(vectors: Array, cases: Sequence[tuple[float, float]] = EPSILONS) -> list[tuple[str, ...]]:
    """Return a line for each (sigma, epsilon): the dims, the spread of K, rms error / spread at dim 64."""
    lines = []
    for sigma, epsilon in cases:
        found = [dim_for(epsilon, vectors, sigma=sigma, frequencies=kind) for kind in ("orthogonal", "gaussian")]
        spread = found[0].kernel.spread
        shares = ", ".join(f"{one.rms_errors[64] / spread:.2f}" for one in found)
        dims_found = (f"{one.dim:,}" if one.dim else "none" for one in found)
        lines.append(
            (f"{sigma:g}", f"{epsilon:g}", *dims_found, f"{found[0].bound_dim:,}", f"{spread:.3f}", shares)
        )  # fmt: skip
    return lines


def rms_errors(
    dim_in: int, m: int, sigma: float, seeds: int = 10, num_rows: int = 200
) -> tuple[list[float], float]:  # fmt: skip
    """Return the rms kernel error of each of KINDS, mean over seeds, and the spread of K."""
    errors: list[list[float]] = []
    spreads = []
    pairs = np.triu_indices(num_rows, 1)
    for seed in range(seeds):
        rows = unit_rows(np.random.default_rng(seed).standard_normal((num_rows, dim_in)))[0]
        exact = np.exp(-(sigma**2) * (1.0 - rows @ rows.T))[pairs]
        spreads.append(float(exact.std()))
        features = [_features(dim_in, m, sigma, seed, kind).transform(rows).astype(np.float64) for kind in KINDS]
        errors.append([float(np.sqrt(np.mean(((phi @ phi.T)[pairs] - exact) ** 2))) for phi in features])
    return [float(mean) for mean in np.mean(errors, axis=0)], float(np.mean(spreads))


def _features(dim_in: int, m: int, sigma: float, seed: int, kind: str) -> RandomFourierFeatures:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few frequencies
        return RandomFourierFeatures(dim_in, 2 * m, sigma, seed, kind)


def main() -> None:
    vectors = np.random.default_rng(0).standard_normal((4000, 32))
    header = ("sigma", "epsilon", "orthogonal", "Gaussian", "bound", "spread of K", "rms error / spread at dim 64")
    print(table_of(header, dims(vectors)))
    lines = []
    for dim_in, m, sigma in SHAPES:
        errors, spread = rms_errors(dim_in, m, sigma)
        lines.append((f"{dim_in}, {m}", f"{sigma:g}", *(f"{error:.4f}" for error in errors), f"{spread:.3f}"))
    print()
    print(table_of(("d, m", "sigma", *KINDS, "spread of K"), lines))


if __name__ == "__main__":
    main()
