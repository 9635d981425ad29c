"""Graph Laplacian regularization of rows, by sampled neighbours.

Wu et al., Stochastic Shared Embeddings, table 1, compare SSE-Graph with it.

The penalty tr(E^T L E) = 1/2 sum over edges |e_j - e_k|^2 pulls the rows of neighbours together (Cai et al. 2011; Rao
et al. 2015, who solve it by alternating least squares). In this module each sample adds strength |e_j - e_k|^2 to the
loss: j is the row that the sample looks up, and k a neighbour of j drawn uniformly. For n_j samples of j the expected
sum is sum_j n_j / deg(j) sum_{k ~ j} |e_j - e_k|^2, so rows are pulled as often as they are trained. Gradients move
both rows. Rows without neighbours, and columns after the vector (such as biases), are not penalized. The neighbour is
drawn like a random walk of one step (embeddings.sse), as a function of seed, step and sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from embeddings.kernels.swap import swap
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import TableConfig
from trainer.spec.regularizers import Laplacian
from trainer.training.regularizers.rows import RowsOnce

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData


class LaplacianPenalty:
    """The penalty strength |e_j - e_k|^2 on a job's samples. ``data`` has the graph; ``dim``: columns of the vector."""

    def __init__(self, settings: Laplacian, data: PreparedData, seed: int, dim: int):
        self._settings, self._seed, self._dim = settings, seed, dim
        table = next(key.table for key in data.keys if key.name == settings.feature)
        graph = data.graph(settings.graph)
        self._degrees = torch.from_numpy(graph.degrees.copy())
        # A separate name, so that the draws differ from SSE's draws.
        self._name = f"{settings.feature}~neighbour"
        self._table = TableConfig(table, data.tables[table].num_rows, dim, (self._name,))
        self._config = SSEConfig(1.0, graph, restart=1.0)

    def __call__(self, batch: Batch, rows: RowsOnce, step: int) -> Tensor:
        """Return the penalty of each sample [b]. Collective, because it looks neighbours up in sharded tables."""
        feature, features = self._settings.feature, batch.features
        ids = features[feature].values().cpu()
        drawn = swap(
            ids, torch.arange(len(ids) + 1), table=self._table, feature=self._name, config=self._config,
            seed=self._seed, step=step, sample_offset=batch.sample_offset,
        )  # fmt: skip
        has_one = self._degrees[ids] > 0
        keys = features.keys()
        lengths = torch.zeros(len(keys), len(ids), dtype=torch.int64)
        lengths[keys.index(feature)] = has_one
        neighbours = KeyedJaggedTensor(keys, drawn[has_one], lengths=lengths.flatten(), stride=len(ids))
        device = features.values().device
        own = rows.looked_up(features)[feature][:, : self._dim]
        other = rows.looked_up(neighbours.to(device))[feature][:, : self._dim]
        return self._settings.strength * (own - other).square().sum(1) * has_one.to(device)
