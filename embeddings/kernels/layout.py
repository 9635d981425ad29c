"""Memory layout of rows, optimizer state and features, shared by kernels and :mod:`embeddings.embedding_tables`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch

from embeddings.optim import RowOptimizer
from embeddings.optim.deferred_update import DeferredUpdateCoefficients
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import Pooling, TableConfig
from embeddings.tables.element_types import ELEMENT_TYPES, ElementType

# Alignment of a table's start, in elements: a cache line of 64 bytes of float32.
_LINE = 16


# For each type of stored rows, the type in which they are summed, updated and returned.
COMPUTE_DTYPES: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): getattr(torch, one.compute) for name, one in ELEMENT_TYPES.items()
}
Bounds = Literal["fatal", "ignore"]


class Record(NamedTuple):
    """The record of one backward pass: the ids of its forward pass, after swaps, and the output's gradient."""

    indices: torch.Tensor  # int32 or int64 [n]
    offsets: torch.Tensor  # int32 or int64 [F * B + 1]
    weights: torch.Tensor | None  # [n]
    grad: torch.Tensor  # [B, sum of dims], without pooling [n, dim]

    def batch_size(self, num_features: int) -> int:
        """Return B, the number of samples."""
        return (self.offsets.numel() - 1) // num_features


@dataclass(frozen=True)
class FeatureDescriptor:
    """A feature that reads ``table`` into output columns [column, column + dim); without pooling ``column`` is 0."""

    number: int
    name: str
    table: int
    column: int
    dim: int
    pooling: Pooling

    @property
    def mean(self) -> bool:
        """True if a bag's sum is divided by the number of its ids that are not padding."""
        return self.pooling == "mean"


class Swaps(NamedTuple):
    """SSE of one forward pass: each feature's configuration (probability 0: no swaps), step and sample offset."""

    configs: tuple[SSEConfig, ...]
    step: int
    sample_offset: int


class Kernel(Protocol):
    """The interface of a backend; ``deferred`` is None if rows are read as they are stored."""

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        deferred: DeferredUpdateCoefficients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Swap ids, read rows and pool them; return (output [B, sum of dims], the ids after swaps).

        Without pooling the output is [n, dim]. ``indices`` and ``offsets`` are int32 or int64, contiguous, and not yet
        validated: the kernel must refuse bad ids and offsets (``Layout.bad_id``, ``bad_offsets``). With bounds
        ``ignore`` an id outside its table adds nothing, and is neither counted by a mean nor swapped nor touched.
        """
        ...

    def read(self, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None) -> torch.Tensor:
        """Return a copy of existing local rows of table ``t``, deferred updates applied, [len(rows), dim]."""
        ...

    def update(
        self, records: Sequence[Record], step: int, deferred: DeferredUpdateCoefficients | None, scale: float = 1.0
    ) -> None:
        """Apply ``scale`` times the sum of the recorded gradients to the touched rows, as step ``step``.

        Steps that can fail, such as allocating memory, precede the first change of a row: an error changes nothing.
        """
        ...

    def squared_norm(self, records: Sequence[Record]) -> float:
        """Return the sum over touched rows of the squared norm of the row's summed gradient, in float64."""
        ...


