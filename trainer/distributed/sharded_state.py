"""State of a sharded model on this rank: saved and loaded.

Checkpoints do not depend on the sharding plan (:mod:`trainer.checkpoint.format`); this module translates between them
and the ranks' shards. Calls marked *collective* must be made by every rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embeddings.sharding import LocalPiece, ModelTables
from embeddings.tables.config import TableConfig
from trainer.checkpoint.agreement import agree
from trainer.checkpoint.async_writer import BackgroundSaver
from trainer.checkpoint.format import Checkpoint, CheckpointError, TableShard, save
from trainer.checkpoint.record import TablesRecord
from trainer.checkpoint.row_signature import deferred_update_fields, differences, row_signature
from trainer.storage.folders import Folders

if TYPE_CHECKING:
    from embeddings.optim import RowOptimizer
    from trainer.models.base import RankingModel

# Rows of a table are gathered and loaded in chunks of this many.
_CHUNK_ROWS = 1 << 18
MODEL, OPTIMIZER = "model/", "optimizer/"


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of the parameters and buffers outside a model's tables."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, value.data) for name, value in named if not name.startswith("embeddings.")]


def differing(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """Return the names of dense tensors that only model or only checkpoint has, or that differ in shape.

    ``tensors``: the model's, with the prefix MODEL. ``saved``: all dense tensors of the checkpoint.
    """
    differ = sorted(tensors.keys() ^ {name for name in saved if name.startswith(MODEL)})
    return differ + sorted(name for name in tensors.keys() & saved.keys() if tensors[name].shape != saved[name].shape)


class ShardedState:
    """The tables and the dense part of a model whose tables are split over ranks.

    In ``module``, the model, embeddings are replaced by :class:`embeddings.sharding.ShardedTables`.
    """

    def __init__(self, module: RankingModel, tables: Mapping[str, TableConfig], group: dist.ProcessGroup):
        self.module = module
        self.tables = dict(tables)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._completed_steps = self._birth_step = 0
        self._sharded = ModelTables(module)
        for _, value in self._dense_tensors():
            dist.broadcast(value, 0, group=self._group)

    @property
    def completed_steps(self) -> int:
        """The number of steps that the tables have taken, called K in formulas."""
        return self._completed_steps

    @property
    def row_optimizer(self) -> RowOptimizer:
        """The optimizer of the tables."""
        return self._sharded.settings.optimizer

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) outside the tables, in the model's order."""
        return list(self._dense_parameters)

    @cached_property
    def _dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        # Computed once: every step asks several times, and a walk through TorchRec's modules takes .2 ms.
        return [(name, p) for name, p in self.module.named_parameters() if not self._of_tables(name)]

    def local_pieces(self) -> list[LocalPiece]:
        """Return this rank's piece of every table, sorted by name, row_start and column_start."""
        return self._sharded.local_pieces()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_for_checkpoint(
        self, dense_optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[list[TableShard], dict[str, Tensor]]:
        """Return this rank's rows with their optimizer state, and {name: dense tensor} of model and optimizer."""
        shards = [
            TableShard(
                piece.name,
                self.tables[piece.name].num_rows,
                piece.row_start,
                piece.tables.weight(piece.name),
                piece.tables.state(piece.name),
                piece.column_start,
                self.tables[piece.name].dim,
            )
            for piece in self._sharded.local_pieces()
            if piece.replica == 0
        ]
        dense = {f"{MODEL}{name}": value for name, value in self._dense_tensors()}
        if dense_optimizer is not None:
            dense |= self._optimizer_tensors(dense_optimizer)
        return shards, dense

    def save(
        self,
        directory: Path | str,
        *,
        dense_optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        attached: Mapping[str, Path] | None = None,
        keep_last: int = 3,
        saver: BackgroundSaver | None = None,
        fence: Callable[[], None] = lambda: None,
        folders: Folders | None = None,
    ) -> Path | None:
        """Write a checkpoint of ``completed_steps``, and return its path. Collective.

        Other arguments are as in :func:`trainer.checkpoint.format.save`. With a ``saver`` the checkpoint is only copied
        in memory, the saver writes it in the background, and the result is None.
        """
        shards, dense = self.state_for_checkpoint(dense_optimizer)
        record = TablesRecord(
            completed_steps=self._completed_steps,
            birth_step=self._birth_step,
            rows=row_signature(self._sharded.settings, self._completed_steps),
        )
        arguments: dict[str, Any] = {
            "step": self._completed_steps,
            "tables": shards,
            "dense": dense if self._rank == 0 else {},
            "extra": {**record.to_extra(), **(extra or {})},
            "attached": attached,
            "keep_last": keep_last,
            "fence": fence,
            "folders": folders,
        }
        if saver is not None:
            saver.save(directory, **arguments)
            return None
        return save(directory, **arguments, group=self._group)

    def load_from(
        self,
        checkpoint: Checkpoint,
        *,
        dense_optimizer: torch.optim.Optimizer | None = None,
        verify: bool = True,
        parent_rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load rows, state, dense tensors and the number of completed steps from a checkpoint. Collective.

        Each rank reads the rows and columns that it holds, whatever plan the checkpoint was written with.

        Args:
            checkpoint: the checkpoint to read.
            dense_optimizer: optimizer whose state is loaded too; None: its state in the checkpoint is ignored.
            verify: True if rank 0 is to check every byte first.
            parent_rows: for a warm start, by table the number of the checkpoint's row that each row continues, int64
                [num_rows]. Numbers must be distinct, except -1 for new rows, which stay unchanged. None: each row
                continues the row of the same number.

        Raises:
            CheckpointError: on every rank if on any the checkpoint is damaged, or has other tables, another model or
                another row optimizer. The model's state is then undefined.
        """
        where = f"{checkpoint.path} cannot be loaded"
        if verify:
            agree((None, _problem(checkpoint.verify) if self._rank == 0 else None), where, self._group)
        agree((None, _problem(self._load, checkpoint, dense_optimizer, parent_rows)), where, self._group)

    def load_dense(self, checkpoint: Checkpoint) -> None:
        """Load only the model's dense tensors from a checkpoint.

        Raises:
            CheckpointError: names or shapes of the tensors differ from the model's.
        """
        self._load_dense(checkpoint.read_dense(), None)

    def agreed(self, where: str, function: Callable[[], None]) -> None:
        """Call ``function`` on every rank. Collective.

        Raises:
            CheckpointError: on every rank if the call fails on any; the message begins with ``where``.
        """
        agree((None, _problem(function)), where, self._group)

    def _load(
        self,
        checkpoint: Checkpoint,
        dense_optimizer: torch.optim.Optimizer | None,
        parent_rows: Mapping[str, Tensor] | None,
    ) -> None:
        self._check_tables(checkpoint, parent_rows)
        for piece in self._sharded.local_pieces():
            for rows, first, count, taken, into in _row_ranges(piece, parent_rows):
                stored = checkpoint.read_rows(piece.name, first, count, piece.column_start, piece.column_count)
                _put(piece, rows, stored, taken, into)
        self._load_dense(checkpoint.read_dense(), dense_optimizer)
        record = TablesRecord.of(checkpoint)
        self._completed_steps, self._birth_step = record.completed_steps, record.birth_step
        for kernel in self._sharded.kernels():
            kernel.discard()
            kernel.birth_step = self._birth_step
            kernel.completed_steps = self._completed_steps

    def _check_tables(self, checkpoint: Checkpoint, parent_rows: Mapping[str, Tensor] | None) -> None:
        local, given = {name: table.num_rows for name, table in self.tables.items()}, checkpoint.tables
        # A warm start may have tables of features that the parent did not read.
        if (given != local) if parent_rows is None else (given.keys() - local.keys()):
            raise CheckpointError(f"it holds tables {given}, the model has {local}")
        for name, parents in (parent_rows or {}).items():
            known, there = parents[parents >= 0], given.get(name, 0)
            known = known if bool((known[1:] > known[:-1]).all()) else known.sort().values
            distinct = bool((known[1:] > known[:-1]).all()) and (not len(known) or int(known[-1]) < there)
            if len(parents) != local[name] or not distinct:
                raise CheckpointError(
                    f"parent_rows of table '{name}' must have {local[name]} distinct entries below {there}"
                )
        settings = self._sharded.settings
        record = TablesRecord.of(checkpoint)
        # A warm start may change settings that no stored row depends on.
        fields = None if parent_rows is None else deferred_update_fields(settings.optimizer)
        differ = differences(record.rows, row_signature(settings, record.completed_steps), fields)
        if differ:
            raise CheckpointError(f"its rows were trained with another {', '.join(differ)}: use the same")

    def _load_dense(self, saved: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        local = {f"{MODEL}{name}": value for name, value in self._dense_tensors()}
        if differ := differing(local, saved):
            raise CheckpointError(f"the dense parts differ from the model's in {', '.join(differ)}")
        with torch.no_grad():
            for name, value in local.items():
                value.copy_(saved[name])
        if optimizer is None:
            return
        optimizer.state.clear()
        parameters = dict(self.dense_parameters())
        for name, value in saved.items():
            if name.startswith(OPTIMIZER):
                owner, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                parameter = parameters[owner]
                # torch's optimizers count steps on the CPU, wherever the parameter is.
                optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)

    def dense_buffers(self) -> list[Tensor]:
        """Return the model's buffers outside its tables, such as running moments."""
        return [value for name, value in self.module.named_buffers() if not self._of_tables(name)]

    def _dense_tensors(self) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) of parameters and buffers outside the tables."""
        buffers = [(name, value) for name, value in self.module.named_buffers() if not self._of_tables(name)]
        return [*((name, parameter.data) for name, parameter in self.dense_parameters()), *buffers]

    def _optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the state tensors of a dense optimizer, named OPTIMIZER + parameter + "/" + state.

        Hyperparameters are left out, because a resumed job takes them from its spec.
        """
        names = {id(parameter): name for name, parameter in self.dense_parameters()}
        tensors: dict[str, Tensor] = {}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"{type(optimizer).__name__} keeps '{key}' as {type(value).__name__}, not a tensor")
                tensors[f"{OPTIMIZER}{names[id(parameter)]}/{key}"] = value
        return tensors

    def _of_tables(self, name: str) -> bool:
        return any(name.startswith(f"{path}.") or path == "" for path in self._sharded.paths)


