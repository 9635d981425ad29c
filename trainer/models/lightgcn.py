"""LightGCN: rows of users and items, smoothed over the graph of users and the items that they had in training.

He et al., LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation, SIGIR 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec import KeyedJaggedTensor

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.models.base import ModelInputs
from trainer.models.bpr import BPR, ITEM, NEGATIVE, USER
from trainer.spec.models.pairs import LightGCNSpec

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData


class LightGCN(BPR):
    """score(u, i) = <e_u, e_i>, e = (1 / (L + 1)) sum_{l=0..L} A^l E, E the rows of users and items, L ``layers``.

    A has the entry 1 / sqrt(n_u n_i) for a user and an item of a positive training row, and else 0; n_u and n_i are
    their numbers of such neighbours (equations 3, 4 and 7 with alpha 1 / (L + 1)). Losses, negatives and ``normalize``
    are those of bpr. With ``normalize`` scores have bpr's bias of the item, which is not propagated; without it there
    is none. A step propagates all rows, forward and backward, in the time of 2 L products with A, whatever the batch
    size. An evaluation propagates them once.
    """

    reads_training_rows = True
    spec: LightGCNSpec

    def __init__(self, embeddings: nn.Module, spec: LightGCNSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self._graph: Graph | None = None
        self._sizes = 0, 0
        self._propagated: Tensor | None = None

    def begin(self, data: PreparedData) -> None:
        super().begin(data)
        keys = {key.name: key for key in data.keys}
        self._sizes = data.tables[keys[USER].table].num_rows, data.tables[keys[ITEM].table].num_rows
        users, items = (np.asarray(data.column("train", keys[name])).astype(np.int64) for name in (USER, ITEM))
        known = (np.asarray(data.labels("train")) == 1) & (users >= NUM_SPECIAL_ROWS) & (items >= NUM_SPECIAL_ROWS)
        self._graph = normalized_graph(users[known], items[known], *self._sizes)

    def train(self, mode: bool = True) -> Self:
        # Rows may have changed since they were propagated.
        self._propagated = None
        return super().train(mode)

    def looked_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        vectors = self._propagated if self._propagated is not None else self._propagate(features.device())
        if not torch.is_grad_enabled() and not self.training:
            self._propagated = vectors
        starts, found = {USER: 0, ITEM: self._sizes[0], NEGATIVE: self._sizes[0]}, {}
        for name, start in starts.items():
            ids, lengths = features[name].values(), features[name].lengths()
            rows = vectors[ids + start]
            if name == USER:
                rows = rows[:, : self.dim]
            found[name] = (
                rows
                if len(ids) == len(lengths)
                else rows.new_zeros(len(lengths), rows.shape[1]).index_put((torch.nonzero(lengths)[:, 0],), rows)
            )
        return found

    def _propagate(self, device: torch.device) -> Tensor:
        """Return the propagated rows e of all users, followed by those of all items, [rows, dim].

        If items have a bias, it is one more column; users have zeros there.
        """
        if self._graph is None:
            raise ValueError("lightgcn scores with the graph of its training rows, and this model has no graph")
        blocks = self.embeddings(_all_rows(self._sizes).to(device)).to_dict()
        users, items = (
            _with_special(blocks[name][: size - NUM_SPECIAL_ROWS])
            for name, size in zip((USER, ITEM), self._sizes, strict=True)
        )
        layer = torch.cat([users, items[:, : self.dim]])
        if self._graph.weights.dtype != layer.dtype or self._graph.weights.device != layer.device:
            self._graph = self._graph.to(layer)
        total = layer
        for _ in range(self.spec.layers):
            layer = _Propagation.apply(layer, self._graph)
            total = total + layer
        mean = total / (self.spec.layers + 1)
        if not self.spec.has_item_bias:
            return mean
        biases = torch.cat([mean.new_zeros(len(users), 1), items[:, self.dim :]])
        return torch.cat([mean, biases], dim=1)


class Graph(NamedTuple):
    """The matrix A of :class:`LightGCN`, in compressed rows.

    ``starts``: first entry of each row, int32 [rows]. ``columns``, ``weights``: column (int32) and value of each entry.
    """

    starts: Tensor
    columns: Tensor
    weights: Tensor

    def to(self, other: Tensor) -> Graph:
        """Return the graph on the device and with the element type of ``other``."""
        return Graph(self.starts.to(other.device), self.columns.to(other.device), self.weights.to(other))

    def times(self, rows: Tensor) -> Tensor:
        """Return A times ``rows`` [rows, dim]."""
        # As weighted sums of looked-up rows: a quarter of the time of torch's product with a sparse matrix.
        return embedding_bag(self.columns, rows, self.starts, mode="sum", per_sample_weights=self.weights)


class _Propagation(torch.autograd.Function):
    """Product of the graph A with rows [rows, dim]; backward uses A too, since it is symmetric."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, graph: Graph) -> Tensor:
        ctx.graph = graph
        return graph.times(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.graph.times(gradient.contiguous()), None


def normalized_graph(users: np.ndarray, items: np.ndarray, num_users: int, num_items: int) -> Graph:
    """Return A of :class:`LightGCN` from the users and items of training rows, each int64 [n]; a pair counts once.

    Its rows and columns are the ``num_users`` users, followed by the ``num_items`` items.
    """
    pairs = np.unique(users * num_items + items)
    users, items = pairs // num_items, pairs % num_items + num_users
    size = num_users + num_items
    degrees = np.bincount(np.concatenate([users, items]), minlength=size)
    rows, columns = np.concatenate([users, items]), np.concatenate([items, users])
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    values = 1.0 / np.sqrt(degrees[rows].astype(np.float64) * degrees[columns])
    starts = np.append(0, np.cumsum(degrees)[:-1])
    return Graph(
        torch.from_numpy(starts.astype(np.int32)),
        torch.from_numpy(columns.astype(np.int32)),
        torch.from_numpy(values.astype(np.float32)),
    )


def _all_rows(sizes: tuple[int, int]) -> KeyedJaggedTensor:
    """Return features that look up every row of both tables but the special rows; ``item__negative`` is empty."""
    counts = [size - NUM_SPECIAL_ROWS for size in sizes]
    stride = max(counts)
    lengths = torch.zeros(3, stride, dtype=torch.int64)
    for number, count in enumerate(counts):
        lengths[number, :count] = 1
    values = torch.cat([torch.arange(count) + NUM_SPECIAL_ROWS for count in counts])
    return KeyedJaggedTensor(keys=[USER, ITEM, NEGATIVE], values=values, lengths=lengths.reshape(-1), stride=stride)


def _with_special(rows: Tensor) -> Tensor:
    return torch.cat([rows.new_zeros(NUM_SPECIAL_ROWS, rows.shape[1]), rows])
