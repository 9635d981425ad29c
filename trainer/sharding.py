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

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
    ShardedTables,
    TableSettings,
    TableSharder,
    embedding_bag_collection,
)
from trainer.checkpoint import Checkpoint, CheckpointError, TableShard, agree, save
from trainer.rundir import choose_backend

__all__ = [
    "GatheredTable",
    "ShardedModel",
    "choose_backend",
    "choose_device",
    "embedding_bag_collection",
    "shard_model",
]

# Rows of a table travel to rank 0 in pieces of this many.
_GATHER_ROWS = 1 << 18
_MODEL, _OPTIMIZER = "model/", "optimizer/"


def choose_device(local_rank: int, num_gpus: int) -> torch.device:
    """The device of a rank: one GPU for each rank of a host, or the CPU. Raises ValueError where GPUs are too few."""
    if num_gpus == 0:
        return torch.device("cpu")
    if not 0 <= local_rank < num_gpus:
        raise ValueError(
            f"rank {local_rank} of this host has no GPU of its own (there are {num_gpus}): start fewer ranks"
        )
    return torch.device("cuda", local_rank)


class GatheredTable(NamedTuple):
    """A whole table: ``rows`` float32 [num_rows, dim] and ``last_update_step`` int64 [num_rows] (0 = never touched)."""

    rows: Tensor
    last_update_step: Tensor


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
        backend: of the tables' kernel, ``numba`` or ``reference``.
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


