"""The Numba backend: what compiled code is given, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from embeddings.config import SSEConfig
from embeddings.decay import IdleCoefficients
from embeddings.kernels.cpu.arena import Arena
from embeddings.kernels.cpu.geometry import COLUMN, FIRST, LIVE, MEAN
from embeddings.kernels.cpu.lookup import FAULT_ID, lookup
from embeddings.kernels.cpu.sort import entries_of, plan_tasks
from embeddings.kernels.cpu.threads import block_size, use_threads
from embeddings.kernels.cpu.update import RULES, apply_updates
from embeddings.kernels.layout import Layout, Record, Swaps
from embeddings.optim import Adam
from embeddings.sse import SwapDraws, swap_draws


class NumbaKernel:
    """See :class:`embeddings.kernels.layout.Kernel`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        slots = []
        for slot in layout.slots:
            t, table = slot.table, layout.tables[slot.table]
            bases = (layout.weight_base[t], layout.vector_base[t], layout.step_base[t])
            live = table.row_count - (table.padding_row + 1)
            slots.append(
                (t, slot.column, slot.dim, slot.mean, table.row_count, table.padding_row + 1, live, *map(int, bases))
            )
        self._slots = np.array(slots, dtype=np.int64)
        first = [next(slot.number for slot in layout.slots if slot.table == t) for t in range(len(layout.tables))]
        self._geometry = self._slots[first]
        self._no_scales = torch.empty(0, dtype=layout.compute_dtype).numpy()
        self._no_draws = swap_draws([], layout.seed)
        self._rate, self._eps = float(layout.optimizer.learning_rate), float(getattr(layout.optimizer, "eps", 0.0))
        self._cast: tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, ...]] | None = None
        self._outputs = Arena()
        self._draws: dict[tuple[SSEConfig, ...], SwapDraws] = {}

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        idle: IdleCoefficients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.layout
        ids, bounds = indices.numpy(), _offsets(offsets, indices)
        if bounds[0] != 0 or bounds[-1] != len(ids):
            raise layout.bad_ends(int(bounds[0]), int(bounds[-1]), len(ids))
        num_features = len(layout.slots)
        threads = use_threads(self._bytes(len(ids)))
        num_outputs = batch_size if layout.pooled else len(ids)
        output = self._outputs.take(num_outputs, layout.total_dim, layout.compute_dtype)
        used, draws, sample_offset, step_word = indices, self._no_draws, 0, np.uint64(0)
        if swaps is not None:
            used, draws = torch.empty_like(indices), self._swap_draws(swaps.configs)
            sample_offset, step_word = swaps.sample_offset, np.uint64(swaps.step & 0xFFFFFFFF)
        faults = np.zeros((num_features, 2), dtype=np.int64)
        lookup(
            output.view(-1).numpy(), *self._storage(), self._slots, layout.pooled, layout.bounds == "ignore",
            block_size(num_features, batch_size, threads), ids, used.numpy(), bounds, self._scales(weights), *draws,
            batch_size, sample_offset, step_word, *self._idle_arguments(idle), faults,
        )  # fmt: skip
        if faults.any():
            self._raise(faults)
        return output, used

    def _raise(self, faults: np.ndarray) -> None:
        f = int(np.flatnonzero(faults[:, 0])[0])
        slot, (fault, value) = self.layout.slots[f], (int(part) for part in faults[f])
        raise self.layout.bad_id(slot, value) if fault == FAULT_ID else self.layout.bad_offsets(slot)

    def read(self, t: int, rows: torch.Tensor, idle: IdleCoefficients | None) -> torch.Tensor:
        table, ids = self.layout.tables[t], rows.numpy()
        threads = use_threads(len(ids) * table.dim * self._no_scales.itemsize)
        # A reader may keep it, so it is no arena's.
        output = torch.empty(len(ids), table.dim, dtype=self.layout.compute_dtype)
        # A lookup of one feature with one id in each bag, padding being a row like others.
        slot = self._geometry[t : t + 1].copy()
        slot[0, [COLUMN, MEAN, FIRST, LIVE]] = 0, 0, 0, table.row_count
        faults = np.zeros((1, 2), dtype=np.int64)
        lookup(
            output.view(-1).numpy(), *self._storage(), slot, True, False, block_size(1, len(ids), threads), ids, ids,
            np.arange(len(ids) + 1, dtype=ids.dtype), self._no_scales, *self._no_draws, len(ids), 0, np.uint64(0),
            *self._idle_arguments(idle), faults,
        )  # fmt: skip
        assert not faults.any()
        return output

    def update(self, records: Sequence[Record], step: int, idle: IdleCoefficients | None) -> None:
        grads = records[0].grad if len(records) == 1 else torch.cat([record.grad for record in records])
        num_entries = sum(record.indices.numel() for record in records)
        use_threads(self._bytes(num_entries))
        rows, places = np.empty(num_entries, np.int64), np.empty(num_entries, np.int64)
        shares = np.empty(num_entries, self._no_scales.dtype)
        spans: list[list[tuple[int, int]]] = [[] for _ in self.layout.tables]
        first_entry = first_bag = 0
        for record in records:
            batch_size, end = record.batch_size(len(self.layout.slots)), first_entry + record.indices.numel()
            offsets = _offsets(record.offsets, record.indices)
            entries_of(
                self._slots, record.indices.numpy(), offsets, self._scales(record.weights), batch_size, first_bag,
                self.layout.total_dim, rows[first_entry:end], places[first_entry:end], shares[first_entry:end],
            )  # fmt: skip
            for slot in self.layout.slots:
                bounds = offsets[[slot.number * batch_size, (slot.number + 1) * batch_size]] + first_entry
                spans[slot.table].append((int(bounds[0]), int(bounds[1])))
            first_entry, first_bag = end, first_bag + batch_size
        order, tasks = plan_tasks(rows, spans)
        optimizer = self.layout.optimizer
        betas = (optimizer.beta1, optimizer.beta2) if isinstance(optimizer, Adam) else (0.0, 0.0)
        rule = next(number for kind, number in RULES.items() if isinstance(optimizer, kind))
        apply_updates(
            *self._storage(), grads.numpy().reshape(-1), self._geometry, len(self.layout.vector_names), rows, places,
            shares, order, tasks, rule, step, optimizer.idle_alpha, *betas, self._rate, self._eps,
            *self._idle_arguments(idle)[1:],
        )  # fmt: skip

    def _bytes(self, num_ids: int) -> int:
        """About the size of the rows of so many ids."""
        return num_ids * self._no_scales.itemsize * self.layout.total_dim // len(self.layout.slots)

    def _storage(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Made anew each time: kept arrays would stay behind when the tables are copied.
        return _array(self.layout.weights), _array(self.layout.vectors), self.layout.last_steps.numpy()

    def _scales(self, weights: torch.Tensor | None) -> np.ndarray:
        if weights is None:
            return self._no_scales
        scales: np.ndarray = weights.to(self.layout.compute_dtype).contiguous().numpy()
        return scales

    def _swap_draws(self, configs: tuple[SSEConfig, ...]) -> SwapDraws:
        if configs not in self._draws:
            tables = self.layout.tables
            features = [(tables[s.table], s.name, c) for s, c in zip(self.layout.slots, configs, strict=True)]
            self._draws[configs] = swap_draws(features, self.layout.seed)
        return self._draws[configs]

    def _idle_arguments(self, idle: IdleCoefficients | None) -> tuple[Any, ...]:
        """K, whether reading corrects rows, and the coefficients of it in the type of the rows."""
        real = self._no_scales.dtype
        if idle is None:
            nothing = np.zeros(1, dtype=real)
            return 0, False, nothing, False, nothing, nothing, nothing, nothing, nothing
        if self._cast is None or self._cast[0] is not idle.decay or self._cast[1] is not idle.far_c:
            far = (self._rate * idle.far_c, self._eps * idle.far_e, idle.late_decay)
            self._cast = (idle.decay, idle.far_c, idle.decay.astype(real), tuple(each.astype(real) for each in far))
        near = ((self._rate * idle.near_c).astype(real), (self._eps * idle.near_e).astype(real))
        return idle.completed_steps, True, self._cast[2], idle.horizon > 0, *near, *self._cast[3]


# Numba knows no half types: they go in as integers, which embeddings.kernels.cpu.simd converts.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def _array(tensor: torch.Tensor) -> np.ndarray:
    integers = _AS_INTEGERS.get(tensor.dtype)
    array: np.ndarray = (tensor if integers is None else tensor.view(integers)).numpy()
    return array


def _offsets(offsets: torch.Tensor, indices: torch.Tensor) -> np.ndarray:
    """In the type of the ids, as compiled code exists for one or the other."""
    array: np.ndarray = (offsets if offsets.dtype == indices.dtype else offsets.to(indices.dtype)).numpy()
    return array
