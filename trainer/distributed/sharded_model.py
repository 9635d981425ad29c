"""Sharding of a single-device model: plan, wrap, step, gather, checkpoint. Models know nothing of it.

Every rank holds the whole dense part and some rows. The loss on a rank is the sum of its samples' losses over the
*global* number of samples, so that gradients only need a sum, whatever each rank's share of the batch:

    settings = TableSettings.of(tables, optimizer, sse, seed=1)
    sharded = shard_model(model, settings, PlanRequest({"item": "row_wise"}))
    sharded.set_context(step, batch.sample_offset, batch.global_size)
    loss = sharded.module.loss(batch).sum() / batch.global_size     # also where the rank has no sample
    loss.backward()
    sharded.all_reduce_gradients()
    dense_optimizer.step(); sharded.step_tables(step)

Calls marked *collective* must be made by every rank, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from embeddings.perturbation import Perturbed
from embeddings.sharding import (
    SequenceSharder,
    TableSettings,
    TableSharder,
    embedding_bag_collection,
    embedding_collection,
)
from embeddings.sharding.exchange.collectives import all_reduce
from embeddings.tables.config import TableConfig
from embeddings.tables.shardings import SHARDINGS, sharding_name
from trainer.distributed.planner import PlanRequest, make_plan
from trainer.distributed.shard_cost import Workload
from trainer.distributed.sharded_state import GatheredTable, ShardedState

__all__ = [
    "GatheredTable",
    "PlanRequest",
    "Rectangle",
    "ShardedModel",
    "TableSettings",
    "Workload",
    "embedding_bag_collection",
    "embedding_collection",
    "shard_model",
]


def shard_model(
    model: nn.Module,
    settings: TableSettings,
    plan: PlanRequest | None = None,
    *,
    device: torch.device | None = None,
) -> ShardedModel:
    """Shard the model's embeddings over the ranks of the process group, in place. Collective.

    Args:
        model: holds the tables on the meta device, each in one collection: the pooled ones of
            :func:`embedding_bag_collection`, sequences of :func:`embedding_collection`.
        settings: the tables, how they are stored and trained. Dense parameters have their compute type, and their
            values are taken from rank 0.
        plan: what the plan must heed; left out, TorchRec's planner decides for all tables.
        device: where this rank's rows and dense parameters are put; left out: the CPU.

    Raises:
        ValueError: a plan that names no table or no available sharding, tables that are not the model's, or that do not
            fit into memory.
        RuntimeError: without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "shard_model needs a process group, also for one rank: call torch.distributed.init_process_group"
        )
    group = dist.distributed_c10d._get_default_group()
    device = device or torch.device("cpu")
    _check_held_once(model, settings.tables)
    # Losses are already divided by the global number of samples.
    set_gradient_division(False)
    model = _placed(model, settings.compute_dtype, device)
    sharders: list[ModuleSharder[Any]] = [TableSharder(settings), SequenceSharder(settings)]
    parallel = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=make_plan(model, sharders, settings, plan or PlanRequest(), device, group),
        sharders=sharders,
        data_parallel_wrapper=_NoWrapper(),
    )
    return ShardedModel(parallel, settings.tables, group)


