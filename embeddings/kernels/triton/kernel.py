"""The Triton kernel: tables on a GPU, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from embeddings.kernels.layout import Layout, Record, Swaps
from embeddings.kernels.triton import rules
from embeddings.kernels.triton.deferred_update import DeferredSource
from embeddings.kernels.triton.entries import entries
from embeddings.kernels.triton.faults import Faults
from embeddings.kernels.triton.launch import Launcher
from embeddings.kernels.triton.lookup import lookup
from embeddings.kernels.triton.staging import Staging
from embeddings.kernels.triton.swap import swap
from embeddings.kernels.triton.update import finish, update
from embeddings.optim.deferred_update import DeferredUpdateCoefficients
from embeddings.sse.swap import swap_draws
from embeddings.tables.philox import table_key

MAX_POSITIONS = 16
# Most entries of a run; longer ones are split: see embeddings.kernels.triton.update.
SPLIT = 16
# Partial sums of a run that the final reduction adds at a time.
DEPTH = 16
# log2 of a beta of 0: 2 to this is 0 in every type, and, unlike infinity, it can be multiplied and subtracted.
LOG2_ZERO = -1e5


@dataclass(frozen=True)
class Group:
    """The features of all tables of one dim. One kernel launch looks all of them up."""

    dim: int
    alignment: int  # every output column is a multiple of it
    descriptors: torch.Tensor  # int64, see embeddings.kernels.triton.lookup
    entry_descriptors: torch.Tensor  # int64, see embeddings.kernels.triton.entries
    first_key: int  # rows of these tables have keys in [first_key, end_key)
    end_key: int

    @functools.cached_property
    def block(self) -> int:
        """The number of columns of a tile."""
        return _power_of_two_from(self.dim)


class Tiling(NamedTuple):
    """Tile sizes of the Triton programs.

    Attributes:
        elements: largest number of row elements in a tile.
        moving: the same for a lookup that also reads moments, which need registers of their own.
        rows: largest number of rows, or bags, in a tile.
        samples: samples of one SSE program.
        walkers: walks from hit to hit that one SSE program makes in parallel.
        entries: fewest sorted entries of one update program.
        window: blocks of ``split`` entries that one program of the final reduction reads.
        warps: largest number of warps of a program; small tiles use fewer.
    """

    elements: int
    moving: int
    rows: int
    samples: int
    walkers: int
    entries: int
    window: int
    warps: int


TILING = Tiling(elements=1024, moving=512, rows=64, samples=256, walkers=32, entries=64, window=8, warps=4)
# Large tiles, because the interpreter takes a tenth of a millisecond for an operation of any size.
INTERPRETED_TILING = Tiling(
    elements=1 << 17, moving=1 << 17, rows=2048, samples=1 << 10, walkers=1 << 12, entries=2048, window=1 << 12, warps=4
)


class Sorted(NamedTuple):
    """The entries of some backwards, sorted by row: arguments of embeddings.kernels.triton.update."""

    grads: torch.Tensor
    keys: torch.Tensor
    order: torch.Tensor
    grad_offsets: torch.Tensor
    pooling_weights: torch.Tensor
    shared: bool


class TritonKernel:
    """The Triton kernels as a :class:`embeddings.kernels.layout.Kernel`.

    On a GPU only :meth:`update` waits for the device, and only for the lookups before the backward. So a bad id or
    offset is not reported by its own :meth:`forward`, but by :meth:`update` before any row is changed, by a later
    lookup, or by :meth:`check`.
    """

    def __init__(self, layout: Layout) -> None:
        self.interpreted = not isinstance(lookup, triton.runtime.JITFunction)
        _check_device(layout.device, self.interpreted)
        self.layout = layout
        self.tiling = INTERPRETED_TILING if self.interpreted else TILING
        self.split = SPLIT
        dims = sorted({table.dim for table in layout.tables})
        # A key is the index of a row over all tables; tables of one dim have consecutive keys.
        order = [t for dim in dims for t, table in enumerate(layout.tables) if table.dim == dim]
        ends = np.cumsum([layout.tables[t].row_count for t in order])
        self._first_keys = {t: int(end) - layout.tables[t].row_count for t, end in zip(order, ends, strict=True)}
        self._num_keys = int(ends[-1])
        self._groups = tuple(self._group(dim) for dim in dims)
        self._table_descriptors = self._integers([self._table_words(t) for t in range(len(layout.tables))])
        self._nothing = torch.zeros(1, dtype=torch.int64, device=layout.device)
        self._no_norms = torch.zeros(1, dtype=torch.float64, device=layout.device)
        self._last_sorted: tuple[tuple[Record, ...], Sorted] | None = None
        self._faults = Faults(layout)
        self._launch = Launcher(self.interpreted)
        self._draws: dict[Any, tuple[tuple[torch.Tensor, ...], bool]] = {}
        self._staging = Staging(layout.device)
        self._deferred = DeferredSource(layout.compute_dtype, layout.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> TritonKernel:
        # Events and pinned memory can't be copied, and lookups not yet checked belong to the original.
        twin = TritonKernel(copy.deepcopy(self.layout, memo))
        twin.tiling, twin.split = self.tiling, self.split
        return twin

    def check(self) -> None:
        """Wait for all lookups so far; raise ValueError if one had a bad id or offset."""
        self._faults.check()

    def forget(self) -> None:
        """Forget all lookups so far and their faults; none of them may be given to :meth:`update`."""
        self._faults.forget()

    # --- lookup ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        deferred: DeferredUpdateCoefficients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout, device = self.layout, self.layout.weights.device
        for given in (indices, offsets, weights):
            if given is not None and given.device != device:
                raise ValueError(
                    f"ids, offsets and weights must be where the tables are, on {device}, not on {given.device}"
                )
        if batch_size == 0 and indices.numel():
            raise layout.bad_ends(int(offsets[0]), int(offsets[-1]), indices.numel())
        shape = (batch_size if layout.pooled else indices.numel(), layout.total_dim)
        output = torch.empty(shape, dtype=layout.compute_dtype, device=layout.device)
        with self._on_device():
            used = indices if swaps is None else self._swapped(indices, offsets, batch_size, swaps)
            for group in self._groups:
                self._look_up(group, output, used, offsets, weights, batch_size, deferred, layout.pooled)
            self._faults.watch(indices, offsets)
        return output, used

    def read(self, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None) -> torch.Tensor:
        table, rows = self.layout.tables[t], rows.to(self.layout.device)
        output = torch.empty(len(rows), table.dim, dtype=self.layout.compute_dtype, device=self.layout.device)
        # A lookup of one feature with one id in each bag, padding being a row like others.
        words = [[0, 0, 0, table.row_count, -1, *self._bases(t)]]
        group = Group(table.dim, _power_of_two_in(table.dim), self._integers(words), self._nothing, 0, 0)
        offsets = torch.arange(len(rows) + 1, device=self.layout.device)
        with self._on_device():
            self._look_up(group, output, rows, offsets, None, len(rows), deferred, True)
        return output

    def _swapped(self, indices: torch.Tensor, offsets: torch.Tensor, batch_size: int, swaps: Swaps) -> torch.Tensor:
        used, num_features = torch.empty_like(indices), len(self.layout.descriptors)
        draws, has_graph = self._swap_draws(swaps)
        tiling = self.tiling
        arguments = (
            used, indices, offsets, *draws, indices.numel(), batch_size, swaps.sample_offset, swaps.step,
        )  # fmt: skip
        constants = {"SAMPLES": tiling.samples, "WALKERS": tiling.walkers, "GRAPH": has_graph}
        num_programs = num_features * _blocks(batch_size, tiling.samples)
        if num_programs:
            self._launch(swap, num_programs, arguments, constants, 1, (indices, offsets, indices.numel()))
        return used

    def _look_up(
        self,
        group: Group,
        output: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        deferred: DeferredUpdateCoefficients | None,
        pooled: bool,
    ) -> None:
        if batch_size == 0:
            return
        layout, num_ids, num_bags = self.layout, indices.numel(), offsets.numel() - 1
        moving = deferred is not None and deferred.momentum
        tile = self._tile(group, batch_size, self.tiling.moving if moving else self.tiling.elements)
        constants = {
            "DIM": group.dim, "BLOCK": group.block, "TILE": tile,
            "ALIGNMENT": group.alignment, "VECTORS": len(layout.vector_names), "ROWWISE": bool(layout.row_names),
            "POOLED": pooled, "SCALED": weights is not None,
            **self._deferred_options(deferred), "IGNORE": layout.bounds == "ignore",
        }  # fmt: skip
        arguments = (
            output, layout.weights, layout.vectors, layout.row_values, layout.last_steps, group.descriptors,
            indices, offsets, self._scales(weights), self._faults.flag, *self._deferred.at(deferred),
            num_ids, num_bags, batch_size, output.shape[1], deferred.completed_steps if deferred else 0,
        )  # fmt: skip
        self._launch(
            lookup, len(group.descriptors) * _blocks(batch_size, tile), arguments, constants,
            self._warps(tile * group.block), (indices, offsets, weights, num_ids, output.shape[1]),
        )  # fmt: skip

    def _tile(self, group: Group, limit: int, elements: int) -> int:
        """Return the number of bags, or rows, in a tile.

        On a GPU it does not depend on the batch, because each number needs a compiled kernel of its own.
        """
        most = int(max(1, min(elements // group.block, self.tiling.rows)))
        return min(most, _power_of_two_from(limit)) if self.interpreted else most

    def _warps(self, elements: int) -> int:
        """Return the warps of a program for a tile of this size: at least four elements for each thread."""
        return max(1, min(self.tiling.warps, elements // 128))

    def _positions(self, num_ids: int, num_bags: int) -> int:
        """Return the number of bag positions to process together in a tile: about the mean length of a bag."""
        mean = _power_of_two_from(max(1, -(-num_ids // num_bags)))
        return int(max(1, min(MAX_POSITIONS, mean)))

    # --- update ------------------------------------------------------------------------------------------------------

    def update(
        self, records: Sequence[Record], step: int, deferred: DeferredUpdateCoefficients | None, scale: float = 1.0
    ) -> None:
        self.check()
        rule = rules.rule_number(self.layout.optimizer.rule)
        with self._on_device():
            self._apply(self._sorted_once(records), rule, step, deferred, scale)
        self._last_sorted = None

    def squared_norm(self, records: Sequence[Record]) -> float:
        """Return the squared norms of the summed gradients, added up over the touched rows."""
        self.check()
        with self._on_device():
            return float(self._apply(self._sorted_once(records), rules.NORM, 0, None, 1.0))

    def _sorted_once(self, records: Sequence[Record]) -> Sorted:
        """Return the result of :meth:`_sorted`, which is kept between norm and update of a step with clipping."""
        kept, found = self._last_sorted or ((), None)
        if found is None or len(kept) != len(records) or any(a is not b for a, b in zip(kept, records, strict=True)):
            found = self._sorted(records)
        self._last_sorted = (tuple(records), found)
        return found

    def _sorted(self, records: Sequence[Record]) -> Sorted:
        layout, num_features = self.layout, len(self.layout.descriptors)
        grads = [record.grad.to(layout.compute_dtype) for record in records]
        num_entries = sum(record.indices.numel() for record in records)
        shared = any(descriptor.mean for descriptor in layout.descriptors) or any(
            record.weights is not None for record in records
        )
        # A sort of int32 keys takes half the passes of int64 keys.
        key_type = torch.int32 if self._num_keys < 2**31 else torch.int64
        keys = torch.empty(num_entries, dtype=key_type, device=layout.device)
        grad_offsets = torch.empty(num_entries, dtype=torch.int64, device=layout.device)
        pooling_weights = torch.empty(num_entries if shared else 1, dtype=layout.compute_dtype, device=layout.device)
        first_entry = first_offset = 0
        for record, grad in zip(records, grads, strict=True):
            batch_size, num_ids = record.batch_size(num_features), record.indices.numel()
            for group in self._groups if num_ids else ():
                tile = self._tile(group, batch_size, self.tiling.elements)
                arguments = (
                    keys, grad_offsets, pooling_weights, group.entry_descriptors, record.indices, record.offsets,
                    self._scales(record.weights), self._num_keys, batch_size, layout.total_dim,
                    first_entry, first_offset,
                )  # fmt: skip
                constants = {
                    "TILE": tile, "POSITIONS": self._positions(num_ids, record.offsets.numel() - 1),
                    "POOLED": layout.pooled, "SCALED": record.weights is not None, "SHARED": shared,
                }  # fmt: skip
                self._launch(
                    entries, len(group.entry_descriptors) * _blocks(batch_size, tile), arguments, constants, 4,
                    (record.indices, record.offsets, record.weights, num_entries, first_offset),
                )  # fmt: skip
            first_entry, first_offset = first_entry + num_ids, first_offset + grad.numel()
        keys, order = torch.sort(keys, stable=True)
        return Sorted(
            grads[0] if len(grads) == 1 else torch.cat(grads), keys, order, grad_offsets, pooling_weights, shared
        )

    def _apply(
        self, entries: Sorted, rule: Any, step: int, deferred: DeferredUpdateCoefficients | None, scale: float
    ) -> torch.Tensor:
        layout, num_entries = self.layout, entries.keys.numel()
        if num_entries == 0:
            return self._no_norms
        settings, tables, total = self._settings(step, scale), self._deferred.at(deferred), self._no_norms
        sources = (entries.keys, entries.order, entries.grad_offsets)
        quads = all(table.column_start % 4 == 0 for table in layout.tables)
        blocks = _blocks(num_entries, self.split)
        # Allocate before the first row is changed, so that a failure changes nothing.
        pieces = torch.empty(num_entries, dtype=torch.int32, device=layout.device)
        sums = [
            torch.empty(2 * blocks * group.dim, dtype=layout.compute_dtype, device=layout.device)
            for group in self._groups
        ]
        for group, partials in zip(self._groups, sums, strict=True):
            rows = self._tile(group, num_entries, self.tiling.elements)
            tile = max(self.split, rows, self.tiling.entries)
            programs, finishers = _blocks(num_entries, tile), _blocks(blocks, self.tiling.window)
            norms = more_norms = self._no_norms
            if rule is rules.NORM:
                norms, more_norms = (
                    torch.zeros(count, dtype=torch.float64, device=layout.device) for count in (programs, finishers)
                )
            storage = (layout.weights, layout.vectors, layout.row_values, layout.last_steps)
            ends = (num_entries, group.first_key, group.end_key, step)
            common = {
                "DIM": group.dim, "BLOCK": group.block, "SPLIT": self.split, "RULE": rule.value,
                "ROWWISE": bool(layout.row_names), "VECTORS": len(layout.vector_names), "QUADS": quads,
                "CLIP": layout.optimizer.clip_row_norm is not None,
                "DECAY": bool(layout.optimizer.idle_alpha or layout.optimizer.constant_decay),
                "AHEAD": deferred is not None and deferred.ahead, **self._deferred_options(deferred),
            }  # fmt: skip
            arguments = (
                *storage, norms, entries.grads, *sources, entries.pooling_weights, partials, pieces,
                self._table_descriptors, settings, *tables, *ends,
            )  # fmt: skip
            constants = common | {
                "TILE": tile, "ROWS": rows, "ALIGNMENT": group.alignment, "SHARED": entries.shared,
            }  # fmt: skip
            differing = (entries.keys, entries.grads, entries.pooling_weights, group.first_key, group.end_key)
            self._launch(update, programs, arguments, constants, self._warps(rows * group.block), differing)
            rest = (*storage, more_norms, *sources, partials, self._table_descriptors, settings, *tables, *ends)
            constants = common | {"WINDOW": self.tiling.window, "DEPTH": DEPTH}
            self._launch(finish, finishers, rest, constants, self._warps(DEPTH * group.block), differing)
            if rule is rules.NORM:
                total = total + norms.sum() + more_norms.sum()
        return total

    def _settings(self, step: int, scale: float) -> torch.Tensor:
        """Return rules.SETTINGS on the device."""
        optimizer, k = self.layout.optimizer, max(step, 1)
        rate = optimizer.rate(k)
        values = {
            "scale": scale,
            "clip": optimizer.clip_row_norm or 0.0,
            "rate": rate,
            "eps": getattr(optimizer, "eps", 0.0),
            "decay_factor": 1.0 - rate * optimizer.constant_decay,
            "alpha": optimizer.idle_alpha,
            "moments_decay": float(optimizer.moments_decay),
        }
        if optimizer.betas is not None:
            values["dense_moments"] = float(optimizer.dense_moments)
            for number, beta in zip("12", optimizer.betas, strict=True):
                values["gain" + number], values["unbias" + number] = 1.0 - beta, 1.0 / (1.0 - beta**k)
                values["log2_beta" + number] = math.log2(beta) if beta > 0.0 else LOG2_ZERO
        return self._staging(np.array([values.get(name, 0.0) for name in rules.SETTINGS]), torch.float64)

    def _deferred_options(self, deferred: DeferredUpdateCoefficients | None) -> dict[str, bool]:
        return {
            "DEFERRED": deferred is not None,
            "MOMENTUM": deferred is not None and deferred.momentum,
            "FROM_START": deferred is not None and deferred.from_start,
            "LOGS": deferred is not None and len(deferred.log_sums) > 0,
            "INSIDE": bool(getattr(self.layout.optimizer, "eps_inside_root", False)),
        }

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the tables' device current: Triton launches on the current device, whatever the tensors are on."""
        device = self.layout.weights.device
        is_current = device.type == "cpu" or torch.cuda.current_device() == device.index
        return contextlib.nullcontext() if is_current else torch.cuda.device(device)

    # --- kernel arguments --------------------------------------------------------------------------------------------

    def _group(self, dim: int) -> Group:
        layout = self.layout
        descriptors = [descriptor for descriptor in layout.descriptors if descriptor.dim == dim]
        alignment = min(
            _power_of_two_in(number)
            for number in (layout.total_dim, *(descriptor.column for descriptor in descriptors))
        )
        common, tables = [], [descriptor.table for descriptor in descriptors]
        for descriptor in descriptors:
            table = layout.tables[descriptor.table]
            common.append(
                [descriptor.number, descriptor.column, int(descriptor.mean), table.row_count, table.padding_row]
            )
        first_keys = [self._first_keys[t] for t in tables]
        return Group(
            dim,
            alignment,
            self._integers([words + self._bases(t) for words, t in zip(common, tables, strict=True)]),
            self._integers([[*words, self._first_keys[t], t] for words, t in zip(common, tables, strict=True)]),
            min(first_keys),
            max(self._first_keys[t] + layout.tables[t].row_count for t in tables),
        )

    def _table_words(self, t: int) -> list[int]:
        table = self.layout.tables[t]
        origin = [table.row_start, table.column_start, *table_key(self.layout.seed, table.name)]
        return [self._first_keys[t], *self._bases(t), *origin]

    def _bases(self, t: int) -> list[int]:
        layout = self.layout
        return [int(layout.weight_base[t]), int(layout.vector_base[t]), int(layout.step_base[t])]

    def _integers(self, words: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64, device=self.layout.device)

    def _scales(self, weights: torch.Tensor | None) -> torch.Tensor:
        return self._nothing if weights is None else weights.to(self.layout.compute_dtype).contiguous()

    def _swap_draws(self, swaps: Swaps) -> tuple[tuple[torch.Tensor, ...], bool]:
        """Return embeddings.sse.SwapDraws on the device, words as int64, and whether there is a graph."""
        if swaps.configs not in self._draws:
            layout = self.layout
            features = [
                (layout.tables[descriptor.table], descriptor.name, swaps.configs[descriptor.number])
                for descriptor in layout.descriptors
            ]
            draws = swap_draws(features, layout.seed)
            words, offsets, neighbours, thresholds = (
                torch.from_numpy(part.view(f"i{part.itemsize}")).to(layout.device) for part in draws
            )
            self._draws[swaps.configs] = (words, offsets, neighbours, thresholds), bool((words[:, 6] > 0).any())
        return self._draws[swaps.configs]


def _check_device(device: torch.device, interpreted: bool) -> None:
    if device.type == "cpu" and not interpreted:
        raise ValueError(
            "backend 'triton' runs on a GPU: pass device='cuda', or take backend 'cpu'. On the CPU its kernels run "
            "under Triton's interpreter alone, for tests: set TRITON_INTERPRET=1 before triton is imported"
        )
    if device.type != "cpu" and interpreted:
        raise ValueError(f"TRITON_INTERPRET=1 runs backend 'triton' on the CPU: unset it to use device {device}")


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_two_from(number: int) -> int:
    """Return the smallest power of two that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()


def _power_of_two_in(number: int) -> int:
    """Return the largest power of two, at most 16, that divides ``number``."""
    return 16 if number == 0 else min(16, number & -number)
