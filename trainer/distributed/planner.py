"""The sharding plan of the tables. TorchRec's planner finds it with the costs of trainer.distributed.shard_cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from embeddings.kernels.backends import Backend
from embeddings.kernels.fbgemm.placement import FOR_TABLES
from embeddings.sharding import TableSettings
from embeddings.tables.config import TableConfig
from embeddings.tables.shardings import SHARDINGS, shard_columns, shardings_for
from trainer.distributed.shard_cost import ShardCost, Workload, row_bytes
from trainer.sizing.memory import machine_memory_bytes


@dataclass(frozen=True)
class PlanRequest:
    """Constraints on a sharding plan.

    Args:
        shardings: the sharding of some tables, by table (names of :mod:`embeddings.tables.shardings`); the planner
            chooses for all other tables.
        workload: samples and ids of a step.
        memory_bytes: memory for tables on each rank; None: see :func:`free_bytes_per_rank`.
        shard_columns: columns of each shard, by table, for tables whose columns are split. For a table without an
            entry there is one shard for each rank (or host), if the columns can be divided so.
    """

    shardings: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)
    memory_bytes: int | None = None
    shard_columns: Mapping[str, int] = field(default_factory=dict)


def make_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    settings: TableSettings,
    request: PlanRequest,
    device: torch.device,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Return a plan for the tables of ``model``, which rank 0 makes for all ranks. Collective.

    ``settings`` determine the memory of a row; ``device`` is the device of this rank's tables.

    Raises:
        ValueError: a sharding is not available, or the tables do not fit; the message then has each table's bytes.
    """
    world_size = dist.get_world_size(group)
    _check_shardings(request.shardings, settings.tables, world_size)
    _check_columns(request.shard_columns, settings.tables)
    answer: list[Any] = [None]
    if dist.get_rank(group) == 0:
        capacity = request.memory_bytes
        if capacity is None:
            capacity = free_bytes_per_rank(device, world_size, settings.backend)
        try:
            answer = [_planner(settings, request, device, world_size, capacity).plan(model, list(sharders))]
        except PlannerError as error:
            answer = [_why_not(settings, request.shardings, capacity, world_size, error)]
    dist.broadcast_object_list(answer, dist.get_global_rank(group, 0), group=group)
    if isinstance(answer[0], str):
        raise ValueError(answer[0])
    plan: ShardingPlan = answer[0]
    devices: list[Any] = [None] * world_size
    dist.all_gather_object(devices, str(device), group=group)
    put_on(plan, devices)
    return plan


def put_on(plan: ShardingPlan, devices: Sequence[str]) -> None:
    """Set the device of every shard to the device of its rank, ``devices[rank]``.

    TorchRec's planner assumes instead that the i-th rank of a host has the host's GPU i.
    """
    for of_module in plan.plan.values():
        for sharding in of_module.values():  # type: ignore[attr-defined]  # a dict by table
            for shard in getattr(sharding.sharding_spec, "shards", ()):
                rank = shard.placement.rank()
                shard.placement = _remote_device(f"rank:{rank}/{devices[rank]}")


def _check_shardings(shardings: Mapping[str, str], tables: Mapping[str, TableConfig], world_size: int) -> None:
    """Check the requested shardings: ValueError if a table is unknown, or its sharding is not available."""
    local_size = get_local_size(world_size)
    for name, kind in shardings.items():
        if name not in tables:
            raise ValueError(f"sharding.{name}: no such table (there are {', '.join(sorted(tables))})")
        available = shardings_for(sequences="none" in tables[name].pooling)
        if kind not in available:
            raise ValueError(f"sharding.{name}: {kind} is not available yet: use one of {', '.join(available)}")
        if SHARDINGS[kind].needs_equal_hosts and world_size % local_size:
            raise ValueError(
                f"sharding.{name}: {kind} needs hosts with equally many ranks, but {world_size} ranks are not a "
                f"multiple of LOCAL_WORLD_SIZE {local_size}: use row_wise or column_wise"
            )


def _check_columns(shard_columns: Mapping[str, int], tables: Mapping[str, TableConfig]) -> None:
    for name, columns in shard_columns.items():
        dim = tables[name].dim if name in tables else columns
        if columns != dim and (columns < 1 or dim % columns or columns % 4):
            raise ValueError(
                f"shard_columns.{name}: {columns} columns are no equal shards of {dim}: use a multiple of 4 that "
                "divides it"
            )


def free_bytes_per_rank(device: torch.device, world_size: int, backend: Backend | None = None) -> int:
    """Return the bytes of memory that a rank may use for tables.

    The free bytes are the fraction FOR_TABLES of the rank's memory: the GPU's free memory, or on a CPU an equal share
    of the host's. With FBGEMM on a GPU both count, because it keeps rows that do not fit on the GPU in the host's
    memory.
    """
    on_gpu = 0 if device.type == "cpu" else int(FOR_TABLES * torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" and backend != "fbgemm":
        return on_gpu
    free = min(psutil.virtual_memory().available, machine_memory_bytes())
    return on_gpu + int(FOR_TABLES * free) // get_local_size(world_size)


def _planner(
    settings: TableSettings, request: PlanRequest, device: torch.device, world_size: int, capacity: int
) -> EmbeddingShardingPlanner:
    local_size, workload = get_local_size(world_size), request.workload
    memory = {"hbm_cap": capacity} if device.type != "cpu" else {"ddr_cap": capacity}
    topology = Topology(world_size=world_size, local_world_size=local_size, compute_device=device.type, **memory)
    constraints = {}
    for name, table in settings.tables.items():
        asked = request.shardings.get(name)
        ways = [SHARDINGS[asked]] if asked else [way for way in SHARDINGS.values() if way.by_planner]
        num_shards = max(way.column_shards(world_size, local_size) for way in ways)
        constraints[name] = ParameterConstraints(
            sharding_types=[way.torchrec_type for way in ways],
            compute_kernels=["fused"],
            min_partition=request.shard_columns.get(name) or shard_columns(table.dim, num_shards),
            pooling_factors=[workload.ids((feature,)) for feature in table.features],
        )
    cost = ShardCost(settings, workload, world_size, local_size, device)
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=workload.samples_per_rank,
        constraints=constraints,
        enumerator=EmbeddingEnumerator(topology, workload.samples_per_rank, constraints, estimator=[cost]),
        # The given memory is for tables alone, so nothing is reserved.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )


def _why_not(
    settings: TableSettings, shardings: Mapping[str, str], capacity: int, world_size: int, error: PlannerError
) -> str:
    """Return a message that explains why no plan was found, with the bytes of each table."""
    lines, total = [], 0
    for name, table in sorted(settings.tables.items()):
        per_row = row_bytes(settings, name, table.dim)
        copies = world_size if name in shardings and SHARDINGS[shardings[name]].replicated else 1
        total += copies * table.num_rows * per_row
        times = f" x {copies} copies" if copies > 1 else ""
        lines.append(
            f"{name}: {table.num_rows:,} rows x {per_row} bytes{times} = {copies * table.num_rows * per_row:,}"
            + (f" ({shardings[name]})" if name in shardings else "")
        )
    share = -(-total // world_size)
    told = (
        f"the tables do not fit: {total:,} bytes over {world_size} ranks are {share:,} each at best, and a rank has "
        f"{capacity:,} for them ({'; '.join(lines)}; and ids and outputs of a step): "
        "use more ranks or memory, fewer rows or columns, or leave `sharding` out where it forbids splitting a table"
    )
    return told if "storage" in str(error.error_type).lower() or share > capacity else f"{told}. The planner: {error}"
