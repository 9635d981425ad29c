"""A group of embedding tables: pooled lookup, SSE, deferred updates and one fused row optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from embeddings.kernels.backends import Backend, default_backend, device_of, kernel_of
from embeddings.kernels.layout import Bounds, FeatureDescriptor, Layout, Record, Swaps
from embeddings.kernels.reference import read_rows_without_decay
from embeddings.optim import RowOptimizer
from embeddings.optim.deferred_update import deferred_update_coefficients
from embeddings.sse.config import SSEConfig
from embeddings.sse.swap import check_sse
from embeddings.tables.config import TableConfig
from embeddings.tables.initialization import chunks_to_write, initial_rows, initial_rows_of

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_STEP = torch.iinfo(torch.int32).max


class EmbeddingTables(torch.nn.Module):
    """A group of embedding tables with one row optimizer and one backend.

    Rows are not ``torch.nn.Parameter``: dense optimizers, DDP and ``state_dict`` do not see them. Save and restore
    ``weight``, ``state``, ``completed_steps`` and ``birth_step`` yourself.

    All arguments but the first two have defaults and are given by keyword.

    Args:
        tables: one config for each table; features are unique over all of them.
        optimizer: the row optimizer that :meth:`step` applies.
        sse: swap probability and graph of each feature whose ids Stochastic Shared Embeddings (SSE) swaps, by feature
            name. Swaps happen in training mode only.
        seed: seed of the initial rows and the SSE draws.
        backend: ``cpu`` (compiled, parallel over samples and rows), ``triton`` (for the GPU named by ``device``),
            ``fbgemm`` (its fused SGD, Adagrad and rowwise Adagrad) or ``reference`` (plain torch); None:
            :func:`default_backend` of the device.
        dtype: type of stored rows, one in embeddings.tables.element_types. Output, gradients and sums are float32
            for half-precision rows, which are stored with stochastic rounding, and ``dtype`` otherwise.
        state_dtype: type of optimizer state; torch.float64 only if rows are float64 too. Left out: the type of the
            output.
        device: device that holds the tables; left out: the CPU, or for ``triton`` the current GPU.
        bounds: an id outside its table is an error (``fatal``), or counts as padding (``ignore``): it adds nothing, is
            not counted by a mean, and touches nothing.
        sse_outside: True if the caller swaps ids itself (:func:`embeddings.kernels.swap.swap`), because rows are split
            over ranks.

    Attributes:
        features: the features in the order that ``forward`` takes and returns them.
        birth_step: number of steps that were completed when rows and state were last set to initial values. Rows and
            optimizer count their steps from it. Save and restore it with ``completed_steps``.

    Raises:
        ValueError: no table, names that are not unique, ``sse`` of a feature that no table has or whose rows are split,
            or types, a device and a backend that do not go together.

    Example:
        >>> import torch
        >>> from embeddings import EmbeddingTables, TableConfig
        >>> from embeddings.optim import AdamAR
        >>> tables = EmbeddingTables([TableConfig("item", 1000, 4, ("item",))], AdamAR(learning_rate=0.01, alpha=1e-4))
        >>> pooled = tables(torch.tensor([17, 42, 42]), torch.tensor([0, 1, 3]))  # two bags: [17] and [42, 42]
        >>> pooled.shape  # [bags, sum of dims]
        torch.Size([2, 4])
        >>> pooled.sum().backward()  # records the gradient, changes nothing
        >>> tables.step(1)  # applies what was recorded, once
        >>> tables.eval()(torch.tensor([17]), torch.tensor([0, 1])).detach().round(decimals=4)
        tensor([[-0.0100, -0.0100, -0.0100, -0.0100]])
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: RowOptimizer,
        *,
        sse: Mapping[str, SSEConfig] | None = None,
        seed: int = 0,
        backend: Backend | None = None,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        bounds: Bounds = "fatal",
        sse_outside: bool = False,
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("EmbeddingTables needs at least one table")
        if bounds not in ("fatal", "ignore"):
            raise ValueError(f"bounds must be 'fatal' or 'ignore', not '{bounds}'")
        self.optimizer = optimizer
        backend = backend or default_backend(device)
        where = device_of(backend, device)
        # FBGEMM's module for GPUs replaces this storage by its own, which may be larger than the GPU's memory.
        home = torch.device("cpu") if backend == "fbgemm" else where
        self.layout = Layout(tables, optimizer, seed, dtype, state_dtype=state_dtype, device=home, bounds=bounds)
        self.features: tuple[str, ...] = tuple(slot.name for slot in self.layout.descriptors)
        self._numbers = {table.name: t for t, table in enumerate(self.layout.tables)}
        if len(self._numbers) != len(self.layout.tables) or len(set(self.features)) != len(self.features):
            raise ValueError(
                f"tables {[table.name for table in tables]} and features {self.features} must each be unique"
            )
        self._sample_offset = 0
        self._records: list[Record] = []
        self._idle = deferred_update_coefficients(optimizer, str(self.layout.compute_dtype).removeprefix("torch."))
        self._sse = self._check_sse(dict(sse or {}), sse_outside)
        self._anchor = torch.zeros((), requires_grad=True)
        self._kernel = kernel_of(backend, self.layout, where)
        # Write zeros to allocate the memory now, not page by page during steps; dynamic tables allocate as they grow.
        self._begin(0, [table for table in self.layout.tables if not table.grows])

    def _check_sse(self, sse: Mapping[str, SSEConfig], sse_outside: bool) -> tuple[SSEConfig, ...] | None:
        unknown = sorted(set(sse) - set(self.features))
        if unknown:
            raise ValueError(f"sse names features {unknown}, which no table has (there are {list(self.features)})")
        for slot in self.layout.descriptors:
            table = self.layout.tables[slot.table]
            if slot.name in sse:
                check_sse(table, slot.name, sse[slot.name])
            if slot.name in sse and not table.whole and not sse_outside:
                raise ValueError(
                    f"feature '{slot.name}': the rows of table '{table.name}' are split, so SSE can't swap inside the "
                    "lookup: call embeddings.kernels.swap.swap before ids are distributed, and pass sse_outside=True"
                )
        if sse_outside or all(config.probability == 0.0 for config in sse.values()):
            return None
        return tuple(sse.get(name, SSEConfig(0.0)) for name in self.features)

    def reset(self, completed_steps: int = 0) -> None:
        """Set initial rows and fresh optimizer state, as at step 0.

        The optimizer then counts its steps from ``completed_steps`` on. Multi-epoch learning with data augmentation
        (MEDA) begins each epoch anew in this way.
        """
        self._records.clear()
        self._begin(completed_steps, self.layout.tables)

    def _begin(self, completed_steps: int, cleared: Sequence[TableConfig]) -> None:
        """Set initial rows, after clearing the tables in ``cleared``."""
        for table in cleared:
            for rows in (self.weight(table.name), *self.state(table.name).values()):
                rows.zero_()
        self.birth_step = self.completed_steps = completed_steps
        # Fresh tables cannot be ahead; to check them would touch the memory of every row.
        self._may_be_ahead = False
        for t, table in enumerate(self.layout.tables):
            weight = self.layout.weight(t)
            for start, end in chunks_to_write(table):
                weight[start:end] = torch.from_numpy(initial_rows(table, self.layout.seed, start, end))

    @property
    def completed_steps(self) -> int:
        """K, the number of steps applied; saved and restored with the tables."""
        return self._completed_steps

    @completed_steps.setter
    def completed_steps(self, completed_steps: int) -> None:
        self._completed_steps, self._may_be_ahead = completed_steps, True

    # --- training ----------------------------------------------------------------------------------------------------

    def set_context(self, step: int, sample_offset: int = 0) -> None:
        """Set the number of the next step, and the index in the global batch of this rank's first sample.

        Raises:
            ValueError: ``step`` does not follow ``completed_steps``.
        """
        if step != self.completed_steps + 1:
            raise ValueError(f"step {step} does not follow {self.completed_steps} completed steps")
        self._sample_offset = sample_offset

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up rows as they are after the completed steps, and pool them.

        Args:
            indices: local row numbers, int32 or int64 [n], feature by feature (in the order of ``features``), sample by
                sample.
            offsets: int32 or int64 [F * B + 1], where each bag starts in ``indices``.
            per_sample_weights: optional [n]; a row of weight 0 adds nothing and is not touched.

        Returns:
            [B, sum of dims], the features side by side. ``mean`` divides by the number of ids that are not padding; an
            empty bag gives 0. Without pooling [n, dim]: a row for each id, zeros for padding.

        Raises:
            ValueError: an id outside its table (unless ``bounds`` is ``ignore``; on a GPU the next :meth:`step` raises
                it), or shapes and types that do not fit.
        """
        batch_size = self._check_input(indices, offsets, per_sample_weights)
        output: torch.Tensor = _Lookup.apply(
            self._anchor, self, indices.contiguous(), offsets.contiguous(), per_sample_weights, batch_size
        )
        if self.layout.device.type != "cpu" and not torch.is_grad_enabled() and hasattr(self._kernel, "check"):
            # Without gradients no step follows that would report a bad id.
            self._kernel.check()
        return output

    def _check_input(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> int:
        num_features = len(self.features)
        if indices.dtype not in INDEX_DTYPES or offsets.dtype not in INDEX_DTYPES:
            raise ValueError(f"indices and offsets must be int32 or int64, not {indices.dtype} and {offsets.dtype}")
        if indices.dim() != 1 or offsets.dim() != 1 or offsets.numel() < 1 or (offsets.numel() - 1) % num_features:
            raise ValueError(
                f"indices must be [n] and offsets [F * B + 1] with F = {num_features} features, "
                f"not {list(indices.shape)} and {list(offsets.shape)}"
            )
        if weights is not None and (weights.shape != indices.shape or weights.requires_grad):
            raise ValueError(
                "per_sample_weights must have the shape of indices and need no gradient: no gradient of them is "
                "computed, so give weights.detach(), or multiply rows looked up without pooling"
            )
        return (offsets.numel() - 1) // num_features

    def _idle_now(self) -> Any:
        """Return the kernel's coefficients of deferred updates; None if the optimizer does not change idle rows."""
        if self._may_be_ahead:
            last = int(self.layout.last_steps.max()) if self.layout.last_steps.numel() else 0
            if last > self.completed_steps - self.birth_step:
                # Compiled kernels would read memory in front of their arrays of coefficients.
                raise ValueError(
                    f"a row was last touched at step {last}, after the {self.completed_steps} completed steps: restore "
                    "completed_steps together with the tables"
                )
            self._may_be_ahead = False
        return None if self._idle is None else self._idle.at(self.completed_steps - self.birth_step)

    def _record(self, record: Record) -> None:
        """Keep ids and output gradient of one backward pass until the next :meth:`step`.

        Data-parallel tables keep other ranks' records too (embeddings.sharding.replicas).
        """
        self._records.append(record)

    @property
    def num_records(self) -> int:
        """The number of backward passes that wait for :meth:`step`."""
        return len(self._records)

    def gradient_is_finite(self) -> bool:
        """Return True if every recorded output gradient is finite."""
        return all(_is_finite(record.grad) for record in self._records)

    def non_finite_tables(self) -> list[str]:
        """Return the names of the tables with a recorded output gradient that is not finite."""
        return sorted(
            {
                self.layout.tables[slot.table].name
                for record in self._records
                if not _is_finite(record.grad)
                for slot in self.layout.descriptors
                if not _is_finite(self._gradient_of(slot, record))
            }
        )

    def _gradient_of(self, slot: FeatureDescriptor, record: Record) -> torch.Tensor:
        if self.layout.pooled:
            return record.grad[:, slot.column : slot.column + slot.dim]
        batch_size = record.batch_size(len(self.features))
        ends = record.offsets[slot.number * batch_size], record.offsets[(slot.number + 1) * batch_size]
        return record.grad[int(ends[0]) : int(ends[1])]

    def gradient_squared_norm(self) -> float:
        """Return the sum over all touched rows of |g|^2, where g is the sum of the row's recorded gradients.

        To clip to a global norm, add these sums over all groups of tables and ranks, and take the root; see ``scale``
        of :meth:`step`.
        """
        return self._kernel.squared_norm(self._records) if self._records else 0.0

    def step(self, k: int, scale: float = 1.0) -> None:
        """Apply the gradients that backward recorded since the last step, as step ``k`` = completed_steps + 1.

        Every gradient is first multiplied by ``scale``, to clip to a global norm. If this raises, rows, state and
        recorded gradients are unchanged: call it again, or give the step up with :meth:`discard`.

        Raises:
            ValueError: ``k`` does not follow ``completed_steps``, or does not fit last_update_step, which is int32; on
                a GPU also a bad id of a lookup before.
            MemoryError: there is not enough memory to sort the ids of the step.
        """
        if k != self.completed_steps + 1:
            raise ValueError(f"step {k} does not follow {self.completed_steps} completed steps")
        if k > MAX_STEP:
            raise ValueError(f"step {k} does not fit last_update_step, which is int32: {MAX_STEP} steps are the most")
        if self._records:
            self._kernel.update(self._records, k - self.birth_step, self._idle_now(), scale)
        self._records.clear()
        self._completed_steps = k

    def discard(self) -> None:
        """Drop the gradients that backward recorded, and any report of bad ids from their lookups."""
        self._records.clear()
        if hasattr(self._kernel, "forget"):
            self._kernel.forget()

    # --- rows --------------------------------------------------------------------------------------------------------

    def weight(self, name: str) -> torch.Tensor:
        """Return the rows of table ``name`` as stored, a view [row_count, dim]; a lookup may read other values.

        Stored rows lack their deferred updates, and with dense moments a row is stored ahead of its momentum
        (:mod:`embeddings.optim.deferred_update`). So stored rows have a meaning only together with the state and the
        settings of the optimizer.
        """
        return self.layout.weight(self._number(name))

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return views of table ``name``'s optimizer state, keyed by the part's name; raise ValueError if unknown.

        The parts are m and v, or v, or sum, each [rows, dim], and last_update_step, int32 [rows]. RowwiseAdagrad's sum
        and RowwiseAdam's v are [rows].
        """
        t = self._number(name)
        state = {vector: self.layout.vector(t, vector) for vector in self.layout.vector_names}
        state |= {name: self.layout.row_value(t, name) for name in self.layout.row_names}
        state["last_update_step"] = self.layout.last_update_step(t)
        return state

    def read(self, name: str, rows: torch.Tensor | None = None, *, decay: bool = True) -> torch.Tensor:
        """Return a copy of rows, [len(rows), dim], with the deferred updates of all completed steps applied.

        ``rows``, int64, are local row numbers; None: all rows. With ``decay=False`` the deferred movement by momentum
        is applied, but not the decay since the last touch, as for published directions. The stored rows do not change.

        Raises:
            ValueError: no such table, or a row outside it.
        """
        t = self._number(name)
        if rows is None:
            rows = torch.arange(self.layout.tables[t].row_count)
        else:
            self._check_rows(t, rows, "read")
        rows, idle = rows.to(self.layout.device).contiguous(), self._idle_now()
        if decay:
            return self._kernel.read(t, rows, idle)
        return read_rows_without_decay(self.layout, t, rows, idle)

    def load(self, name: str, weight: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the stored rows and the optimizer state of a table; the caller sets ``completed_steps`` as well.

        Raises:
            ValueError: no such table, a state of other parts than this optimizer's, or a part of another shape.
        """
        local: dict[str, Any] = {"weight": self.weight(name), **self.state(name)}
        given: dict[str, Any] = {"weight": weight, **state}
        if set(local) != set(given):
            raise ValueError(f"table '{name}': state must hold {sorted(local)}, not {sorted(given)}")
        for part, target in local.items():
            if target.shape != given[part].shape:
                shape = list(given[part].shape)
                raise ValueError(f"table '{name}': {part} must have shape {list(target.shape)}, not {shape}")
        for part, target in local.items():
            target.copy_(given[part])
        self._may_be_ahead = True

    def renew(self, name: str, rows: torch.Tensor, keys: np.ndarray) -> None:
        """Give rows to new ids: set initial values drawn from the ids' ``keys``, and the state of a row never touched.

        ``rows`` are local row numbers, int64 [n]; ``keys`` are uint64 [n]. Call it between :meth:`step` and the next
        lookup, or for rows that no lookup has read since the last step. Otherwise the old id's recorded gradient would
        be applied to the new id.

        Raises:
            ValueError: no such table, or a row outside it.
        """
        t = self._number(name)
        self._check_rows(t, rows, "renew")
        values = torch.from_numpy(initial_rows_of(self.layout.tables[t], self.layout.seed, keys))
        rows = rows.to(self.layout.device)
        weight = self.layout.weight(t)
        weight[rows] = values.to(weight)
        for state in self.state(name).values():
            state[rows] = 0

    def _check_rows(self, t: int, rows: torch.Tensor, verb: str) -> None:
        table = self.layout.tables[t]
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < table.row_count):
            span = f"{int(rows.min())} to {int(rows.max())}"
            raise ValueError(f"table '{table.name}' has {table.row_count} rows: can't {verb} rows {span}")

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            raise ValueError(f"there is no table '{name}' (there are {', '.join(self._numbers)})")
        return self._numbers[name]

    def extra_repr(self) -> str:
        return "\n".join(f"{t.name}: {t.row_count} x {t.dim} {t.features}" for t in self.layout.tables)


class _Lookup(torch.autograd.Function):
    """Forward through the kernel; backward keeps (ids, output gradient) for the step."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tables: EmbeddingTables, indices, offsets, weights, batch_size):  # type: ignore[no-untyped-def]
        swaps = None
        if tables.training and tables._sse is not None:
            swaps = Swaps(tables._sse, tables.completed_steps + 1, tables._sample_offset)
        output, used = tables._kernel.forward(indices, offsets, weights, batch_size, swaps, tables._idle_now())
        ctx.tables, ctx.lookup = tables, (used, offsets, weights)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[no-untyped-def, override]
        used, offsets, weights = ctx.lookup
        ctx.tables._record(Record(used, offsets, weights, grad.contiguous()))
        return None, None, None, None, None, None


def _is_finite(values: torch.Tensor) -> bool:
    """Return True if all values are finite.

    A sum takes one pass without a temporary, and is finite only if all its terms are. Finite terms can overflow when
    summed, so if the sum is not finite, each value is checked.
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())
