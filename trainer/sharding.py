"""Sharding of a single-device model: plan, wrap, step, gather, checkpoint. Models know nothing of it.

Every rank holds the whole dense part and some rows. The loss on a rank is the sum of its samples' losses over the
*global* number of samples, so that gradients only need a sum, whatever each rank's share of the batch:

    sharded = shard_model(model, tables, optimizer, sse, {"item": "row_wise"}, seed=1)
    sharded.set_context(step, batch.sample_offset, batch.global_size)
    loss = sharded.module.loss(batch).sum() / batch.global_size     # also where the rank has no sample
    loss.backward()
    sharded.all_reduce_gradients()
    dense_optimizer.step(); sharded.step_tables(step)

Calls marked *collective* must be made by every rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from embeddings.config import SSEConfig, TableConfig
from embeddings.optim import RowOptimizer
from embeddings.sharding import (
    SHARDING_TYPES,
    TableSettings,
    TableSharder,
    embedding_bag_collection,
)
from trainer.rundir import choose_backend
from trainer.sharded_state import GatheredTable, ShardedState

__all__ = [
    "GatheredTable",
    "ShardedModel",
    "choose_backend",
    "choose_device",
    "embedding_bag_collection",
    "shard_model",
]


def choose_device(local_rank: int, num_gpus: int) -> torch.device:
    """The device of a rank: one GPU for each rank of a host, or the CPU. Raises ValueError where GPUs are too few."""
    if num_gpus == 0:
        return torch.device("cpu")
    if not 0 <= local_rank < num_gpus:
        raise ValueError(
            f"rank {local_rank} of this host has no GPU of its own (there are {num_gpus}): start fewer ranks"
        )
    return torch.device("cuda", local_rank)


def shard_model(
    model: nn.Module,
    tables: Sequence[TableConfig],
    optimizer: RowOptimizer,
    sse: Mapping[str, SSEConfig],
    plan: Mapping[str, str],
    *,
    seed: int,
    backend: str = "numba",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> ShardedModel:
    """Shards the model's embeddings over the ranks of the process group, in place. Collective.

    Args:
        model: holds an EmbeddingBagCollection of ``tables`` on the meta device (:func:`embedding_bag_collection`).
        sse: swap probability by feature.
        plan: ``table_wise`` or ``row_wise`` by table; TorchRec's planner decides for tables left out.
        seed: of initial rows and SSE draws. Dense parameters are taken from rank 0.
        backend: of the tables' kernel, ``numba``, ``fbgemm`` or ``reference``.
        dtype: torch.float32 or torch.float64, of tables and dense parameters.

    Raises:
        ValueError: a plan that names no table or no available sharding, or tables that are not the model's.
        RuntimeError: without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "shard_model needs a process group, also for one rank: call torch.distributed.init_process_group"
        )
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    device = device or torch.device("cpu")
    by_name = {table.name: table for table in tables}
    _check_plan(plan, by_name)
    # Losses are already divided by the global number of samples.
    set_gradient_division(False)
    model = model.to(dtype)
    sharder = TableSharder(TableSettings(by_name, optimizer, dict(sse), seed, backend, dtype))
    parallel = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=_plan(model, sharder, by_name, plan, device, group),
        sharders=[sharder],
        data_parallel_wrapper=_NoWrapper(),
    )
    return ShardedModel(parallel, by_name, group)


