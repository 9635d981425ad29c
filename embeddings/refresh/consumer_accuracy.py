"""Choice of dim and sigma of random Fourier features for a user's own task, by a consumer's accuracy with each.

The kernel error (:mod:`embeddings.rff.advice`) measures how well features approximate their kernel; only a task shows
that the kernel itself is useful. The task is a label for each item; the consumer is the linear classifier of the probes
(:mod:`embeddings.refresh.probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embeddings.refresh.probe import HELD_OUT, MAX_CLASSES, MAX_ITEMS, MIN_ITEMS, fit
from embeddings.rff.features import RandomFourierFeatures
from embeddings.vectors.item_vectors import Array, unit_rows

SIGMAS = (0.4, 1.0, 2.0)
DIMS = (2, 4, 8)
"""Dims that are tried, as multiples of the vectors' own dim."""
NUM_STEPS = 300
"""Steps of the regression; more steps would change only the third decimal of an accuracy."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a consumer on the held-out items.

    ``sigma`` is None for the vectors themselves, of their own ``dim``.
    """

    dim: int
    sigma: float | None
    accuracy: float


@dataclass(frozen=True)
class TaskAdvice:
    """Accuracies of a consumer on vectors and on features of several dims and sigmas.

    Attributes:
        tried: the vectors themselves, then each sigma at each dim.
        majority: the share of the most frequent class among the ``num_held_out`` items.
    """

    tried: tuple[Accuracy, ...]
    majority: float
    num_items: int
    num_held_out: int

    @property
    def best(self) -> Accuracy:
        """The features of the smallest dim whose accuracy is within one standard error of the highest.

        Among several sigmas at that dim, it is the most accurate.
        """
        features = [one for one in self.tried if one.sigma is not None]
        enough = max(one.accuracy for one in features) - self.standard_error
        return min((one for one in features if one.accuracy >= enough), key=lambda one: (one.dim, -one.accuracy))

    @property
    def standard_error(self) -> float:
        """The standard error of the highest accuracy."""
        highest = max(one.accuracy for one in self.tried)
        return float(np.sqrt(highest * (1 - highest) / self.num_held_out))


def advise(
    vectors: Array,
    labels: Sequence[object],
    *,
    dims: Sequence[int] | None = None,
    sigmas: Sequence[float] = SIGMAS,
    seed: int = 0,
) -> TaskAdvice:
    """Fit the consumer on three quarters of the items and judge it on the rest, on vectors and on their features.

    Features are standardised. Beyond 20,000 items a sample is taken.

    Args:
        vectors: [n, d], one for each item.
        labels: a label for each item.
        dims: dims of the features, by default 2, 4 and 8 times d.
        sigmas: sigmas of the features, each tried at each dim.
        seed: seed of the sample, the split and the frequencies.

    Raises:
        ValueError: fewer than 100 items, one class, or more than 256.
    """
    names, codes = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
    if len(codes) != len(vectors):
        raise ValueError(f"{len(vectors)} vectors and {len(codes)} labels: give one label for each")
    if len(codes) < MIN_ITEMS:
        raise ValueError(f"{len(codes)} labelled items have a vector, {MIN_ITEMS} are needed: check the ids")
    if not 2 <= len(names) <= MAX_CLASSES:
        raise ValueError(f"{len(names)} classes: 2 to {MAX_CLASSES} can be told apart; group the labels")
    draw = np.random.Generator(np.random.Philox(seed))
    chosen = np.sort(draw.permutation(len(codes))[:MAX_ITEMS])
    rows, codes = unit_rows(np.asarray(vectors)[chosen])[0], codes[chosen]
    held_out = draw.random(len(rows)) < HELD_OUT
    dim_in = rows.shape[1]

    def accuracy(features: Array) -> float:
        mean, scale = features[~held_out].mean(axis=0), features[~held_out].std(axis=0) + 1e-9
        features = (features - mean) / scale
        weights = fit(features[~held_out], codes[~held_out], len(names), num_steps=NUM_STEPS)
        predicted = (features[held_out] @ weights[:-1] + weights[-1]).argmax(axis=1)
        return float((predicted == codes[held_out]).mean())

    tried = [Accuracy(dim_in, None, accuracy(rows))]
    for sigma in sigmas:
        for dim in dims or [times * dim_in for times in DIMS]:
            view = RandomFourierFeatures(dim_in, dim, sigma, seed)
            tried.append(Accuracy(dim, sigma, accuracy(view.transform(rows.astype(np.float32)).astype(np.float64))))
    majority = float(np.bincount(codes[held_out]).max() / held_out.sum())
    return TaskAdvice(tuple(tried), majority, len(rows), int(held_out.sum()))