def _chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, _CHUNK_ROWS):
        yield slice(start, min(start + _CHUNK_ROWS, num_rows))


def _row_ranges(
    piece: LocalPiece, parent_rows: Mapping[str, Tensor] | None
) -> Iterator[tuple[slice, int, int, Tensor | None, Tensor | None]]:
    """Yield the ranges of checkpoint rows to read for a piece, chunk by chunk.

    Each range is (rows of the piece to write, first row of the checkpoint, number of rows, taken, into). ``taken`` and
    ``into`` are None if all read rows are written in order. Else row ``taken[i]`` of the read rows is written to row
    ``into[i]`` of the piece.
    """
    if parent_rows is None:
        for rows in _chunks(piece.row_count):
            yield rows, piece.row_start + rows.start, rows.stop - rows.start, None, None
        return
    parents = parent_rows[piece.name][piece.row_start : piece.row_start + piece.row_count]
    known = torch.nonzero(parents >= 0).flatten()
    ascending = parents[known]
    if bool((ascending[1:] < ascending[:-1]).any()):
        known = known[torch.argsort(ascending)]
    for chunk in _chunks(len(known)):
        into = known[chunk]
        first = int(parents[into[0]])
        taken = parents[into] - first
        yield slice(0, piece.row_count), first, int(taken[-1]) + 1, taken, into


