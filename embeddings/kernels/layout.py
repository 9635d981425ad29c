"""Where rows, state and features lie: what both kernels and :class:`embeddings.tables.EmbeddingTables` share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from embeddings.config import TableConfig
from embeddings.decay import IdleCoefficients
from embeddings.optim import RowOptimizer

# Elements in a cache line of the narrowest type.
_LINE = 16


class Record(NamedTuple):
    """One backward: the (swapped) ids of one forward and the gradient of its output."""

    indices: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int64 [F * B + 1]
    weights: torch.Tensor | None  # [n]
    grad: torch.Tensor  # [B, sum of dims]


@dataclass(frozen=True)
class FeatureSlot:
    """Feature ``number`` reads ``table`` into output columns [column, column + dim)."""

    number: int
    name: str
    table: int
    column: int
    dim: int
    mean: bool


class Swaps(NamedTuple):
    """SSE-SE of one forward: probability for each feature, and where in training it is."""

    probabilities: tuple[float, ...]
    step: int
    sample_offset: int


class Kernel(Protocol):
    """The interface of a backend. ``idle`` is None where reading a row needs no correction."""

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        idle: IdleCoefficients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Swap, read and pool: (output [B, sum of dims], the ids looked up)."""
        ...

    def read(self, t: int, rows: torch.Tensor, idle: IdleCoefficients | None) -> torch.Tensor:
        """Local rows of table ``t`` as of now, a copy [len(rows), dim]; rows are known to exist."""
        ...

    def update(self, records: Sequence[Record], step: int, idle: IdleCoefficients | None) -> None:
        """Applies the sum of the recorded gradients to the touched rows, as step ``step``."""
        ...


class Layout:
    """The storage of all tables: flat tensors of weights, of state vectors and of last steps.

    Weights of a table are contiguous [row_count, dim]. Its state vectors are interleaved: row after row of [m | v], so
    that a touched row is two runs of memory, not three. Last steps stand apart, sixteen to a cache line, because every
    lookup reads one (docs/adr/0002 has the measurement).

    Attributes:
        weights, vectors, row_values: flat tensors of ``dtype``; last_steps: int32, flat.
        weight_base, vector_base, step_base: int64 [T], where each table starts in them.
        slots: one FeatureSlot for each feature, tables in order.
    """

    def __init__(self, tables: Sequence[TableConfig], optimizer: RowOptimizer, seed: int, dtype: torch.dtype) -> None:
        self.tables, self.optimizer, self.seed, self.dtype = tuple(tables), optimizer, seed, dtype
        self.row_names = optimizer.row_state_names
        split = next((table for table in self.tables if self.row_names and table.dim != table.total_dim), None)
        if split is not None:
            raise ValueError(
                f"table '{split.name}': {type(optimizer).__name__} takes the mean over all columns of a row, which "
                "can't be split: use table_wise or row_wise sharding, or Adagrad"
            )
        self.vector_names = tuple(name for name in optimizer.state_names[:-1] if name not in self.row_names)
        self.slots = _slots(self.tables)
        self.total_dim = sum(slot.dim for slot in self.slots)
        elements = [table.row_count * table.dim for table in self.tables]
        self.weight_base, num_weights = _bases(elements)
        self.vector_base, num_vectors = _bases([len(self.vector_names) * count for count in elements])
        self.step_base, num_steps = _bases([table.row_count for table in self.tables])
        self.weights = _zeros(num_weights, dtype)
        self.vectors = _zeros(num_vectors, dtype)
        self.row_values = _zeros(len(self.row_names) * num_steps, dtype)
        self.last_steps = _zeros(num_steps, torch.int32)

    def weight(self, t: int) -> torch.Tensor:
        """Rows of table ``t`` as stored, [row_count, dim], a contiguous view."""
        table = self.tables[t]
        base = int(self.weight_base[t])
        return self.weights[base : base + table.row_count * table.dim].view(table.row_count, table.dim)

    def vector(self, t: int, name: str) -> torch.Tensor:
        """State ``name`` (m, v or sum) of table ``t``, [row_count, dim], a view with a row stride of its own."""
        table, position = self.tables[t], self.vector_names.index(name)
        base, width = int(self.vector_base[t]), len(self.vector_names) * table.dim
        rows = self.vectors[base : base + table.row_count * width].view(table.row_count, width)
        return rows[:, position * table.dim : (position + 1) * table.dim]

    def row_value(self, t: int, name: str) -> torch.Tensor:
        """State ``name`` of table ``t`` that is one number for each row, [row_count], a contiguous view."""
        base = self.row_names.index(name) * len(self.last_steps) + int(self.step_base[t])
        return self.row_values[base : base + self.tables[t].row_count]

    def last_update_step(self, t: int) -> torch.Tensor:
        """The step of each row's last touch, 0 = never, int32 [row_count], a contiguous view."""
        base = int(self.step_base[t])
        return self.last_steps[base : base + self.tables[t].row_count]

    def bad_id(self, slot: FeatureSlot, value: int) -> ValueError:
        """The error for an id that is not a row."""
        table = self.tables[slot.table]
        shard = (
            ""
            if table.whole
            else f" (this rank's shard, from row {table.row_start} of {table.num_rows}; ids are local)"
        )
        return ValueError(
            f"feature '{slot.name}': id {value} is not a row of table '{table.name}', which has {table.row_count} "
            f"rows{shard}: ids must lie in [0, rows); map unknown ids to row 1"
        )

    def bad_offsets(self, slot: FeatureSlot) -> ValueError:
        """The error for a bag that ends before it starts."""
        return ValueError(f"feature '{slot.name}': offsets must not decrease")

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        twin = copy.copy(self)
        for name in ("weights", "vectors", "row_values", "last_steps"):
            setattr(twin, name, getattr(self, name).clone())
        memo[id(self)] = twin
        return twin


def _slots(tables: Sequence[TableConfig]) -> tuple[FeatureSlot, ...]:
    slots: list[FeatureSlot] = []
    column = 0
    for t, table in enumerate(tables):
        for feature, pooling in zip(table.features, table.pooling, strict=True):
            slots.append(FeatureSlot(len(slots), feature, t, column, table.dim, pooling == "mean"))
            column += table.dim
    return tuple(slots)


def _bases(counts: Sequence[int]) -> tuple[np.ndarray, int]:
    """Where each table starts, at a cache line, and the sum."""
    ends = np.cumsum([0, *[-(-count // _LINE) * _LINE for count in counts]])
    return ends[:-1].astype(np.int64), int(ends[-1])


def _zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that start at a cache line. Numpy asks for huge pages, torch does not: rows are read at random."""
    size = torch.empty(0, dtype=dtype).numpy()
    raw = np.zeros(count + 64 // size.itemsize, dtype=size.dtype)
    skip = -raw.ctypes.data % 64 // raw.itemsize
    return torch.from_numpy(raw[skip : skip + count])
