"""Computations of the ``rff`` recipe on item vectors of several runs: variances, a genre task, frozen consumers."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from embeddings.refresh.probe import fit
from embeddings.refresh.procrustes import procrustes, rotate
from embeddings.rff import RandomFourierFeatures
from embeddings.vectors.item_vectors import Array, unit_rows
from trainer.report_pages.section import NOT_RUN, Verdict, verdict

NUM_STEPS, NUM_STEPS_AS_THEY_ARE = 300, 1500
"""Steps of the regression with standardised and raw features; more steps change accuracy in the third decimal only."""
NUM_PAIRS = 20_000
HELD_OUT_SHARE = 0.2
Features = Callable[[Array], Array]
"""Maps vectors [n, d] to the features that a consumer reads, [n, k]."""


def directions(runs: Sequence[Array]) -> Array:
    """Return unit rows [runs, n, d] of vectors [n, d] each."""
    return np.stack([unit_rows(vectors)[0] for vectors in runs])


def unit(vectors: Array) -> Array:
    """Return unit rows of vectors [n, d]."""
    return directions([vectors])[0]


def features_of(dim_in: int, dim: int, sigma: float, seed: int = 0) -> Features:
    """Return phi of Xu et al.: random Fourier features with Gaussian frequencies, drawn once from ``seed``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # phi of dimension d has only d / 2 directions, as in the paper
        view = RandomFourierFeatures(dim_in, dim, sigma, seed, "gaussian")
    return view.transform


def percent(values: Sequence[float]) -> str:
    """Return mean and standard deviation in per cent, formatted for a table."""
    if not values:
        return NOT_RUN
    mean = f"{100 * statistics.fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ({100 * statistics.stdev(values):.2f})"


def spread(runs: Array) -> float:
    """Return the variance over runs of numbers [runs, ...], averaged over the numbers, as a share of the mean square.

    The variance is the sample variance (n - 1). The share is 1 for numbers of mean 0 that every run draws anew, and 0
    for numbers that are the same in every run.
    """
    return float(runs.var(axis=0, ddof=1).mean() / np.square(runs).mean())


def products(runs: Array, seed: int = 0) -> Array:
    """Return <h_i, h_j> [runs, pairs] of random pairs i != j of rows [runs, n, d]; all runs have the same pairs."""
    draw = np.random.Generator(np.random.Philox(seed))
    count = runs.shape[1]
    left = draw.integers(count, size=NUM_PAIRS)
    right = (left + draw.integers(1, count, size=NUM_PAIRS)) % count
    dots: Array = np.einsum("rpd,rpd->rp", runs[:, left], runs[:, right])
    return dots


def macro_f1(predicted: Array, labels: Array) -> float:
    """Return the mean over the classes that occur in ``labels`` or ``predicted`` of 2 TP / (2 TP + FP + FN)."""
    scores = []
    for one in np.union1d(predicted, labels):
        right = int(((predicted == one) & (labels == one)).sum())
        scores.append(2 * right / int((predicted == one).sum() + (labels == one).sum()))
    return statistics.fmean(scores)


@dataclass(frozen=True)
class Judged:
    """Accuracy and macro F1 of each run, and the accuracy of run 0's consumer on the other runs."""

    accuracy: tuple[float, ...]
    f1: tuple[float, ...]
    frozen: tuple[float, ...]


class LabelTask:
    """Classification of items by a multinomial logistic regression; ``classes``: int [n], the class of each item.

    The items are split once: four fifths to fit, one fifth to evaluate. Features are standardised unless
    ``standardised`` is False. The penalty is scikit-learn's default, 1 / (2 n) |W|^2.
    """

    def __init__(self, classes: Array, seed: int = 0, *, standardised: bool = True):
        self._standardised = standardised
        names, self._classes = np.unique(classes, return_inverse=True)
        self._num_classes = len(names)
        self._held_out = np.random.Generator(np.random.Philox(seed)).random(len(classes)) < HELD_OUT_SHARE
        labels = self._classes[self._held_out]
        self.majority = float((labels == np.bincount(self._classes[~self._held_out]).argmax()).mean())
        self.num_held_out = len(labels)

    def judge(self, runs: Sequence[Array], features: Features, *, frozen: bool = True) -> Judged:
        """Fit and evaluate a consumer on each run's vectors.

        If ``frozen``, also evaluate the first run's consumer on the vectors of the others.
        """
        accuracy, f1, held_out = [], [], []
        labels = self._classes[self._held_out]
        first: Callable[[Array], Array] | None = None
        for vectors in runs:
            read = features(vectors).astype(np.float64)
            predict = self._fitted(read)
            predicted = predict(read)
            accuracy.append(float((predicted == labels).mean()))
            f1.append(macro_f1(predicted, labels))
            if first is None:
                first = predict
            elif frozen:
                held_out.append(float((first(read) == labels).mean()))
        return Judged(tuple(accuracy), tuple(f1), tuple(held_out))

    def _fitted(self, read: Array) -> Callable[[Array], Array]:
        """Fit on the training items; return a function that predicts the classes of the held-out items."""
        known = read[~self._held_out]
        mean, scale = np.zeros(known.shape[1]), np.ones(known.shape[1])
        if self._standardised:
            mean, scale = known.mean(axis=0), known.std(axis=0) + 1e-9
        weights = fit(
            (known - mean) / scale,
            self._classes[~self._held_out],
            self._num_classes,
            l2=1.0 / len(known),
            num_steps=NUM_STEPS if self._standardised else NUM_STEPS_AS_THEY_ARE,
        )

        def predict(rows: Array) -> Array:
            codes: Array = (((rows[self._held_out] - mean) / scale) @ weights[:-1] + weights[-1]).argmax(axis=1)
            return codes

        return predict


def aligned(runs: Sequence[Array]) -> list[Array]:
    """Return every run, rotated onto the first by orthogonal Procrustes."""
    return [runs[0], *(rotate(vectors, procrustes(vectors, runs[0])) for vectors in runs[1:])]


def representations(runs: Sequence[Array], dim: int, suffix: str = "") -> dict[str, tuple[Sequence[Array], Features]]:
    """Return the rows of the paper's table 1 by name: (vectors [n, dim] of each run, consumer's features)."""
    return {
        f"h_{dim}{suffix}": (runs, unit),
        f"avg(h_{dim}){suffix}": ([np.mean(directions(runs), axis=0)], unit),
        f"phi_{dim}{suffix}": (runs, features_of(dim, dim, 1.0)),
        f"phi_{2 * dim}{suffix}": (runs, features_of(dim, 2 * dim, 1.0)),
    }


def frozen_claim(text: str, aligned_share: float, plain_share: float) -> Verdict:
    """Check that a consumer keeps nine tenths on aligned vectors of other runs, but not on unaligned ones."""
    measured = f"{100 * aligned_share:.0f} % aligned, {100 * plain_share:.0f} % as they are"
    return verdict(text, aligned_share >= 0.9 > plain_share, measured)


def deviation_claim(text: str, phi: Sequence[float], plain: Sequence[float]) -> Verdict:
    """Check that features have at most a tenth of the standard deviation of the vectors themselves."""
    second, first = statistics.stdev(phi), statistics.stdev(plain)
    return verdict(text, second <= 0.1 * first, f"{100 * second:.2f} against {100 * first:.2f} per cent")