class Rectangle(NamedTuple):
    """Rows [row_start, row_start + row_count) and columns [column_start, column_start + column_count) of a table."""

    row_start: int
    row_count: int
    column_start: int
    column_count: int


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
        self._perturbed: list[Perturbed] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.parallel(*arguments, **keywords)

    def train(self, mode: bool = True) -> ShardedModel:
        self.parallel.train(mode)
        return self

    def eval(self) -> ShardedModel:
        return self.train(False)

    # --- a step ------------------------------------------------------------------------------------------------------

    def set_context(self, step: int, sample_offset: int, global_size: int, part_offset: int = 0) -> None:
        """Set what a training forward depends on; to be called before each.

        ``step`` is ``completed_steps + 1``, ``sample_offset`` the index in the global batch of this rank's first sample
        (ranks hold consecutive slices), ``part_offset`` that of rank 0's: not 0 where a step has micro-batches.
        """
        if not 0 <= part_offset <= sample_offset <= global_size:
            raise ValueError(
                f"sample_offset {sample_offset} does not lie in a batch of {global_size}"
                + (f" from {part_offset} on" if part_offset else "")
            )
        if step != self._completed_steps + 1:
            raise ValueError(f"step {step} does not follow {self._completed_steps} completed steps")
        self._sharded.set_context(step, sample_offset, part_offset)

    def all_reduce_gradients(self) -> None:
        """Sum the gradients of the dense parameters over ranks, in place. Collective."""
        parameters = [parameter for _, parameter in self.dense_parameters() if parameter.requires_grad]
        if self._world_size == 1 or not parameters:
            return
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
        flat = all_reduce("dense gradients", flat, self._group)
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter)

    def non_finite_tables(self) -> list[str]:
        """Return tables with a gradient, recorded on this rank, that is not finite.

        Ranks may differ: let them agree.
        """
        return self._sharded.non_finite_tables()

    def gradient_squared_norm(self) -> float:
        """Return this rank's part of the squared norm of the tables' gradient; ranks must add theirs up."""
        return self._sharded.gradient_squared_norm()

    def step_tables(self, k: int, scale: float = 1.0) -> None:
        """Apply what backward recorded on this rank's rows, times ``scale``, as step ``k`` = completed_steps + 1."""
        if k != self._completed_steps + 1:
            raise ValueError(f"step {k} does not follow {self._completed_steps} completed steps")
        self._sharded.step(k, scale)
        self._completed_steps = k

    def discard(self) -> None:
        """Drop what backward recorded on this rank's rows."""
        self._sharded.discard()

    def perturb_tables(self, scale: float) -> None:
        """Move rows by ``scale`` times what backward recorded for them.

        Lookups of the same step see it, until :meth:`restore_tables` (trainer.training.regularizers.sam).
        """
        self._perturbed = self._sharded.perturbed(scale)

    def restore_tables(self) -> None:
        """Undo :meth:`perturb_tables`, to the last bit; nothing where nothing is to be undone."""
        while self._perturbed:
            self._perturbed.pop().restore()

    def reset_tables(self) -> None:
        """Reset rows and optimizer state to initial ones, whose steps count from now on (MEDA).

        The dense part and ``completed_steps`` stay.
        """
        self._birth_step = self._completed_steps
        self._sharded.reset(self._birth_step)

    # --- what is where -----------------------------------------------------------------------------------------------

    def shares(self) -> dict[str, list[list[Rectangle]]]:
        """Return, by table, what each rank holds of it, by row and column; empty shards are left out. Collective.

        Raises:
            AssertionError: that is not what the plan says, or does not make up each table exactly.
        """
        local = [(piece.name, Rectangle(*piece[2:6])) for piece in self._sharded.local_pieces() if piece.row_count]
        for piece in self._sharded.local_pieces():
            assert piece.tables.weight(piece.name).shape == (piece.row_count, piece.column_count)
        everyone: list[Any] = [None] * self._world_size
        dist.all_gather_object(everyone, local, group=self._group)
        shares = {
            name: [[held for other, held in of_rank if other == name] for of_rank in everyone] for name in self.tables
        }
        for name, share in shares.items():
            assert share == self._planned(name), f"{name}: {share} is not {self._planned(name)}"
            copies = self._world_size if SHARDINGS[self.plan()[name]].replicated else 1
            elements = sum(held.row_count * held.column_count for of_rank in share for held in of_rank)
            assert elements == copies * self.tables[name].num_rows * self.tables[name].dim, f"{name}: {share}"
        return shares

    def _planned(self, name: str) -> list[list[Rectangle]]:
        sharding = self._sharded.module_sharding_plan[name]
        if SHARDINGS[self.plan()[name]].replicated:
            return [[Rectangle(0, self.tables[name].num_rows, 0, self.tables[name].dim)]] * self._world_size
        planned: list[list[Rectangle]] = [[] for _ in range(self._world_size)]
        for shard in sharding.sharding_spec.shards:
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            if rows:
                planned[shard.placement.rank()].append(Rectangle(row, rows, column, columns))
        return [sorted(held) for held in planned]

    def plan(self) -> dict[str, str]:
        """Return ``table_wise``, ``row_wise`` and so on by table, as the live plan has it."""
        return {name: sharding_name(self._sharded.module_sharding_plan[name].sharding_type) for name in self.tables}


def _placed(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model with everything but its tables, which are on the meta device yet, on ``device``."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.device if tensor.is_meta else device
        return tensor.to(where, dtype if tensor.is_floating_point() else tensor.dtype)

    return model._apply(place)


class _NoWrapper(DataParallelWrapper):
    """Wrapper that leaves dense parameters alone: DDP would average, and hide the order of its sums."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        pass


def _check_held_once(model: nn.Module, tables: Mapping[str, TableConfig]) -> None:
    held = Counter(
        name
        for part in model.modules()
        if isinstance(part, EmbeddingBagCollection | EmbeddingCollection)
        for name in (part.embedding_bags if isinstance(part, EmbeddingBagCollection) else part.embeddings)
    )
    wrong = sorted(name for name in held.keys() | tables.keys() if held[name] != 1 or name not in tables)
    if wrong:
        raise ValueError(
            f"the model must hold each table once, in an EmbeddingBagCollection or an EmbeddingCollection: "
            f"{', '.join(f'{name} {held[name]} times' for name in wrong)}, of tables {', '.join(sorted(tables))}"
        )
