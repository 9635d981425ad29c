"""TorchRec with FBGEMM's fused rowwise Adagrad.

The contestant is TorchRec's EmbeddingBagCollection under DistributedModelParallel, and a plain loop of torch.
TorchRec's own sharder and planner place the tables (one rank, whole, the fused kernel on the CPU). The modules of the
dense part are ours, so that only the tables, their optimizer and the loop differ; torch's fused Adam trains it, and
memory is kept as ours keeps it. There is no DistributedDataParallel around it, which one rank does not need. FBGEMM
needs a multiple of four columns: DeepFM's rows of 17 columns have 20 here, 3 of them unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType

from benchmarks.ctr_peers.tasks import CROSS_LAYERS, DENSE_LEARNING_RATE, HELD_OUT, Task, auc_of
from trainer.data.batches.batch import Batch
from trainer.data.batches.prepared import PreparedData
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import quiet, steady_memory
from trainer.models.base import ModelInputs
from trainer.models.registry import MODELS
from trainer.spec.models.registry import parse_model

EVALUATION_BATCH = 8192


def run(task: Task, model: str, seed: int, learning_rate: float, data: PreparedData) -> dict[str, Any]:
    """Return ``validation`` and ``test``, AUC after each epoch."""
    quiet()
    with single_rank_group(), steady_memory():
        trained = built(task, model, seed, learning_rate, data)
        optimizer = dense_optimizer(trained)
        found: dict[str, Any] = {split: [] for split in HELD_OUT}
        for epoch in range(task.epochs):
            trained.train()
            for batch in data.train_batches(epoch):
                step(trained, optimizer, batch)
            trained.eval()
            for split in HELD_OUT:
                with torch.no_grad():
                    batches = data.eval_batches(split, EVALUATION_BATCH)
                    scores = [trained(batch.features).numpy() for batch in batches]
                found[split].append(auc_of(np.concatenate(scores), data, split))
        return found


def dense_optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
    dense = [p for name, p in model.module.named_parameters() if not name.startswith("embeddings.")]
    return torch.optim.Adam(dense, lr=DENSE_LEARNING_RATE, fused=True)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, ended: Callable[[str], None] = lambda _part: None
) -> Tensor:
    """Train on a batch and return its loss; ``ended`` is called with each part's name at its end."""
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels)
    ended("dense forward")
    loss.backward()  # which also moves the rows
    ended("tables")
    optimizer.step()
    ended("dense optimizer")
    return loss.detach()


# --- the model -------------------------------------------------------------------------------------------------------


class _Narrow(nn.Module):
    """Tables with unused columns at the end of their rows, of which a model reads the first ``columns``."""

    def __init__(self, tables: nn.Module, columns: int):
        super().__init__()
        self.tables, self.columns = tables, columns

    def forward(self, features: Any) -> KeyedTensor:
        pooled = self.tables(features)
        keys = pooled.keys()
        values = pooled.values().unflatten(1, (len(keys), -1))[:, :, : self.columns].flatten(1)
        return KeyedTensor(keys, [self.columns] * len(keys), values)


def built(task: Task, model: str, seed: int, learning_rate: float, data: PreparedData) -> DistributedModelParallel:
    """Return our model of the kind around TorchRec's tables, which start as TorchRec starts them."""
    fields = {"kind": model, "embedding_dim": task.dim, "hidden": task.hidden}
    more = {"structure": "parallel", "cross_layers": CROSS_LAYERS} if model == "dcnv2" else {}
    spec = parse_model(fields | more)
    columns = spec.table_columns("")
    width = -(-columns // 4) * 4
    # Unused columns, whose gradient is 0, lower the mean square, whose root divides the rate.
    rate = learning_rate * math.sqrt(columns / width)
    tables: nn.Module = EmbeddingBagCollection(tables=_tables(data, width), device=torch.device("meta"))
    if width != columns:
        tables = _Narrow(tables, columns)
    module = MODELS[model](tables, spec, ModelInputs(tuple(data.keys), seed=seed))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": rate, "eps": 1e-8}
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
    # Without constraints the planner replicates small tables, and replicas have no fused optimizer.
    whole = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=dict.fromkeys(data.tables, whole)
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    device = torch.device("cpu")
    return DistributedModelParallel(module, device=device, plan=plan, sharders=sharders, init_data_parallel=False)


def rows(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Return the rows of TorchRec's tables by table, which training changes."""
    return {name.split(".")[-2]: p for name, p in model.named_parameters() if "embedding_bags" in name}


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
