"""Models, batches and ranks of the checks with TorchRec."""

from __future__ import annotations

import contextlib
import itertools
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

from embeddings.embedding_tables import EmbeddingTables
from embeddings.sharding import ModelTables, TableSettings

SECONDS = 30.0
"""Longest wait of a rank for another."""
DENSE_RATE = 1e-3


@dataclass
class Batch(Pipelineable):
    """Ids and labels of some samples of a batch; ``share`` is the weight of a sample's loss."""

    features: KeyedJaggedTensor
    labels: Tensor
    share: float

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        features = self.features.to(device, non_blocking=non_blocking)
        return Batch(features, self.labels.to(device, non_blocking=non_blocking), self.share)

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.labels.pin_memory(), self.share)


class Model(nn.Module):
    """Pooled rows and a small dense net: (loss, logits). ``blocks``: names of the blocks, in order; () takes all."""

    def __init__(
        self, tables: nn.Module, blocks: Sequence[str], width: int, hidden: Sequence[int], device: torch.device
    ) -> None:
        super().__init__()
        self.tables, self.blocks = tables, tuple(blocks)
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((width, *hidden)):
            # A smooth activation: at a kink the last bit of a sum would decide whether a unit has a gradient.
            layers += [nn.Linear(before, after), nn.SiLU()]
        self.net = nn.Sequential(*layers, nn.Linear((width, *hidden)[-1], 1)).to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch.features)
        joined = torch.cat([pooled[name] for name in self.blocks], dim=1) if self.blocks else pooled.values()
        logits = self.net(joined).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        return losses * batch.share, logits


class Plain(nn.Module):
    """Tables of plain torch on the CPU, and no TorchRec around them."""

    def __init__(self, settings: TableSettings) -> None:
        super().__init__()
        self.tables = EmbeddingTables(
            list(settings.tables.values()), settings.optimizer, sse=settings.sse, seed=settings.seed,
            backend="reference",
        )  # fmt: skip

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        assert tuple(features.keys()) == self.tables.features
        pooled = self.tables(features.values(), features.offsets())
        dims = [descriptor.dim for descriptor in self.tables.layout.descriptors]
        return dict(zip(self.tables.features, pooled.split(dims, dim=1), strict=True))


class Optimizers:
    """The optimizer for TorchRec's pipeline: torch's one of the dense part, then the step of the rows."""

    def __init__(self, dense: torch.optim.Optimizer, tables: ModelTables | None) -> None:
        self._dense, self._tables, self._step = dense, tables, 0

    def zero_grad(self) -> None:
        self._dense.zero_grad()

    def step(self) -> None:
        self._step += 1
        self._dense.step()
        if self._tables is not None:
            self._tables.step(self._step)


class _NoWrapper(DataParallelWrapper):
    """Wrapper that does not change dense parameters, as that of trainer.distributed.sharded_model."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        pass


def parallel(
    model: nn.Module, sharder: Any, shardings: Mapping[str, Any], device: torch.device
) -> DistributedModelParallel:
    """Wrap a model whose ``tables`` are bags on the meta device; all ranks have the same ``device``. Collective."""
    set_gradient_division(False)
    world_size = dist.get_world_size()
    planned = construct_module_sharding_plan(
        model.tables, dict(shardings), sharder, local_size=world_size, world_size=world_size, device_type=device.type
    )
    for sharding in planned.values():
        for shard in sharding.sharding_spec.shards:
            # TorchRec places rank i on GPU i; here all ranks share one device.
            shard.placement = _remote_device(f"rank:{shard.placement.rank()}/{device}")
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.distributed_c10d._get_default_group()),
        device=device,
        plan=ShardingPlan({"tables": planned}),
        sharders=[sharder],
        data_parallel_wrapper=_NoWrapper(),
    )


def sharding_of(name: str, number: int) -> Any:
    """Return TorchRec's way to split table ``number`` over the ranks."""
    if name == "row_wise":
        return row_wise(compute_kernel="fused")
    return table_wise(rank=number % dist.get_world_size(), compute_kernel="fused")


@contextlib.contextmanager
def ranks(backend: str, device: torch.device, rank: int = 0, world_size: int = 1, file: str = "") -> Iterator[None]:
    """Be a rank; ``file`` is where several meet."""
    store = dist.FileStore(file, world_size) if file else dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    try:
        yield
    finally:
        dist.destroy_process_group()


def last_lines(count: int = 14) -> list[str]:
    """Return the end of the traceback of the exception at hand."""
    return traceback.format_exc().strip().splitlines()[-count:]


def quiet() -> None:
    """Silence the deprecation warnings that TorchRec and torch log for each model."""
    for name in ("torchrec", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
