"""Matrix factorization by alternating least squares, with a graph Laplacian or without: the baseline of SSE's table 1.

Over the ratings that train: sum (r - <p_u, q_i>)^2 + l2 (|p_u|^2 + |q_i|^2), which is SGD-MF's objective (Zhou et al.
2008), + strength (tr P^T L P + tr Q^T L Q), with L = D - W of a graph whose edge (a, b) weighs 1 / sqrt(d_a d_b), d the
numbers of neighbours and D the sums of the weights. No biases and no mean. An id without a rating has the vector that
its neighbours give it, and zeros without them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.columns.hashing import combine, id_keys
from trainer.data.prepare.split import TEST, TRAIN, VALIDATION, random_split
from trainer.spec import DatasetSpec, JobSpec, Split

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
L2 = (0.05, 0.1, 0.2)
STRENGTHS = (10.0, 30.0)
ITERATIONS = 15


@dataclass(frozen=True)
class Ratings:
    """Ratings by row numbers of users and items and the side of each, [n], and W [m, m] of users and of items."""

    user: Ints
    item: Ints
    value: Floats
    side: npt.NDArray[np.uint8]
    weights: tuple[Floats, Floats]

    def rmse(self, users: Floats, items: Floats, side: int) -> float:
        """Return the root mean square error of a side."""
        rows = self.side == side
        predicted = np.einsum("nd,nd->n", users[self.user[rows]], items[self.item[rows]])
        return float(np.sqrt(np.mean((self.value[rows] - predicted) ** 2)))


def baselines(dataset: DatasetSpec, job: JobSpec) -> dict[str, Any]:
    """Return test RMSE of both methods on the rows, graphs, split, dimension and seed of a job.

    l2 and the strength are chosen on validation, and of each training the iteration.
    """
    of = read_ratings(dataset, job.evaluation.split)
    dim, seed = job.model.embedding_dim, job.seed
    plain = min((*trained(of, dim, seed, l2, 0.0), l2) for l2 in L2)
    smooth = min((*trained(of, dim, seed, l2, one), l2, one) for l2, one in itertools.product(L2, STRENGTHS))
    return {
        "als": {"test": plain[1], "l2": plain[2]},
        "als_laplacian": {"test": smooth[1], "l2": smooth[2], "strength": smooth[3]},
    }


def trained(of: Ratings, dim: int, seed: int, l2: float, strength: float) -> tuple[float, float]:
    """Return RMSE of validation and of test after the iteration that is best on validation."""
    draw = np.random.Generator(np.random.Philox(seed))
    users, items = (0.1 * draw.standard_normal((len(weights), dim)) for weights in of.weights)
    rows = of.side == TRAIN
    user, item, value = of.user[rows], of.item[rows], of.value[rows]
    scores = []
    for _ in range(ITERATIONS):
        users = solved(user, items[item], value, of.weights[0], users, l2, strength)
        items = solved(item, users[user], value, of.weights[1], items, l2, strength)
        scores.append((of.rmse(users, items, VALIDATION), of.rmse(users, items, TEST)))
    return min(scores)


def solved(
    row: Ints, other: Floats, value: Floats, weights: Floats, before: Floats, l2: float, strength: float
) -> Floats:
    """Return every row as least squares has it, the other side and its neighbours as they were.

    Args:
        row: of each rating, [n].
        other: the other side's vector of each rating, [n, d].
        value: the ratings, [n].
        weights: W of these rows, [m, m].
        before: these rows as they were, [m, d].
        l2: of a rating.
        strength: of the Laplacian.
    """
    num_rows, dim = before.shape
    matrix = _sums(row, (other[:, :, None] * other[:, None, :]).reshape(len(row), -1), num_rows)
    right = _sums(row, value[:, None] * other, num_rows)
    diagonal = l2 * np.maximum(np.bincount(row, minlength=num_rows), 1.0)
    if strength:
        diagonal = diagonal + strength * weights.sum(axis=1)
        right = right + strength * (weights @ before)
    matrices = matrix.reshape(num_rows, dim, dim) + diagonal[:, None, None] * np.eye(dim)
    return np.linalg.solve(matrices, right[:, :, None])[:, :, 0].astype(np.float64)


def weights_of(source: Ints, target: Ints, num_rows: int) -> Floats:
    """Return W [m, m] of edges that are named once each."""
    weights = np.zeros((num_rows, num_rows))
    weights[source, target] = weights[target, source] = 1.0
    degree = np.maximum(weights.sum(axis=1), 1.0)
    weights /= np.sqrt(degree[:, None] * degree)
    return weights


def read_ratings(dataset: DatasetSpec, split: Split) -> Ratings:
    """Return the rows of a dataset with graphs ``ages`` of its users and ``genres`` of its items, split as a job's."""
    table = pq.read_table(dataset.uri, columns=["user", "item", "rating"])
    ids = {name: table[name].cast(pa.int64()).combine_chunks() for name in ("user", "item")}
    numbered, weights = {}, []
    for name, graph in (("user", "ages"), ("item", "genres")):
        spec = dataset.graphs[graph]
        edges = pq.read_table(spec.uri, columns=[spec.source, spec.target])
        parts = [column.to_numpy() for column in (ids[name], *edges.columns)]
        known, codes = np.unique(np.concatenate(parts), return_inverse=True)
        numbered[name], source, target = np.split(codes, np.cumsum([len(part) for part in parts])[:-1])
        weights.append(weights_of(source, target, len(known)))
    side = random_split(split, combine(*map(id_keys, ids.values())))
    value = table["rating"].to_numpy().astype(np.float64)
    return Ratings(numbered["user"], numbered["item"], value, side, (weights[0], weights[1]))


def _sums(row: Ints, values: Floats, num_rows: int) -> Floats:
    """Return the sums of the values [n, k] of each row, [num_rows, k]."""
    return np.stack([np.bincount(row, column, num_rows) for column in values.T], axis=1)
