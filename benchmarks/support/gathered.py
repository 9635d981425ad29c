"""A sharded table, whole on rank 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.sharded_state import ShardedState


class GatheredTable(NamedTuple):
    """A whole table: ``rows`` float32 [num_rows, dim] and ``last_update_step`` int64 [num_rows] (0: never touched)."""

    rows: Tensor
    last_update_step: Tensor


def gather_table(sharded: ShardedState, name: str, decay: bool = True) -> GatheredTable | None:
    """Return the whole table with deferred updates applied, on rank 0; None on other ranks. Collective.

    ``decay=False``: only the movement of idle momentum is applied, not pending decay. Published vectors are read so,
    because decay does not change a row's direction.
    """
    local = []
    for piece in sharded.local_pieces():
        if piece.name == name and piece.replica == 0:
            rows = slice(piece.row_start, piece.row_start + piece.row_count)
            columns = slice(piece.column_start, piece.column_start + piece.column_count)
            values = piece.tables.read(name, torch.arange(piece.row_count), decay=decay).float().cpu()
            local.append((rows, columns, values, piece.tables.state(name)["last_update_step"].long().cpu()))
    everyone: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(local, everyone or None)
    if not everyone:
        return None
    table = sharded.tables[name]
    whole = GatheredTable(torch.empty(table.num_rows, table.dim), torch.empty(table.num_rows, dtype=torch.int64))
    for rows, columns, values, steps in (piece for pieces in everyone for piece in pieces):
        whole.rows[rows, columns] = values
        whole.last_update_step[rows] = steps
    return whole
