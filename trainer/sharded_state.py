"""What a sharded model holds on this rank, and how it leaves and comes back: gathered on rank 0, saved, loaded.

A checkpoint knows nothing of the plan (:mod:`trainer.checkpoint`); this is the side that does. Calls marked
*collective* must be made by every rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embeddings.config import TableConfig
from embeddings.sharding import ShardedTables
from trainer.checkpoint import Checkpoint, CheckpointError, TableShard, agree, save

# Rows of a table travel to rank 0 in pieces of this many.
_GATHER_ROWS = 1 << 18
_MODEL, _OPTIMIZER = "model/", "optimizer/"


class GatheredTable(NamedTuple):
    """A whole table: ``rows`` float32 [num_rows, dim] and ``last_update_step`` int64 [num_rows] (0 = never touched)."""

    rows: Tensor
    last_update_step: Tensor


class ShardedState:
    """The tables and the dense part of a model whose tables are split over ranks.

    Attributes:
        module: the model, its embeddings replaced by :class:`embeddings.sharding.ShardedTables`.
        tables: the table configs by name.
    """

    def __init__(self, module: nn.Module, tables: Mapping[str, TableConfig], group: dist.ProcessGroup):
        self.module = module
        self.tables = dict(tables)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._completed_steps = 0
        found = [(name, part) for name, part in self.module.named_modules() if isinstance(part, ShardedTables)]
        if len(found) != 1:
            raise ValueError(f"the model must hold one EmbeddingBagCollection, not {len(found)}")
        self._path, self._sharded = found[0]
        self._broadcast_dense()

    @property
    def completed_steps(self) -> int:
        """K, the number of steps that the tables have taken."""
        return self._completed_steps

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) outside the tables, in the model's order."""
        return [(name, p) for name, p in self.module.named_parameters() if not self._of_tables(name)]

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


def _problem(function: Callable[..., None], *arguments: Any) -> str | None:
    """What went wrong in the call, in words."""
    try:
        function(*arguments)
    except (CheckpointError, ValueError) as error:
        return str(error)
    except Exception as error:  # Whatever it is: the other ranks wait to hear of it.
        return f"{type(error).__name__}: {error}"
    return None
