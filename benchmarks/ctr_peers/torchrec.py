"""TorchRec with FBGEMM's fused rowwise Adagrad.

It is TorchRec's EmbeddingBagCollection under DistributedModelParallel, and a plain loop of torch. Its own sharder and
planner place the tables (one rank, whole, the fused kernel on the CPU). The dense part is ours, module for module, so
that only the tables, their optimizer and the loop differ; torch's fused Adam trains it, and memory is kept as ours
keeps it. There is no DistributedDataParallel around it, which one rank does not need. Batches are made by our reader
(``reader``), or all are made before anything is timed (``memory``). FBGEMM needs a multiple of four columns: DeepFM's
rows of 17 are 20 here, 3 unused.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType

from benchmarks.ctr_peers.tasks import CROSS_LAYERS, DENSE_LEARNING_RATE, HELD_OUT, Request, answer, auc_of
from trainer.data.batches.prepared import PreparedData
from trainer.launch.on_host import leave, single_rank_group
from trainer.launch.worker import quiet, steady_memory
from trainer.models.base import ModelInputs
from trainer.models.registry import MODELS
from trainer.spec.models.registry import parse_model

EVALUATION_BATCH = 8192
VARIANTS = ("memory", "reader")


def run(request: Request, data: PreparedData) -> dict[str, Any]:
    """Return ``validation`` and ``test``, AUC after each epoch; or ``examples_per_second``."""
    quiet()
    with single_rank_group(), steady_memory():
        model = built(request, data)
        dense = [p for name, p in model.module.named_parameters() if not name.startswith("embeddings.")]
        optimizer = torch.optim.Adam(dense, lr=DENSE_LEARNING_RATE, fused=True)
        if request.timed_steps:
            return {"examples_per_second": _rate(model, optimizer, request, data)}
        found: dict[str, Any] = {split: [] for split in HELD_OUT}
        for epoch in range(request.epochs):
            model.train()
            for batch in data.train_batches(epoch):
                _step(model, optimizer, batch)
            model.eval()
            for split in HELD_OUT:
                with torch.no_grad():
                    batches = data.eval_batches(split, EVALUATION_BATCH)
                    scores = [model(batch.features).numpy() for batch in batches]
                found[split].append(auc_of(np.concatenate(scores), data, split))
        return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels)
    loss.backward()  # which also moves the rows
    optimizer.step()


def _rate(model: nn.Module, optimizer: torch.optim.Optimizer, request: Request, data: PreparedData) -> float:
    total = request.warm_steps + request.timed_steps
    batches: Iterator[Any] = itertools.islice(_epochs(data), total)
    if request.variant == "memory":
        batches = iter(list(batches))
    model.train()
    for batch in itertools.islice(batches, request.warm_steps):
        _step(model, optimizer, batch)
    count, start = 0, time.perf_counter()
    for batch in batches:
        _step(model, optimizer, batch)
        count += len(batch)
    return count / (time.perf_counter() - start)


def _epochs(data: PreparedData) -> Iterator[Any]:
    for epoch in itertools.count():
        yield from data.train_batches(epoch)


# --- the model -------------------------------------------------------------------------------------------------------


class _Blocks:
    """The part of a KeyedTensor that our models read: the first ``columns`` of each feature's block."""

    def __init__(self, pooled: Any, columns: int):
        self._blocks = {name: block[:, :columns] for name, block in pooled.to_dict().items()}

    def keys(self) -> list[str]:
        return list(self._blocks)

    def values(self) -> Tensor:
        return torch.cat(list(self._blocks.values()), dim=1)

    def to_dict(self) -> dict[str, Tensor]:
        return self._blocks


class _Narrow(nn.Module):
    """Tables with unused columns at the end."""

    def __init__(self, tables: nn.Module, columns: int):
        super().__init__()
        self.tables, self.columns = tables, columns

    def forward(self, features: Any) -> _Blocks:
        return _Blocks(self.tables(features), self.columns)


def built(request: Request, data: PreparedData) -> DistributedModelParallel:
    """Return our model of the kind around TorchRec's tables, which start as TorchRec starts them."""
    fields = {"kind": request.model, "embedding_dim": request.dim, "hidden": request.hidden}
    more = {"structure": "parallel", "cross_layers": CROSS_LAYERS} if request.model == "dcnv2" else {}
    spec = parse_model(fields | more)
    columns = spec.table_columns("")
    width = -(-columns // 4) * 4
    tables: nn.Module = EmbeddingBagCollection(tables=_tables(data, width), device=torch.device("meta"))
    if width != columns:
        tables = _Narrow(tables, columns)
    model = MODELS[request.model](tables, spec, ModelInputs(tuple(data.keys), seed=request.seed))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": request.learning_rate, "eps": 1e-8}
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
    # Without constraints the planner replicates small tables, and replicas have no fused optimizer.
    whole = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=dict.fromkeys(data.tables, whole)
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    device = torch.device("cpu")
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders, init_data_parallel=False)


def _tables(data: PreparedData, width: int) -> list[EmbeddingBagConfig]:
    # The mean of one id is that id: a table that single ids share with lists has the pooling of the lists.
    means = {key.table for key in data.keys if key.is_list and key.pooling == "mean"}
    return [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=width,
            num_embeddings=table.num_rows,
            feature_names=[key.name for key in data.keys if key.table == name],
            pooling=PoolingType.MEAN if name in means else PoolingType.SUM,
        )
        for name, table in data.tables.items()
    ]


if __name__ == "__main__":
    answer(sys.argv[1], run)
    leave(0)