class ShardedModel(ShardedState):
    """A model whose tables are split over ranks. See :func:`shard_model`.

    Attributes:
        parallel: TorchRec's DistributedModelParallel.
        module: the model itself, its embeddings replaced by :class:`embeddings.sharding.ShardedTables`.
        tables: the table configs by name.
    """

    def __init__(self, parallel: DistributedModelParallel, tables: Mapping[str, TableConfig], group: dist.ProcessGroup):
        super().__init__(parallel.module, tables, group)
        self.parallel = parallel

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.parallel(*arguments, **keywords)

    def train(self, mode: bool = True) -> ShardedModel:
        self.parallel.train(mode)
        return self

    def eval(self) -> ShardedModel:
        return self.train(False)

    # --- a step ------------------------------------------------------------------------------------------------------

    def set_context(self, step: int, sample_offset: int, global_size: int) -> None:
        """Before each training forward.

        Args:
            step: the step that is computed, ``completed_steps + 1``.
            sample_offset: index in the global batch of this rank's first sample; ranks hold consecutive slices.
            global_size: samples in the global batch.
        """
        if not 0 <= sample_offset <= global_size:
            raise ValueError(f"sample_offset {sample_offset} does not lie in a batch of {global_size}")
        if step != self._completed_steps + 1:
            raise ValueError(f"step {step} does not follow {self._completed_steps} completed steps")
        self._sharded.set_context(step, sample_offset)

    def all_reduce_gradients(self) -> None:
        """Sums the gradients of the dense parameters over ranks, in place. Collective."""
        parameters = [parameter for _, parameter in self.dense_parameters() if parameter.requires_grad]
        if self._world_size == 1 or not parameters:
            return
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
        dist.all_reduce(flat, group=self._group)
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter)

    def non_finite_tables(self) -> list[str]:
        """Tables with a gradient, recorded on this rank, that is not finite. Ranks may differ: let them agree."""
        return self._sharded.non_finite_tables()

    def step_tables(self, k: int) -> None:
        """Applies what backward recorded on this rank's rows, as step ``k`` = completed_steps + 1."""
        if k != self._completed_steps + 1:
            raise ValueError(f"step {k} does not follow {self._completed_steps} completed steps")
        self._sharded.step(k)
        self._completed_steps = k

    def discard(self) -> None:
        """Drops what backward recorded on this rank's rows."""
        self._sharded.discard()

    # --- what is where -----------------------------------------------------------------------------------------------

    def shares(self) -> dict[str, list[tuple[int, int]]]:
        """(row_start, row_count) of each table on each rank, from the rows that ranks hold. Collective.

        Raises AssertionError if they are not what the plan says, or do not make up each table exactly.
        """
        mine = {name: (local.row_start, local.row_count) for name, local in self._sharded.local_tables().items()}
        for name, local in self._sharded.local_tables().items():
            assert len(local.tables.weight(name)) == local.row_count
        everyone: list[Any] = [None] * self._world_size
        dist.all_gather_object(everyone, mine, group=self._group)
        shares = {name: [held.get(name, (0, 0)) for held in everyone] for name in self.tables}
        for name, share in shares.items():
            planned = self._sharded.module_sharding_plan[name]
            expected = [(0, 0)] * self._world_size
            for shard in planned.sharding_spec.shards:
                expected[shard.placement.rank()] = (shard.shard_offsets[0], shard.shard_sizes[0])
            held = sorted(part for part in share if part[1])
            ends = [0, *(start + count for start, count in held)]
            assert [start for start, _ in held] == ends[:-1], f"{name}: {share}"
            assert ends[-1] == self.tables[name].num_rows, f"{name}: {share}"
            assert [part for part in share if part[1]] == [part for part in expected if part[1]], f"{name}: {share}"
        return shares

    def plan(self) -> dict[str, str]:
        """``table_wise`` or ``row_wise`` by table, as the live plan has it."""
        return {name: self._sharded.module_sharding_plan[name].sharding_type for name in self.tables}


class _NoWrapper(DataParallelWrapper):
    """Leaves dense parameters alone: DDP would average, and hide the order of its sums."""

    def wrap(self, dmp: Any, env: Any, device: Any) -> None:
        pass


def _check_plan(plan: Mapping[str, str], tables: Mapping[str, TableConfig]) -> None:
    for name, kind in plan.items():
        if name not in tables:
            raise ValueError(f"sharding.{name}: no such table (there are {', '.join(sorted(tables))})")
        if kind not in SHARDING_TYPES:
            raise ValueError(f"sharding.{name}: {kind} is not available yet: use one of {', '.join(SHARDING_TYPES)}")


def _plan(
    model: nn.Module,
    sharder: TableSharder,
    tables: Mapping[str, TableConfig],
    plan: Mapping[str, str],
    device: torch.device,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """TorchRec's planner, bound to what ``plan`` says. Rank 0 plans for all. Collective."""
    world_size = dist.get_world_size(group)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size, local_world_size=get_local_size(world_size), compute_device=device.type
        ),
        constraints={
            name: ParameterConstraints(
                sharding_types=[plan[name]] if name in plan else list(SHARDING_TYPES), compute_kernels=["fused"]
            )
            for name in tables
        },
    )
    return planner.collective_plan(model, [sharder], group)
