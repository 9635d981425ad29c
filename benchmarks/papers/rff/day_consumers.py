"""Four consumers of item vectors or of their features: fitted on a log, and evaluated on later days.

Each reads a feature matrix [n, k] without knowing the meaning of its columns. A user is represented by u, the mean of
the features of the items taken last, and a candidate by its own features x.

    nearest neighbours    sum of <x, x_j> over the NUM_NEIGHBOURS nearest items j of the history; fitting keeps an
                          index of that day's x, while the x_j are those of the day of the evaluation
    logistic regression   on u * x, by coordinate
    network               a hidden layer of rectifiers on u, x and u * x; binary cross-entropy
    ratings               ridge regression of the rating on u, x, u * x and the user's mean rating

The first three rank (recall@TOP of the taken item among those shown), the last predicts (root mean square error).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.rff.held_out_days import Impressions
from embeddings.refresh.probe import fit
from embeddings.vectors.item_vectors import Array
from trainer.metrics.ranking import Ranking, rank_of

TOP = 5
NUM_NEIGHBOURS = 3
NUM_STEPS = 100
"""Steps of the logistic regression."""
L2 = 1e-4
HIDDEN, EPOCHS, BATCH_SIZE, LEARNING_RATE = 32, 5, 256, 3e-3
RIDGE = 10.0
Judge = Callable[[Array, Impressions], float]
"""``judge(features of a day, impressions)`` returns the figure of a consumer on that day."""
Consumer = Callable[[Array, Impressions], Judge]
"""``consumer(features, impressions)`` fits a model, and returns its judge."""
Scores = Callable[[Array, Impressions], Array]
"""``scores(features, impressions)`` returns the scores [b, c] of the items shown."""


def recall(scores: Array) -> float:
    """Return the share of rows of ``scores`` [b, c] whose first score is among the TOP highest; ties count as worse."""
    return float(Ranking.of_single(rank_of(scores[:, 0], scores[:, 1:])).hit_rate(TOP).mean())


def user_means(features: Array, history: Array) -> Array:
    """Return the mean features [b, k] of each history int64 [b, l], from ``features`` [n, k]; -1 is skipped."""
    known = history >= 0
    sums: Array = np.where(known[..., None], features[history], 0.0).sum(axis=1)
    return sums / known.sum(axis=1, keepdims=True)


def nearest_neighbours(features: Array, training: Impressions) -> Judge:
    """Keep ``features`` as the index; nothing is learned from ``training``."""

    def scores(today: Array, asked: Impressions) -> Array:
        near = np.einsum("bck,blk->bcl", features[asked.shown], today[asked.history], optimize=True)
        near = np.where((asked.history >= 0)[:, None], near, -np.inf)
        best: Array = np.sort(near, axis=2)[:, :, -NUM_NEIGHBOURS:].sum(axis=2)
        return best

    return _ranks(scores)


def logistic_regression(features: Array, training: Impressions) -> Judge:
    """Fit weights of u * x that separate taken items from the others."""
    products, labels = _flat(_products(features, training))
    mean, scale = products.mean(axis=0), products.std(axis=0) + 1e-9
    weights = fit((products - mean) / scale, labels.astype(np.int64), 2, l2=L2, num_steps=NUM_STEPS)
    direction = (weights[:-1, 1] - weights[:-1, 0]) / scale
    return _ranks(lambda today, asked: np.asarray(_products(today, asked) @ direction))


def network(features: Array, training: Impressions) -> Judge:
    """Train a network with one hidden layer; initial weights and the order of rows are the same each time."""
    inputs, labels = (torch.from_numpy(one.astype(np.float32)) for one in _flat(_pairs(features, training)))
    mean, scale = inputs.mean(dim=0), inputs.std(dim=0) + 1e-9
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(inputs.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
        )
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs), generator=generator).split(BATCH_SIZE):
            logits = model((inputs[batch] - mean) / scale)[:, 0]
            loss = binary_cross_entropy_with_logits(logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def scores(today: Array, asked: Impressions) -> Array:
        with torch.no_grad():
            pairs = torch.from_numpy(_pairs(today, asked).astype(np.float32))
            return np.asarray(model((pairs - mean) / scale)[..., 0])

    return _ranks(scores)


def ratings(features: Array, training: Impressions) -> Judge:
    """Fit a ridge regression of the ratings of the taken items."""
    inputs = _rated(features, training)
    mean, scale = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9
    standard, level = (inputs - mean) / scale, training.rating.mean()
    penalty = RIDGE * np.eye(standard.shape[1])
    weights = np.linalg.solve(standard.T @ standard + penalty, standard.T @ (training.rating - level))

    def judge(today: Array, asked: Impressions) -> float:
        predicted = (_rated(today, asked) - mean) / scale @ weights + level
        return float(np.sqrt(np.square(predicted - asked.rating).mean()))

    return judge


CONSUMERS: dict[str, Consumer] = {
    "nearest neighbours": nearest_neighbours,
    "logistic regression": logistic_regression,
    "network": network,
    "ratings": ratings,
}
PREDICTS = ("ratings",)
"""The consumers whose figure is an error: lower is better."""


def _ranks(scores: Scores) -> Judge:
    return lambda today, asked: recall(scores(today, asked))


def _products(features: Array, of: Impressions) -> Array:
    """Return u * x [b, c, k] of the items shown."""
    products: Array = user_means(features, of.history)[:, None] * features[of.shown]
    return products


def _pairs(features: Array, of: Impressions) -> Array:
    """Return u, x and u * x side by side [b, c, 3 k]."""
    users = np.broadcast_to(user_means(features, of.history)[:, None], (*of.shown.shape, features.shape[1]))
    return np.concatenate([users, features[of.shown], users * features[of.shown]], axis=2)


def _rated(features: Array, of: Impressions) -> Array:
    """Return u, x, u * x of the taken item and the user's mean rating, [b, 3 k + 1]."""
    taken = of._replace(shown=of.shown[:, :1])
    return np.column_stack([_pairs(features, taken)[:, 0], of.rated])


def _flat(inputs: Array) -> tuple[Array, Array]:
    """Return inputs [b, c, k] as [b c, k], and labels [b c], 1 for the first of each c."""
    labels = np.zeros(inputs.shape[:2])
    labels[:, 0] = 1.0
    return inputs.reshape(-1, inputs.shape[2]), labels.ravel()