class Layout:
    """The storage of all tables: flat tensors of weights, of state vectors and of last steps.

    Weights of a table are contiguous [row_count, dim]. Its state vectors are interleaved: row after row of [m | v], so
    that a touched row is two runs of memory, not three. Last steps are stored apart, sixteen to a cache line, because
    every lookup reads one (docs/adr/0046 has the measurement). State with one number for each row is stored apart too.

    Attributes:
        weights: flat, of ``dtype``; vectors, row_values: flat, of ``state_dtype``; last_steps: int32, flat.
        compute_dtype: type of output, gradients and sums: float32 for half rows, else ``dtype``.
        pooled: False if every feature has pooling ``none``.
        weight_base, vector_base, step_base: int64 [T], offset of each table in weights, vectors and last steps.
        descriptors: one FeatureDescriptor for each feature, tables in order.
        on_access: called before rows are handed out, so that a kernel with a cache can write its rows back.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: RowOptimizer,
        seed: int,
        dtype: torch.dtype,
        *,
        state_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        bounds: Bounds = "fatal",
    ) -> None:
        _check_types(dtype, state_dtype, optimizer)
        self.tables, self.optimizer, self.seed, self.dtype = tuple(tables), optimizer, seed, dtype
        self.compute_dtype = COMPUTE_DTYPES[dtype]
        self.state_dtype = state_dtype or self.compute_dtype
        self.device, self.bounds = device or torch.device("cpu"), bounds
        self.row_names = optimizer.row_state_names
        split = next((table for table in self.tables if self.row_names and table.dim != table.total_dim), None)
        if split is not None:
            raise ValueError(
                f"table '{split.name}': {type(optimizer).__name__} takes the mean over all columns of a row, which "
                "can't be split: use table_wise or row_wise sharding, or state for each element"
            )
        self.vector_names = tuple(name for name in optimizer.state_names[:-1] if name not in self.row_names)
        self.descriptors = _descriptors(self.tables)
        self.pooled = _pooled(self.descriptors)
        self.total_dim = (
            sum(descriptor.dim for descriptor in self.descriptors) if self.pooled else self.descriptors[0].dim
        )
        elements = [table.row_count * table.dim for table in self.tables]
        self.weight_base, num_weights = _bases(elements)
        self.vector_base, num_vectors = _bases([len(self.vector_names) * count for count in elements])
        self.step_base, num_steps = _bases([table.row_count for table in self.tables])
        self.weights = _zeros(num_weights, dtype, self.device)
        self.vectors = _zeros(num_vectors, self.state_dtype, self.device)
        self.row_values = _zeros(len(self.row_names) * num_steps, self.state_dtype, self.device)
        self.last_steps = _zeros(num_steps, torch.int32, self.device)
        self.on_access: Callable[[], None] | None = None

    def access(self) -> None:
        """Prepare for reading or writing rows through a view that was taken earlier; call it before such an access."""
        if self.on_access is not None:
            self.on_access()

    def weight(self, t: int) -> torch.Tensor:
        """Return the rows of table ``t`` as stored, [row_count, dim], a contiguous view.

        It is valid until the next lookup or step; after that, call :meth:`access` first.
        """
        self.access()
        table = self.tables[t]
        base = int(self.weight_base[t])
        return self.weights[base : base + table.row_count * table.dim].view(table.row_count, table.dim)

    def vector(self, t: int, name: str) -> torch.Tensor:
        """Return state ``name`` (m, v or sum) of table ``t``, [row_count, dim], a view with a row stride of its own."""
        table, position = self.tables[t], self.vector_names.index(name)
        base, width = int(self.vector_base[t]), len(self.vector_names) * table.dim
        rows = self.vectors[base : base + table.row_count * width].view(table.row_count, width)
        return rows[:, position * table.dim : (position + 1) * table.dim]

    def row_value(self, t: int, name: str) -> torch.Tensor:
        """Return state ``name`` of table ``t``, one number per row, as a contiguous view [row_count]."""
        base = self.row_names.index(name) * len(self.last_steps) + int(self.step_base[t])
        return self.row_values[base : base + self.tables[t].row_count]

    def state(self, t: int, name: str) -> torch.Tensor:
        """Return state ``name`` of table ``t``: a view [row_count, dim], or [row_count, 1] of one number a row."""
        return self.row_value(t, name)[:, None] if name in self.row_names else self.vector(t, name)

    def last_update_step(self, t: int) -> torch.Tensor:
        """Return the step of each row's last touch, 0 = never, int32 [row_count], a contiguous view."""
        base = int(self.step_base[t])
        return self.last_steps[base : base + self.tables[t].row_count]

    def bad_id(self, descriptor: FeatureDescriptor, value: int) -> ValueError:
        """Return the error for an id that is not a row."""
        table = self.tables[descriptor.table]
        shard = (
            ""
            if table.whole
            else f" (this rank's shard, from row {table.row_start} of {table.num_rows}; ids are local)"
        )
        return ValueError(
            f"feature '{descriptor.name}': id {value} is not a row of table '{table.name}', which has "
            f"{table.row_count} rows{shard}: ids must lie in [0, rows); map unknown ids to row 1"
        )

    def bad_offsets(self, descriptor: FeatureDescriptor) -> ValueError:
        """Return the error for a bag that ends before it starts."""
        return ValueError(f"feature '{descriptor.name}': offsets must not decrease")

    def bad_ends(self, first: int, last: int, num_ids: int) -> ValueError:
        """Return the error for offsets that do not start at 0 or do not end at the number of ids."""
        return ValueError(f"offsets must run from 0 to the number of indices, {num_ids}, not from {first} to {last}")

    def check_lookup(self, ids: torch.Tensor, offsets: torch.Tensor, batch_size: int) -> None:
        """Raise ValueError for the first bad offset or id of a lookup, if any is bad."""
        if int(offsets[0]) != 0 or int(offsets[-1]) != ids.numel():
            raise self.bad_ends(int(offsets[0]), int(offsets[-1]), ids.numel())
        for descriptor in self.descriptors:
            bags = offsets[descriptor.number * batch_size : (descriptor.number + 1) * batch_size + 1]
            if bool((bags.diff() < 0).any()):
                raise self.bad_offsets(descriptor)
            span = ids[int(bags[0]) : int(bags[-1])]
            if self.bounds == "ignore" or not span.numel():
                continue
            (low, high), num_rows = torch.aminmax(span), self.tables[descriptor.table].row_count
            if int(low) < 0 or int(high) >= num_rows:
                raise self.bad_id(descriptor, int(span[(span < 0) | (span >= num_rows)][0]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        self.access()
        twin = copy.copy(self)
        if self.on_access is not None:
            # The tables may exceed the GPU's memory, so copy them to the CPU; the copy's kernel then places them.
            twin.on_access, twin.device = None, torch.device("cpu")
        for name in ("weights", "vectors", "row_values", "last_steps"):
            setattr(twin, name, getattr(self, name).to(twin.device, copy=True))
        memo[id(self)] = twin
        return twin


def _check_types(dtype: torch.dtype, state_dtype: torch.dtype | None, optimizer: RowOptimizer) -> None:
    of_rows = [one for one in COMPUTE_DTYPES if _element(one).in_rows]
    for name, given, known in (("dtype", dtype, of_rows), ("state_dtype", state_dtype or dtype, [*COMPUTE_DTYPES])):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, not {given}")
    if state_dtype is None:
        return
    if torch.float64 in (dtype, state_dtype) and dtype != state_dtype:
        raise ValueError(
            f"state_dtype {state_dtype} does not go with rows of {dtype}: rows of torch.float64 need state of "
            "torch.float64, all others state of 32 or 16 bits; leave state_dtype out for the type of the output"
        )
    if optimizer.keeps_mean_square and not _element(state_dtype).holds_mean_squares:
        raise ValueError(
            f"state_dtype {state_dtype} cannot hold {type(optimizer).__name__}'s v: small squares become 0, "
            "and rows are then moved by m or g / eps; use torch.bfloat16 or torch.float32"
        )


def _element(dtype: torch.dtype) -> ElementType:
    return ELEMENT_TYPES[str(dtype).removeprefix("torch.")]


def _descriptors(tables: Sequence[TableConfig]) -> tuple[FeatureDescriptor, ...]:
    descriptors: list[FeatureDescriptor] = []
    column = 0
    for t, table in enumerate(tables):
        for feature, pooling in zip(table.features, table.pooling, strict=True):
            # TableConfig has expanded pooling to one value for each feature.
            how = cast(Pooling, pooling)
            descriptors.append(
                FeatureDescriptor(len(descriptors), feature, t, column if how != "none" else 0, table.dim, how)
            )
            column += table.dim
    return tuple(descriptors)


def _pooled(descriptors: Sequence[FeatureDescriptor]) -> bool:
    unpooled = [descriptor for descriptor in descriptors if descriptor.pooling == "none"]
    if unpooled and len(unpooled) < len(descriptors):
        pooled = [descriptor.name for descriptor in descriptors if descriptor.pooling != "none"]
        raise ValueError(
            f"features {[descriptor.name for descriptor in unpooled]} have pooling none, {pooled} do not: sequences "
            "and bags have outputs of different shape, so they need two EmbeddingTables"
        )
    dims = {descriptor.dim for descriptor in unpooled}
    if len(dims) > 1:
        raise ValueError(
            f"features without pooling have dims {sorted(dims)}: rows of one output [n, dim] need one dim, so give "
            "each dim an EmbeddingTables of its own"
        )
    return not unpooled


def _bases(counts: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return the start of each table in flat storage, int64 [T], each at a cache line, and the total size."""
    ends = np.cumsum([0, *[-(-count // _LINE) * _LINE for count in counts]])
    return ends[:-1].astype(np.int64), int(ends[-1])


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that start at a cache line.

    On a CPU numpy allocates the zeros: unlike torch it asks for huge pages, which help because rows are read at random.
    """
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    size = dtype.itemsize
    raw = np.zeros(count * size + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return torch.from_numpy(raw[skip : skip + count * size]).view(dtype)
