"""The Numba backend: what compiled code is given, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from embeddings.config import SSEConfig
from embeddings.decay import IdleCoefficients
from embeddings.kernels.cpu.geometry import COLUMN, MEAN, PADDING
from embeddings.kernels.cpu.lookup import lookup
from embeddings.kernels.cpu.sort import entries_of, plan_tasks
from embeddings.kernels.cpu.threads import use_threads
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
            slots.append(
                (t, slot.column, slot.dim, int(slot.mean), table.row_count, table.padding_row, *map(int, bases))
            )
        self._slots = np.array(slots, dtype=np.int64)
        first = [next(slot.number for slot in layout.slots if slot.table == t) for t in range(len(layout.tables))]
        self._geometry = self._slots[first]
        self._no_scales = torch.empty(0, dtype=layout.dtype).numpy()
        self._no_draws = swap_draws([], layout.seed)
        self._rate, self._eps = float(layout.optimizer.learning_rate), float(getattr(layout.optimizer, "eps", 0.0))
        self._cast: tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, ...]] | None = None
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
        use_threads(self._bytes(indices.numel()))
        output = torch.empty(batch_size, layout.total_dim, dtype=layout.dtype)
        used, draws, sample_offset, step_word = indices, self._no_draws, 0, np.uint64(0)
        if swaps is not None:
            used, draws = torch.empty_like(indices), self._swap_draws(swaps.configs)
            sample_offset, step_word = swaps.sample_offset, np.uint64(swaps.step & 0xFFFFFFFF)
        faults = np.zeros((len(layout.slots), 2), dtype=np.int64)
        lookup(
            output.numpy().reshape(-1), *self._storage(), self._slots, indices.numpy(), used.numpy(),
            offsets.numpy(), self._scales(weights), *draws, batch_size, sample_offset, step_word,
            *self._idle_arguments(idle), faults,
        )  # fmt: skip
        for slot in layout.slots:
            if faults[slot.number, 0]:
                fault, value = (int(part) for part in faults[slot.number])
                raise layout.bad_id(slot, value) if fault == 1 else layout.bad_offsets(slot)
        return output, used

    def read(self, t: int, rows: torch.Tensor, idle: IdleCoefficients | None) -> torch.Tensor:
        use_threads(len(rows) * self.layout.tables[t].dim * self._no_scales.itemsize)
        output = torch.empty(len(rows), self.layout.tables[t].dim, dtype=self.layout.dtype)
        # A lookup of one feature with one id in each bag, padding being a row like others.
        slot = self._geometry[t : t + 1].copy()
        slot[0, [COLUMN, MEAN, PADDING]] = 0, 0, -1
        ids, faults = rows.numpy(), np.zeros((1, 2), dtype=np.int64)
        lookup(
            output.numpy().reshape(-1), *self._storage(), slot, ids, ids, np.arange(len(ids) + 1), self._no_scales,
            *self._no_draws, len(ids), 0, np.uint64(0), *self._idle_arguments(idle), faults,
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
            batch_size, end = len(record.grad), first_entry + record.indices.numel()
            offsets = record.offsets.numpy()
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
        return self.layout.weights.numpy(), self.layout.vectors.numpy(), self.layout.last_steps.numpy()

    def _scales(self, weights: torch.Tensor | None) -> np.ndarray:
        if weights is None:
            return self._no_scales
        scales: np.ndarray = weights.to(self.layout.dtype).contiguous().numpy()
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
