"""The peers of the kernel benchmarks, and our tables with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from benchmarks.support.harness import Workload
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import RowOptimizer
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig
from trainer.data.batches.keys import Key
from trainer.spec.models.dnn import DNNSpec

if TYPE_CHECKING:
    from trainer.models.registry import DNN


def ours(workload: Workload, optimizer: RowOptimizer, sse: float | None = None, **options: Any) -> EmbeddingTables:
    """Return our tables with normally distributed rows; ``sse``: the swap probability of every feature."""
    return EmbeddingTables(table_configs(workload), optimizer, sse=swaps(workload, sse), **options)


def table_configs(workload: Workload) -> list[TableConfig]:
    """Return table ``t0`` of feature ``f0`` and so on, with normally distributed rows."""
    return [
        TableConfig(f"t{t}", workload.num_rows, workload.dim, (f"f{t}",), init=InitConfig("normal", 0.1))
        for t in range(workload.num_tables)
    ]


def swaps(workload: Workload, sse: float | None) -> dict[str, SSEConfig]:
    """Return SSE for every feature, or for none."""
    return {} if sse is None else {f"f{t}": SSEConfig(sse) for t in range(workload.num_tables)}


def dnn(embeddings: nn.Module, tables: Sequence[TableConfig], hidden: Sequence[int]) -> DNN:
    """Return our DNN over all features of these tables."""
    # Imported here, so that only the ranks load TorchRec.
    from trainer.models.base import ModelInputs
    from trainer.models.registry import DNN

    keys = tuple(Key(feature, table.name, False, "sum") for table in tables for feature in table.features)
    spec = DNNSpec(kind="dnn", embedding_dim=tables[0].dim, hidden=tuple(hidden))
    return DNN(embeddings, spec, ModelInputs(keys))


def whole_step(tables: EmbeddingTables, grad: torch.Tensor) -> Callable[[Any], None]:
    """Return a function that runs lookup, backward and step of (indices, offsets) with this output gradient."""

    def step(given: Any) -> None:
        tables(*given).backward(grad)
        tables.step(tables.completed_steps + 1)

    return step


def fbgemm(
    workload: Workload, like: EmbeddingTables, optimizer: Any = EmbOptimType.EXACT_ADAGRAD, **settings: Any
) -> Any:
    """Return FBGEMM's table-batched embedding on CPU, with the rows of ``like``."""
    peer = fbgemm_tables([workload.num_rows] * workload.num_tables, workload.dim, optimizer, **settings)
    for t, weight in enumerate(peer.split_embedding_weights()):
        weight.copy_(like.weight(f"t{t}"))
    return peer


def fbgemm_tables(rows: Sequence[int], dim: int, optimizer: Any, **settings: Any) -> Any:
    """Return FBGEMM's table-batched embedding on CPU."""
    specs = [(count, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in rows]
    return SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=optimizer, **settings)


class TorchSparseAdam:
    """One torch.nn.EmbeddingBag with sparse gradients per table, and torch.optim.SparseAdam."""

    def __init__(self, workload: Workload, like: EmbeddingTables, learning_rate: float, eps: float) -> None:
        self.batch_size = workload.batch_size
        self.bags = [
            torch.nn.EmbeddingBag(workload.num_rows, workload.dim, mode="sum", sparse=True, include_last_offset=True)
            for _ in range(workload.num_tables)
        ]
        for t, bag in enumerate(self.bags):
            bag.weight.data.copy_(like.weight(f"t{t}"))
        self.optimizer = torch.optim.SparseAdam([bag.weight for bag in self.bags], lr=learning_rate, eps=eps)

    def step(self, indices: torch.Tensor, grad: torch.Tensor) -> None:
        offsets = torch.arange(self.batch_size + 1)
        self.optimizer.zero_grad()
        pooled = [bag(ids, offsets) for bag, ids in zip(self.bags, indices.view(len(self.bags), -1), strict=True)]
        torch.cat(pooled, dim=1).backward(grad)
        self.optimizer.step()


def train(tables: EmbeddingTables, draw: Any, num_steps: int) -> None:
    """Train some steps, so that rows have ages and moments as in real training.

    The gradient is drawn once; a row still gets a different part of it in each batch.
    """
    generator = torch.Generator().manual_seed(0)
    grad: torch.Tensor | None = None
    for _ in range(num_steps):
        pooled = tables(*draw())
        grad = 1e-3 * torch.randn(pooled.shape, generator=generator) if grad is None else grad
        pooled.backward(grad)
        tables.step(tables.completed_steps + 1)
