"""Matrix factorization by alternating least squares, with or without a graph Laplacian: the baseline of SSE's table 1.

The objective over the training ratings is sum (r - <p_u, q_i>)^2 + l2 (|p_u|^2 + |q_i|^2), as in SGD-MF (Zhou et al.
2008), plus strength (tr P^T L P + tr Q^T L Q). L = D - W is the Laplacian of a graph whose edge (a, b) has the weight
1 / sqrt(d_a d_b), where d is the number of neighbours; D has the sums of the weights. There are no biases and no mean.
The vector of an id without ratings comes from its neighbours, or is zero if it has none.
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
    """Ratings with the row numbers of user and item and the split of each, [n], and W [m, m] of users and of items."""

    user: Ints
    item: Ints
    value: Floats
    side: npt.NDArray[np.uint8]
    weights: tuple[Floats, Floats]

    def rmse(self, users: Floats, items: Floats, side: int) -> float:
        """Return the root mean square error on the split ``side``."""
        rows = self.side == side
        predicted = np.einsum("nd,nd->n", users[self.user[rows]], items[self.item[rows]])
        return float(np.sqrt(np.mean((self.value[rows] - predicted) ** 2)))


def baselines(dataset: DatasetSpec, job: JobSpec) -> dict[str, Any]:
    """Return the test RMSE of both methods on the rows, graphs, split, dimension and seed of a job.

    l2, the strength and the iteration of each training are chosen on validation.
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
    """Return the RMSE on validation and on test after the iteration that is best on validation."""
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
    """Return the least-squares solution of every row, with the other side and the neighbours held fixed.

    Args:
        row: the row of each rating, [n].
        other: the other side's vector of each rating, [n, d].
        value: the ratings, [n].
        weights: W of these rows, [m, m].
        before: the previous values of these rows, [m, d].
        l2: the weight of l2 for each rating.
        strength: the weight of the Laplacian.
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
    """Return W [m, m] of edges; each edge is given once."""
    weights = np.zeros((num_rows, num_rows))
    weights[source, target] = weights[target, source] = 1.0
    degree = np.maximum(weights.sum(axis=1), 1.0)
    weights /= np.sqrt(degree[:, None] * degree)
    return weights


def read_ratings(dataset: DatasetSpec, split: Split) -> Ratings:
    """Return the ratings of a dataset with graphs ``ages`` of users and ``genres`` of items, split as in a job."""
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
    """Return the sum of the values [n, k] for each row, [num_rows, k]."""
    return np.stack([np.bincount(row, column, num_rows) for column in values.T], axis=1)
