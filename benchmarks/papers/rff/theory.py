"""Lemma 1 and proposition 4 of the RFF paper, measured on item vectors of several runs and their classes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.papers.rff.figures import directions, features_of
from embeddings.refresh.kernel_alignment import SIGMAS, kernel_alignment, nadaraya_watson
from embeddings.vectors.item_vectors import Array
from trainer.report_pages.section import Panel, Section

DELTAS = (0.05, 0.5, 1.0)
"""The lemma holds with probability 1 - delta; with delta = 1 it says nothing, and the bound is at its lowest."""
NUM_FREQUENCIES = (16, 32, 64, 128, 256, 512)
NUM_ITEMS = (50, 100, 200, 400, 800)
NUM_DRAWS, QUICK_DRAWS = 20, 3
EPSILON = 0.1
VARIANCES = (0.2, 0.5, 0.8, 1.0, 1.25, 2.0)


def lemma_1(runs: Sequence[Array], classes: Array, held_out: Array) -> Section:
    """Return R(NW) and 1 - sqrt(delta) A by sigma, means over runs: the most frequent class against all others.

    A = E[1[Y = Y'] K] over pairs of different items. R is the share of held-out items (bool [n]) that the estimator
    fitted on the others classifies wrongly.
    """
    codes = np.unique(classes, return_inverse=True)[1]
    labels = (codes == np.bincount(codes).argmax()).astype(np.int64)
    lines = []
    for sigma in SIGMAS:
        figures = [risk_and_alignment(vectors, labels, held_out, sigma) for vectors in runs]
        risk, aligned, lift = (statistics.fmean(column) for column in zip(*figures, strict=True))
        bounds = [1.0 - np.sqrt(delta) * aligned for delta in DELTAS]
        lines.append((f"{sigma:g}", f"{risk:.3f}", f"{aligned:.3f}", f"{lift:.2f}", *(f"{one:.3f}" for one in bounds)))
    wrong = min(labels[held_out].mean(), 1.0 - labels[held_out].mean())
    return Section(
        "lemma1",
        "Lemma 1: risk of the Nadaraya-Watson estimator and its bound 1 - sqrt(delta) A, by sigma of the kernel",
        ("sigma", "risk", "A", "lift", *(f"bound, delta {delta:g}" for delta in DELTAS)),
        tuple(lines),
        (
            f"The most frequent class against all others, {len(runs)} runs; who always answers the same has "
            f"{wrong:.3f}. Lift: the mean of K over pairs of one class / that over all pairs.",
        ),
    )


def risk_and_alignment(vectors: Array, labels: Array, held_out: Array, sigma: float) -> tuple[float, float, float]:
    """Return (R, A, lift) of vectors [n, d] and binary labels [n]."""
    answers = nadaraya_watson(vectors[~held_out], labels[~held_out], vectors[held_out], 2, (sigma,))
    return float((answers != labels[held_out]).mean()), *kernel_alignment(vectors, labels, sigma)


def proposition_4(runs: Sequence[Array], classes: Array, num_draws: int) -> Section:
    """Return the differences between A_n for features and A_n for the kernel, by m, by n and by Q.

    All are computed on the first run. By m: the root mean square over draws of U of A_n(U) - A_n(K) on all items, and
    the mean over draws of the largest abs(A_n(Q) - A_n(Q*)) of phi_m over Q = N(0, sigma_Q^2), which the proposition
    bounds. By n: the standard deviation of A_n(K) over samples of n items. By sigma_Q^2: A_n(K_Q) - A_n(K_Q*), where Q*
    is the standard Gaussian.
    """
    codes = np.unique(classes, return_inverse=True)[1]
    rows = directions(runs[:1])[0]
    dim = rows.shape[1]
    exact = kernel_alignment(rows, codes, 1.0)[0]
    by_m = [
        (m, float(np.sqrt(np.mean([(alignment_of(features(rows, m, 1.0, seed), codes) - exact) ** 2
                                   for seed in range(num_draws)]))))
        for m in NUM_FREQUENCIES
    ]  # fmt: skip
    by_sup = [
        (m, statistics.fmean(largest_difference(rows, codes, m, seed) for seed in range(num_draws)))
        for m in NUM_FREQUENCIES
    ]
    draw = np.random.Generator(np.random.Philox(0))
    by_n = []
    for n in (n for n in NUM_ITEMS if n < len(rows)):
        samples = [draw.choice(len(rows), n, replace=False) for _ in range(num_draws)]
        values = [kernel_alignment(rows[some], codes[some], 1.0)[0] for some in samples]
        by_n.append((n, statistics.stdev(values)))
    by_q = []
    for variance in VARIANCES:
        divergence = 0.5 * dim * (variance - 1.0 - np.log(variance))
        by_q.append((variance, divergence, kernel_alignment(rows, codes, np.sqrt(variance))[0] - exact))
    lines = [(f"m = {m}, Q = Q*", f"{error:.5f}") for m, error in by_m]
    lines += [(f"m = {m}, the largest over Q of abs(A_n(Q) - A_n(Q*))", f"{error:.5f}") for m, error in by_sup]
    lines += [(f"n = {n}, Q = Q*", f"{error:.5f}") for n, error in by_n]
    lines += [(f"sigma_Q^2 = {v:g}, KL(Q, Q*) = {kl:.2f}, all items", f"{gap:+.5f}") for v, kl, gap in by_q]
    return Section(
        "proposition4",
        f"Proposition 4: what moves the alignment A_n (of the kernel and all {len(rows)} items {exact:.4f})",
        ("", "distance"),
        tuple(lines),
        (
            f"By m: rms over {num_draws} draws of the frequencies. By n: standard deviation over {num_draws} samples "
            "of items. By sigma_Q^2: the difference itself, which neither m nor n makes smaller. The largest over Q: "
            f"mean over {num_draws} draws of Q and of Q*.",
            f"The bound's first term falls to 1 at m = {frequencies_for(EPSILON, dim, dim * max(VARIANCES)):,} for an "
            f"error of {EPSILON:g}.",
        ),
        (
            Panel("features", "m", "error of A_n", {"Q = Q*, rms": by_m, "largest over Q": by_sup}, "xy"),
            Panel("items", "n", "sd of A_n", {"A_n": by_n}, "xy"),
        ),
        2,
    )


def largest_difference(rows: Array, codes: Array, m: int, seed: int) -> float:
    """Return max over VARIANCES of abs(A_n(Q) - A_n(Q*)) for phi_m of unit rows [n, d].

    Q and Q* have different seeds for their frequencies. All Q use the same draws, scaled by their sigma_Q.
    """
    standard = alignment_of(features(rows, m, 1.0, 2 * seed), codes)
    return max(
        abs(alignment_of(features(rows, m, float(np.sqrt(variance)), 2 * seed + 1), codes) - standard)
        for variance in VARIANCES
    )


def frequencies_for(epsilon: float, dim: int, second_moment: float) -> int:
    """Return the m at which sigma_Q^2 / epsilon^2 exp(-m epsilon^2 / (16 (d + 2))) is 1.

    sigma_Q^2 is the second moment of Q, summed over its d coordinates.
    """
    return int(np.ceil(16 * (dim + 2) / epsilon**2 * np.log(second_moment / epsilon**2)))


def features(rows: Array, m: int, sigma: float, seed: int) -> Array:
    """Return phi_m [n, 2 m] of unit rows [n, d], with Gaussian frequencies drawn from ``seed``."""
    return features_of(rows.shape[1], 2 * m, sigma, seed)(rows).astype(np.float64)


def alignment_of(phi: Array, codes: Array) -> float:
    """Return A_n = 1 / (n (n - 1)) sum_{i != j} 1[y_i = y_j] <phi_i, phi_j> of features [n, k]."""
    sums = np.zeros((int(codes.max()) + 1, phi.shape[1]))
    np.add.at(sums, codes, phi)
    return float((np.square(sums).sum() - np.square(phi).sum()) / (len(phi) * (len(phi) - 1)))