def _put(
    piece: LocalPiece, rows: slice, stored: tuple[Tensor, dict[str, Tensor]], taken: Tensor | None, into: Tensor | None
) -> None:
    """Write read rows with their state into ``rows`` of the piece; ``taken``, ``into``: see :func:`_row_ranges`."""
    weight, state = stored
    local = {"weight": piece.tables.weight(piece.name), **piece.tables.state(piece.name)}
    given = {"weight": weight, **state}
    if local.keys() != given.keys():
        raise CheckpointError(f"table '{piece.name}' has state {sorted(given)}, the model's keeps {sorted(local)}")
    for name, target in local.items():
        if taken is None and target.dtype != given[name].dtype:
            raise CheckpointError(
                f"{name} of table '{piece.name}' is {given[name].dtype}, the model's is {target.dtype}: use the same"
            )
        if taken is None:
            target[rows].copy_(given[name])
        else:
            assert into is not None
            target[rows][into.to(target.device)] = given[name][taken].to(target)


def _problem(function: Callable[..., None], *arguments: Any) -> str | None:
    """Call the function; return the message of its error, None if it raised none."""
    try:
        function(*arguments)
    except (CheckpointError, ValueError) as error:
        return str(error)
    except Exception as error:  # any error: the other ranks wait for this rank's outcome
        return f"{type(error).__name__}: {error}"
    return None
