"""The Numba backend: what compiled code is given, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from embeddings.config import SSEConfig
from embeddings.decay import IdleCoefficients
from embeddings.kernels.cpu.arena import Arena, Room
from embeddings.kernels.cpu.geometry import COLUMN, FIRST, LIVE, MEAN, ROW_BITS, special_dim
from embeddings.kernels.cpu.lookup import FAULT_ID, lookup
from embeddings.kernels.cpu.sort import BUCKET, DIGIT_BITS, MAX_BUCKET_BITS, build_keys, sort_keys
from embeddings.kernels.cpu.threads import SAMPLES_PER_TASK, TASKS_PER_THREAD, block_size, use_threads
from embeddings.kernels.cpu.update import apply_updates, fades_of, kind_of, rounding_of, rule_of, squared_norms
from embeddings.kernels.layout import Layout, Record, Swaps
from embeddings.sse import SwapDraws, swap_draws


class Entries(NamedTuple):
    """The looked-up ids of some records, sorted (see embeddings.kernels.cpu.sort), and all their gradients, flat."""

    grads: np.ndarray
    # keys, runs, place_bits, direct, places, shares, tasks, number of tasks, room for one sum of each task
    sorted: tuple[Any, ...]


class NumbaKernel:
    """See :class:`embeddings.kernels.layout.Kernel`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        slots = []
        for slot in layout.slots:
            t, table = slot.table, layout.tables[slot.table]
            bases = (layout.weight_base[t], layout.vector_base[t], layout.step_base[t])
            live = max(0, table.row_count - (table.padding_row + 1))
            slots.append(
                (
                    t,
                    slot.column,
                    slot.dim,
                    slot.mean,
                    table.row_count,
                    table.padding_row + 1,
                    live,
                    *map(int, bases),
                    max(0, table.row_count - 1).bit_length(),
                )
            )
        self._slots = np.array(slots, dtype=np.int64)
        first = [next(slot.number for slot in layout.slots if slot.table == t) for t in range(len(layout.tables))]
        self._geometry = self._slots[first]
        self._slot_ranges = np.array([*first, len(layout.slots)], dtype=np.int64)
        self._row_bits = self._geometry[:, ROW_BITS].copy()
        self._most_row_bits = int(self._row_bits.max())
        self._means = any(slot.mean for slot in layout.slots)
        # Whole cache lines for the sums of each task.
        self._widest = -(-max(slot.dim for slot in layout.slots) // 16) * 16
        self._kind = kind_of(layout.optimizer)
        self._one_dim = special_dim(table.dim for table in layout.tables)
        self._room = Room()
        self._no_scales = torch.empty(0, dtype=layout.compute_dtype).numpy()
        self._no_draws = swap_draws([], layout.seed)
        self._inside = int(getattr(layout.optimizer, "eps_inside_root", False))
        self._rounding = rounding_of(layout)
        self._fades = fades_of(layout.optimizer, self._no_scales.dtype)
        self._decay: tuple[np.ndarray, np.ndarray] | None = None
        self._outputs, self._ids = Arena(), Arena()
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
            used, draws = self._ids.take(1, len(ids), indices.dtype).view(-1), self._swap_draws(swaps.configs)
            sample_offset, step_word = swaps.sample_offset, np.uint64(swaps.step & 0xFFFFFFFF)
        faults = np.zeros((num_features, 2), dtype=np.int64)
        self._lookup(idle)(
            output.view(-1).numpy(), *self._storage(), self._slots, layout.pooled, layout.bounds == "ignore",
            block_size(num_features, batch_size, threads), ids, used.numpy(), bounds, self._scales(weights), *draws,
            batch_size, sample_offset, step_word, *self._idle_arguments(idle), faults,
        )  # fmt: skip
        if faults.any():
            self._raise(faults)
        return output, used

    def _lookup(self, idle: IdleCoefficients | None) -> Any:
        moved = _moved(idle)
        return lookup(idle is not None, moved, moved and bool(self.layout.row_names), self._one_dim)

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
        self._lookup(idle)(
            output.view(-1).numpy(), *self._storage(), slot, True, False, block_size(1, len(ids), threads), ids, ids,
            np.arange(len(ids) + 1, dtype=ids.dtype), self._no_scales, *self._no_draws, len(ids), 0, np.uint64(0),
            *self._idle_arguments(idle), faults,
        )  # fmt: skip
        assert not faults.any()
        return output

    def update(self, records: Sequence[Record], step: int, idle: IdleCoefficients | None, scale: float = 1.0) -> None:
        entries, lead = self._entries(records), (0.0, 1.0) if idle is None else (idle.lead_moved, idle.lead_floor)
        words = self._room("words", len(entries.sorted[-1]) if self._rounding.size else 1, np.uint32)
        apply_updates(self._kind, idle is not None, _moved(idle), self._one_dim)(
            *self._storage(), entries.grads, self._geometry, *entries.sorted, words, self._rounding,
            rule_of(self.layout.optimizer, step, lead), self._fades, step, scale, *self._idle_arguments(idle)[1:],
        )  # fmt: skip

    def squared_norm(self, records: Sequence[Record]) -> float:
        entries = self._entries(records)
        tasks, num_tasks = entries.sorted[6:8]
        num_keys = int(tasks[num_tasks - 1, 2]) if num_tasks else 0
        squares = np.empty(num_keys)
        squared_norms(entries.grads, self._geometry, *entries.sorted, squares)
        return float(squares.sum())

    def _entries(self, records: Sequence[Record]) -> Entries:
        """What the records looked up, sorted by table and row."""
        layout, room, num_features = self.layout, self._room, len(self.layout.slots)
        num_entries = sum(record.indices.numel() for record in records)
        threads = use_threads(self._bytes(num_entries))
        wanted_tasks = 1 if threads == 1 else TASKS_PER_THREAD * threads
        grads = records[0].grad
        if len(records) > 1:
            grads = self._outputs.take(sum(len(record.grad) for record in records), layout.total_dim, grads.dtype)
            torch.cat([record.grad for record in records], out=grads)
        direct = not self._means and all(record.weights is None for record in records)
        place_bits = max(grads.numel(), num_entries).bit_length()
        if place_bits + self._most_row_bits > 63:
            raise ValueError(f"a step over {grads.numel()} elements of gradient is too large: use smaller batches")
        per_table = -(-num_entries // len(layout.tables))
        bits = max((per_table - 1) // BUCKET, (wanted_tasks - 1) // len(layout.tables)).bit_length()
        bucket_bits = min(MAX_BUCKET_BITS, self._most_row_bits, bits)
        spans, samples = self._spans(records, threads)
        num_blocks = int(spans[-1, 0] + num_features * spans[-1, 1])
        keys, ordered = room("keys", num_entries, np.uint64), room("ordered", num_entries, np.uint64)
        num_weighted = 0 if direct else num_entries
        places, shares = room("places", num_weighted, np.int64), room("shares", num_weighted, self._no_scales.dtype)
        blocks = room("blocks", num_blocks * 3, np.int64).reshape(-1, 3)
        counts = room("counts", num_blocks << bucket_bits, np.int32).reshape(-1, 1 << bucket_bits)
        first_entry = first_output = 0
        for record, size, (first_block, _) in zip(records, samples, spans, strict=True):
            build_keys(
                self._slots, layout.pooled, record.indices.numpy(), _offsets(record.offsets, record.indices),
                self._scales(record.weights), record.batch_size(num_features), size, first_entry, first_output,
                first_block, layout.total_dim, place_bits, direct, bucket_bits, keys, places, shares, blocks, counts,
            )  # fmt: skip
            first_entry, first_output = first_entry + record.indices.numel(), first_output + len(record.grad)
        per_task = max(1, -(-num_entries // wanted_tasks))
        most_tasks = len(layout.tables) + num_entries // per_task
        tasks = room("tasks", most_tasks * 5, np.int64).reshape(-1, 5)
        runs = room("runs", num_entries, np.int64)
        num_tasks = sort_keys(
            self._row_bits, self._slot_ranges, spans, num_blocks, blocks, bucket_bits, place_bits, per_task, counts,
            keys, ordered, room("ends", len(layout.tables) << bucket_bits, np.int64).reshape(len(layout.tables), -1),
            tasks, room("digits", threads << DIGIT_BITS, np.int64).reshape(threads, -1), runs,
        )  # fmt: skip
        sums = room("sums", most_tasks * self._widest, self._no_scales.dtype)
        return Entries(
            grads.numpy().reshape(-1), (ordered, runs, place_bits, direct, places, shares, tasks, num_tasks, sums)
        )

    def _spans(self, records: Sequence[Record], threads: int) -> tuple[np.ndarray, list[int]]:
        """For each record (first block, blocks of a feature), int64 [records, 2], and samples of a block."""
        num_features = len(self.layout.slots)
        wanted = 1 if threads == 1 else -(-TASKS_PER_THREAD * threads // num_features)
        spans, samples, first_block = np.empty((len(records), 2), dtype=np.int64), [], 0
        for r, record in enumerate(records):
            batch_size = record.batch_size(num_features)
            samples.append(max(SAMPLES_PER_TASK, -(-batch_size // wanted)))
            spans[r] = first_block, -(-batch_size // samples[-1])
            first_block += num_features * int(spans[r, 1])
        return spans, samples

    def _bytes(self, num_ids: int) -> int:
        """About the size of the rows of so many ids."""
        return num_ids * self._no_scales.itemsize * self.layout.total_dim // len(self.layout.slots)

    def _storage(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        # Made anew each time: kept arrays would stay behind when the tables are copied.
        layout = self.layout
        return _array(layout.weights), _array(layout.vectors), _array(layout.row_values), layout.last_steps.numpy()

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
        """K, and the coefficients of what reading corrects in the type of the rows."""
        real = self._no_scales.dtype
        if idle is None:
            nothing, none = np.zeros(1, dtype=real), np.zeros(0)
            return 0, nothing, np.zeros((0, 4), dtype=real), none, 0.0, 0.0, False, self._inside
        if self._decay is None or self._decay[0] is not idle.decay:
            self._decay = (idle.decay, idle.decay.astype(real))
        near = np.empty((len(idle.moved), 4), dtype=real)
        for column, values in enumerate((idle.moved, idle.floor, idle.taken, idle.taken_floor)):
            near[:, column] = values
        return (
            idle.completed_steps, self._decay[1], near, idle.log_sums, idle.log_now, idle.log_slope, idle.from_start,
            self._inside,
        )  # fmt: skip


# Numba knows no half types: they go in as integers, which embeddings.kernels.cpu.simd converts.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def _moved(idle: IdleCoefficients | None) -> bool:
    """Whether momentum moves rows while they are idle."""
    return idle is not None and idle.momentum


def _array(tensor: torch.Tensor) -> np.ndarray:
    integers = _AS_INTEGERS.get(tensor.dtype)
    array: np.ndarray = (tensor if integers is None else tensor.view(integers)).numpy()
    return array


def _offsets(offsets: torch.Tensor, indices: torch.Tensor) -> np.ndarray:
    """In the type of the ids, as compiled code exists for one or the other."""
    array: np.ndarray = (offsets if offsets.dtype == indices.dtype else offsets.to(indices.dtype)).numpy()
    return array
