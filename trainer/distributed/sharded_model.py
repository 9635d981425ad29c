"""Sharding of a single-device model: plan, wrap, step, checkpoint. The models' code knows nothing of it.

Every rank holds the whole dense part and some rows of the tables. The loss on a rank is the sum of its samples' losses,
divided by the *global* number of samples. So gradients are summed over ranks, for any share of the batch on a rank:

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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import ModuleSharder, ShardingEnv

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
from trainer.distributed.sharded_state import ShardedState

__all__ = [
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
    model: nn.Module, settings: TableSettings, plan: PlanRequest | None = None, *, device: torch.device | None = None
) -> ShardedModel:
    """Shard the model's embeddings over the ranks of the process group, in place. Collective.

    Args:
        model: the model, with each table on the meta device in exactly one collection. Pooled tables are in one of
            :func:`embedding_bag_collection`, tables of sequences in one of :func:`embedding_collection`.
        settings: the tables, their storage and their training. Dense parameters are converted to the settings'
            ``compute_dtype``, and all ranks get rank 0's values.
        plan: constraints on the sharding plan; None: TorchRec's planner decides for all tables.
        device: device of this rank's rows and dense parameters; None: the CPU.

    Raises:
        ValueError: the plan names an unknown table or an unavailable sharding, the settings' tables are not the
            model's, or the tables do not fit into memory.
        RuntimeError: there is no process group.
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
    """A model whose tables are split over ranks (:func:`shard_model`), around TorchRec's model ``parallel``."""

    def __init__(self, parallel: DistributedModelParallel, tables: Mapping[str, TableConfig], group: dist.ProcessGroup):
        super().__init__(parallel.module, tables, group)
        self.parallel = parallel
        self._perturbed: list[Callable[[], None]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.parallel(*arguments, **keywords)

    def train(self, mode: bool = True) -> ShardedModel:
        self.parallel.train(mode)
        return self

    def eval(self) -> ShardedModel:
        return self.train(False)

    # --- a step ------------------------------------------------------------------------------------------------------

    def set_context(self, step: int, sample_offset: int, global_size: int, part_offset: int = 0) -> None:
        """Set the step and the position in the batch, on which random draws depend.

        Call this before a forward pass in training. ``step`` must be ``completed_steps + 1``. ``sample_offset``: index
        of this rank's first sample in the global batch, of which ranks hold consecutive slices. ``part_offset``: index
        of rank 0's first sample, which is not 0 in later micro-batches of a step.
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
        """Return the names of tables for which backward recorded a non-finite gradient on this rank.

        Ranks may get different answers, so callers must combine them.
        """
        return self._sharded.non_finite_tables()

    def gradient_squared_norm(self) -> float:
        """Return this rank's part of the squared norm of the tables' gradient; the sum over ranks is the whole."""
        return self._sharded.gradient_squared_norm()

    def step_tables(self, k: int, scale: float = 1.0) -> None:
        """Take step ``k`` on this rank's rows, with the gradients that backward recorded, times ``scale``.

        ``k`` must be ``completed_steps + 1``.
        """
        if k != self._completed_steps + 1:
            raise ValueError(f"step {k} does not follow {self._completed_steps} completed steps")
        self._sharded.step(k, scale)
        self._completed_steps = k

    def discard(self) -> None:
        """Drop the gradients that backward recorded for this rank's rows."""
        self._sharded.discard()

    def perturb_tables(self, scale: float) -> None:
        """Add to this rank's rows ``scale`` times the gradients that backward recorded for them.

        Lookups of the same step read the moved rows, until :meth:`restore_tables` (trainer.training.regularizers.sam).
        """
        self._perturbed = self._sharded.perturbed(scale)

    def restore_tables(self) -> None:
        """Undo :meth:`perturb_tables`, to the last bit; do nothing if rows are not perturbed."""
        while self._perturbed:
            self._perturbed.pop()()

    def reset_tables(self) -> None:
        """Reset rows and optimizer state to their initial values (MEDA); this step becomes the rows' birth step.

        The dense part and ``completed_steps`` stay unchanged.
        """
        self._birth_step = self._completed_steps
        self._sharded.reset(self._birth_step)

    # --- placement ---------------------------------------------------------------------------------------------------

    def shares(self) -> dict[str, list[list[Rectangle]]]:
        """Return {table: list of the rectangles that each rank holds}, sorted, without empty rectangles. Collective.

        Raises:
            AssertionError: the rectangles differ from the plan, or do not make up each table exactly.
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
        """Return the sharding of each table in the plan in use: ``table_wise``, ``row_wise`` and so on."""
        return {name: sharding_name(self._sharded.module_sharding_plan[name].sharding_type) for name in self.tables}


def _placed(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model with everything but its tables on ``device``; the tables are still on the meta device.

    Floating-point tensors get the type ``dtype``.
    """

    def place(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.device if tensor.is_meta else device
        return tensor.to(where, dtype if tensor.is_floating_point() else tensor.dtype)

    return model._apply(place)


class _NoWrapper(DataParallelWrapper):
    """Wrapper that does not change dense parameters. DDP would average gradients, and sum them in an unknown order."""

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