class ShardedModel:
    """A model whose tables are split over ranks. See :func:`shard_model`.

    Attributes:
        parallel: TorchRec's DistributedModelParallel.
        module: the model itself, its embeddings replaced by :class:`embeddings.sharding.ShardedTables`.
        tables: the table configs by name.
    """

    def __init__(self, parallel: DistributedModelParallel, tables: Mapping[str, TableConfig], group: dist.ProcessGroup):
        self.parallel = parallel
        self.module: nn.Module = parallel.module
        self.tables = dict(tables)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._completed_steps = 0
        found = [(name, part) for name, part in self.module.named_modules() if isinstance(part, ShardedTables)]
        if len(found) != 1:
            raise ValueError(f"the model must hold one EmbeddingBagCollection, not {len(found)}")
        self._path, self._sharded = found[0]
        self._broadcast_dense()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.parallel(*arguments, **keywords)

    def train(self, mode: bool = True) -> ShardedModel:
        self.parallel.train(mode)
        return self

    def eval(self) -> ShardedModel:
        return self.train(False)

    # --- a step ------------------------------------------------------------------------------------------------------

    @property
    def completed_steps(self) -> int:
        """K, the number of steps that the tables have taken."""
        return self._completed_steps

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

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) outside the tables, in the model's order."""
        return [(name, p) for name, p in self.module.named_parameters() if not self._of_tables(name)]

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

    def gather_table(self, name: str, decay: bool = True) -> GatheredTable | None:
        """The whole table as of now on rank 0, None elsewhere. Collective.

        ``decay=False``: with the movement of idle momentum but without pending decay, as directions are published.
        """
        num_rows, dim = self.tables[name].num_rows, self.tables[name].dim
        local = self._sharded.local_tables().get(name)
        everyone: list[Any] = [None] * self._world_size
        dist.all_gather_object(everyone, local and (local.row_start, local.row_count), group=self._group)
        size = num_rows if self._rank == 0 else 0
        whole = GatheredTable(torch.empty(size, dim), torch.empty(size, dtype=torch.int64))
        for rank, held in enumerate(everyone):
            start, count = held or (0, 0)
            for first in range(0, count, _GATHER_ROWS):
                rows = slice(first, min(first + _GATHER_ROWS, count))
                if self._rank == rank:
                    assert local is not None
                    piece = local.tables.read(name, torch.arange(rows.start, rows.stop), decay=decay).float()
                    steps = local.tables.state(name)["last_update_step"][rows].long()
                    if rank:
                        dist.send(piece.contiguous(), 0, group=self._group)
                        dist.send(steps.contiguous(), 0, group=self._group)
                elif self._rank == 0:
                    piece, steps = (
                        torch.empty(rows.stop - first, dim),
                        torch.empty(rows.stop - first, dtype=torch.int64),
                    )
                    dist.recv(piece, rank, group=self._group)
                    dist.recv(steps, rank, group=self._group)
                if self._rank == 0:
                    whole.rows[start + rows.start : start + rows.stop] = piece
                    whole.last_update_step[start + rows.start : start + rows.stop] = steps
        return whole if self._rank == 0 else None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_for_checkpoint(
        self, dense_optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[list[TableShard], dict[str, Tensor]]:
        """This rank's rows with their state, and the dense tensors of model and optimizer."""
        shards = [
            TableShard(name, self.tables[name].num_rows, row_start, held.weight(name), held.state(name))
            for name, (held, row_start, _) in sorted(self._sharded.local_tables().items())
        ]
        dense = {f"{_MODEL}{name}": value for name, value in self._dense_tensors()}
        if dense_optimizer is not None:
            dense |= self._optimizer_tensors(dense_optimizer)
        return shards, dense

    def save(
        self,
        directory: Path | str,
        *,
        dense_optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        keep_last: int = 3,
    ) -> Path:
        """Writes a checkpoint of ``completed_steps`` (:func:`trainer.checkpoint.save`). Collective."""
        shards, dense = self.state_for_checkpoint(dense_optimizer)
        return save(
            directory,
            step=self._completed_steps,
            tables=shards,
            dense=dense if self._rank == 0 else {},
            extra={"completed_steps": self._completed_steps, **(extra or {})},
            keep_last=keep_last,
            group=self._group,
        )

    def load_from(
        self,
        checkpoint: Checkpoint,
        *,
        dense_optimizer: torch.optim.Optimizer | None = None,
        verify: bool = True,
        grow: bool = False,
    ) -> dict[str, Any]:
        """Takes rows, state, dense tensors and the number of completed steps; returns the checkpoint's ``extra``.

        With ``grow`` (a warm start) tables may have more rows than the checkpoint: the further ones stay as they are.

        Each rank reads the rows that it holds, whatever plan wrote them. With ``verify`` rank 0 has every byte checked
        first. Collective. Raises CheckpointError on every rank if it is damaged or of other tables or another model on
        any; the model's state is then undefined.
        """
        where = f"{checkpoint.path} cannot be loaded"
        if verify:
            agree((None, _problem(checkpoint.verify) if self._rank == 0 else None), where, self._group)
        agree((None, _problem(self._load, checkpoint, dense_optimizer, grow)), where, self._group)
        return checkpoint.extra

    def _load(self, checkpoint: Checkpoint, dense_optimizer: torch.optim.Optimizer | None, grow: bool) -> None:
        sizes = {name: table.num_rows for name, table in self.tables.items()}
        given = checkpoint.tables
        fits = given.keys() == sizes.keys() and all(given[name] <= sizes[name] for name in sizes)
        if given != sizes and not (grow and fits):
            raise CheckpointError(f"it holds tables {given}, the model has {sizes}")
        for name, (held, row_start, row_count) in self._sharded.local_tables().items():
            start = min(row_start, given[name])
            weight, state = checkpoint.read_rows(name, start, min(row_start + row_count, given[name]) - start)
            if len(weight) < row_count:
                # A warm start: rows that the checkpoint does not know follow those that it does, as they are now.
                new = slice(len(weight), row_count)
                state = {key: torch.cat([state[key], value[new]]) for key, value in held.state(name).items()}
                weight = torch.cat([weight, held.weight(name)[new]])
            held.load(name, weight, state)
        self._load_dense(checkpoint.read_dense(), dense_optimizer)
        self._completed_steps = int(checkpoint.extra["completed_steps"])
        for kernel in self._sharded.kernels():
            kernel.discard()
            kernel.completed_steps = self._completed_steps

    def _load_dense(self, saved: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        mine = {f"{_MODEL}{name}": value for name, value in self._dense_tensors()}
        differ = sorted(mine.keys() ^ {name for name in saved if name.startswith(_MODEL)})
        differ += sorted(name for name in mine.keys() & saved.keys() if mine[name].shape != saved[name].shape)
        if differ:
            raise CheckpointError(f"the dense parts differ from the model's in {', '.join(differ)}")
        with torch.no_grad():
            for name, value in mine.items():
                value.copy_(saved[name])
        if optimizer is None:
            return
        optimizer.state.clear()
        parameters = dict(self.dense_parameters())
        for name, value in saved.items():
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
                optimizer.state[parameters[parameter]][key] = value

    def _dense_tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of parameters and buffers outside the tables."""
        buffers = [(name, value) for name, value in self.module.named_buffers() if not self._of_tables(name)]
        return [*((name, parameter.data) for name, parameter in self.dense_parameters()), *buffers]

    def _optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """State of a dense optimizer by parameter name. Its hyperparameters are the job's, not the checkpoint's."""
        names = {id(parameter): name for name, parameter in self.dense_parameters()}
        found: dict[str, Tensor] = {}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"{type(optimizer).__name__} keeps '{key}' as {type(value).__name__}, not a tensor")
                found[f"{_OPTIMIZER}{names[id(parameter)]}/{key}"] = value
        return found

    def _of_tables(self, name: str) -> bool:
        return name.startswith(f"{self._path}.") or self._path == ""

    def _broadcast_dense(self) -> None:
        for _, value in self._dense_tensors():
            dist.broadcast(value, 0, group=self._group)


class _NoWrapper(DataParallelWrapper):
    """Leaves dense parameters alone: DDP would average, and hide the order of its sums."""

    def wrap(self, dmp: Any, env: Any, device: Any) -> None:
        pass


def _problem(function: Callable[..., None], *arguments: Any) -> str | None:
    """What went wrong in the call, in words."""
    try:
        function(*arguments)
    except (CheckpointError, ValueError) as error:
        return str(error)
    except Exception as error:  # Whatever it is: the other ranks wait to hear of it.
        return f"{type(error).__name__}: {error}"
    return None


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
