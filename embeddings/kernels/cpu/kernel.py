"""The CPU backend: passes tables, batches and steps to the compiled kernels as C structures."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, pointer
from typing import Any

import numpy as np
import torch

from embeddings.kernels.cpu import library as native
from embeddings.kernels.cpu.buffers import BufferPool
from embeddings.kernels.cpu.library import library
from embeddings.kernels.layout import FeatureDescriptor, Layout, Record, Swaps
from embeddings.optim import RowOptimizer
from embeddings.optim.deferred_update import SMALLEST_FLOOR, DeferredUpdateCoefficients
from embeddings.sse.config import SSEConfig
from embeddings.sse.swap import SwapDraws, swap_draws
from embeddings.tables.philox import table_key

# Number of steps with tabulated powers of beta: two powers take as long as the rest of the update of a row of 16.
TABLED_POWERS = 4096
# Bytes of rows that a thread processes in about 0.1 ms; smaller calls use one thread, as a busy machine delays others.
BYTES_PER_THREAD = 1 << 18


class CpuKernel:
    """The compiled kernels as a :class:`embeddings.kernels.layout.Kernel`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._rule = native.rule_number(layout.optimizer.rule)  # raises now, not in the first step
        self._real = np.dtype(str(layout.compute_dtype).removeprefix("torch."))
        powers = np.arange(TABLED_POWERS)[:, None]
        self._beta_powers = (np.array(layout.optimizer.betas or (0.0, 0.0)) ** powers).astype(self._real)
        self._decay: tuple[np.ndarray, np.ndarray] | None = None
        self._outputs, self._ids, self._scratch = BufferPool(), BufferPool(), Scratch()
        self._draws: dict[tuple[SSEConfig, ...], SwapDraws] = {}
        features = [self._feature(descriptor) for descriptor in layout.descriptors]
        firsts = {
            descriptor.table: feature
            for descriptor, feature in zip(layout.descriptors[::-1], features[::-1], strict=True)
        }
        self._features = (native.Feature * len(features))(*features)
        self._firsts = (native.Feature * len(firsts))(*(firsts[t] for t in sorted(firsts)))

    def __reduce__(self) -> tuple[type[CpuKernel], tuple[Layout]]:
        # Structs of ctypes can't be pickled; they follow from the layout.
        return CpuKernel, (self.layout,)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        deferred: DeferredUpdateCoefficients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.layout
        batch = _Batch(indices, offsets, self._scales(weights), batch_size)
        ends = int(batch.offsets[0]), int(batch.offsets[-1])
        if ends != (0, len(indices)):
            raise layout.bad_ends(*ends, len(indices))
        num_outputs = batch_size if layout.pooled else len(indices)
        output = self._outputs.take(num_outputs, layout.total_dim, layout.compute_dtype)
        used, drawn = batch.ids, None
        if swaps is not None:
            used = self._ids.take(1, len(indices), torch.int64).view(-1)
            drawn = describe_swaps(self._swap_draws(swaps.configs), swaps.step, swaps.sample_offset)
        faults = np.zeros((len(layout.descriptors), 2), dtype=np.int64)
        tables, deferred_call = self._all_tables(), self._deferred(deferred)
        call = native.LookupCall(
            tables=pointer(tables), deferred=deferred_call and pointer(deferred_call.struct),
            swaps=drawn and pointer(drawn), batch=batch.struct, output=output.data_ptr(),
            used=used.data_ptr() if drawn else None,
            faults=faults.ctypes.data, ignore_bounds=layout.bounds == "ignore",
            num_threads=num_threads(self._num_bytes(len(indices))),
        )  # fmt: skip
        library().lookup(byref(call))
        if faults.any():
            f = int(np.flatnonzero(faults[:, 0])[0])
            descriptor, (fault, value) = layout.descriptors[f], (int(part) for part in faults[f])
            raise layout.bad_id(descriptor, value) if fault == native.BAD_ID else layout.bad_offsets(descriptor)
        return output, indices if swaps is None else used.to(indices.dtype)

    def read(self, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None) -> torch.Tensor:
        dim = self.layout.tables[t].dim
        # Not from the pool, because the caller may keep it.
        output = torch.empty(len(rows), dim, dtype=self.layout.compute_dtype)
        # A lookup of one feature with one id in each bag.
        tables, deferred_call = self._one_table(t), self._deferred(deferred)
        batch = _Batch(rows, torch.arange(len(rows) + 1, dtype=rows.dtype), None, len(rows))
        faults = np.zeros((1, 2), dtype=np.int64)
        call = native.LookupCall(
            tables=pointer(tables), deferred=deferred_call and pointer(deferred_call.struct), batch=batch.struct,
            output=output.data_ptr(), faults=faults.ctypes.data,
            num_threads=num_threads(len(rows) * dim * self._real.itemsize),
        )  # fmt: skip
        library().lookup(byref(call))
        assert not faults.any()
        return output

    def update(
        self, records: Sequence[Record], step: int, deferred: DeferredUpdateCoefficients | None, scale: float = 1.0
    ) -> None:
        call = self._update_call(records, deferred)
        call.struct.step = pointer(self._step(step, scale))
        _check(library().update(byref(call.struct)))

    def squared_norm(self, records: Sequence[Record]) -> float:
        found, call = ctypes.c_double(), self._update_call(records, None)
        _check(library().squared_norm(byref(call.struct), byref(found)))
        return found.value

    def _update_call(self, records: Sequence[Record], deferred: DeferredUpdateCoefficients | None) -> _Described:
        layout, num_features = self.layout, len(self.layout.descriptors)
        # Concatenate the gradients of several backward passes.
        grads = [record.grad for record in records]
        grad = grads[0]
        if len(grads) > 1:
            grad = self._outputs.take(sum(map(len, grads)), layout.total_dim, grad.dtype)
            torch.cat(grads, out=grad)
        batches = [
            _Batch(record.indices, record.offsets, self._scales(record.weights), record.batch_size(num_features))
            for record in records
        ]
        num_ids = sum(batch.struct.num_ids for batch in batches)
        row_bits = max((table.row_count - 1).bit_length() for table in layout.tables)
        if max(grad.numel(), num_ids).bit_length() + row_bits > 63:
            raise ValueError(f"a step over {grad.numel()} elements of gradient is too large: use smaller batches")
        described = (native.Record * len(batches))(*(native.Record(b.struct, grad.data_ptr()) for b in batches))
        tables, deferred_call = self._all_tables(), self._deferred(deferred)
        call = native.UpdateCall(
            tables=pointer(tables), deferred=deferred_call and pointer(deferred_call.struct), records=described,
            num_records=len(batches), scratch=self._scratch.handle,
            num_threads=num_threads(self._num_bytes(num_ids)),
        )  # fmt: skip
        return _Described(call, (grad, batches, tables, deferred_call, described))

    def _step(self, step: int, scale: float) -> Any:
        optimizer = self.layout.optimizer
        beta1, beta2 = optimizer.betas or (0.0, 0.0)
        rate = optimizer.rate(step)
        return native.Step(
            rate=rate, beta1=beta1, beta2=beta2, eps=self._eps(optimizer), alpha=optimizer.idle_alpha,
            decay_factor=1.0 - rate * optimizer.constant_decay, clip=optimizer.clip_row_norm or 0.0, scale=scale,
            beta_powers=self._beta_powers.ctypes.data, num_powers=len(self._beta_powers), step=step, rule=self._rule,
            dense_moments=optimizer.dense_moments, eps_inside_root=getattr(optimizer, "eps_inside_root", False),
            from_start=optimizer.decays_from_start, moments_decay=optimizer.moments_decay,
        )  # fmt: skip

    def _eps(self, optimizer: RowOptimizer) -> float:
        """Return the optimizer's eps, but at least the smallest eps that reading rows uses.

        With a smaller eps a product of two roots might underflow to 0.
        """
        power = 2 if getattr(optimizer, "eps_inside_root", False) else 1
        return max(float(getattr(optimizer, "eps", 0.0)), SMALLEST_FLOOR[self._real.name] ** power)

    def _num_bytes(self, num_ids: int) -> int:
        """Return the approximate size in bytes of the rows of ``num_ids`` ids."""
        return num_ids * self._real.itemsize * self.layout.total_dim // len(self.layout.descriptors)

    def _scales(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        return None if weights is None else weights.to(self.layout.compute_dtype).contiguous()

    def _swap_draws(self, configs: tuple[SSEConfig, ...]) -> SwapDraws:
        if configs not in self._draws:
            tables = self.layout.tables
            features = [(tables[s.table], s.name, c) for s, c in zip(self.layout.descriptors, configs, strict=True)]
            self._draws[configs] = swap_draws(features, self.layout.seed)
        return self._draws[configs]

    def _tables(self, features: Any, firsts: Any, total_dim: int, pooled: bool) -> Any:
        """Return a new C structure of the tables; a cached one would hold wrong pointers once the tables are copied."""
        layout = self.layout
        return native.Tables(
            weights=layout.weights.data_ptr(), vectors=layout.vectors.data_ptr(),
            row_values=layout.row_values.data_ptr() if layout.row_names else None,
            last_steps=layout.last_steps.data_ptr(), features=features, tables=firsts, num_features=len(features),
            num_tables=len(firsts), total_dim=total_dim, pooled=pooled,
            weight_type=native.type_number(layout.dtype), state_type=native.type_number(layout.state_dtype),
            any_mean=any(descriptor.mean for descriptor in layout.descriptors),
        )  # fmt: skip

    def _all_tables(self) -> Any:
        return self._tables(self._features, self._firsts, self.layout.total_dim, self.layout.pooled)

    def _one_table(self, t: int) -> Any:
        """Return a C structure of table ``t`` alone, with one sum-pooled feature, and padding as an ordinary row."""
        feature = native.Feature.from_buffer_copy(self._firsts[t])
        feature.table = feature.column = feature.mean = feature.first_row = 0
        feature.num_live = feature.num_rows
        one = (native.Feature * 1)(feature)
        return self._tables(one, one, feature.dim, True)

    def _feature(self, descriptor: FeatureDescriptor) -> Any:
        layout, t = self.layout, descriptor.table
        table, first_row = layout.tables[t], layout.tables[t].padding_row + 1
        key0, key1 = table_key(layout.seed, table.name)
        return native.Feature(
            table=t, column=descriptor.column, dim=descriptor.dim, mean=descriptor.mean,
            num_rows=table.row_count, first_row=first_row,
            num_live=max(0, table.row_count - first_row), weight_base=layout.weight_base[t],
            vector_base=layout.vector_base[t], step_base=layout.step_base[t],
            row_bits=max(0, table.row_count - 1).bit_length(), key0=key0, key1=key1, whole_row=table.row_start,
            whole_column=table.column_start,
        )  # fmt: skip

    def _deferred(self, deferred: DeferredUpdateCoefficients | None) -> _Described | None:
        if deferred is None:
            return None
        if self._decay is None or self._decay[0] is not deferred.decay:
            self._decay = (deferred.decay, deferred.decay.astype(self._real))
        near, lookahead = deferred.movements.astype(self._real), deferred.lookahead.astype(self._real)
        struct = native.DeferredUpdate(
            decay=self._decay[1].ctypes.data, near=near.ctypes.data, lookahead=lookahead.ctypes.data,
            log_sums=deferred.log_sums.ctypes.data, completed=deferred.completed_steps, num_decay=len(deferred.decay),
            num_near=len(near), num_pairs=len(lookahead) // 2, num_log_sums=len(deferred.log_sums),
            log_now=deferred.log_now, log_slope=deferred.log_slope, from_start=deferred.from_start,
            eps_inside_root=deferred.eps_inside_root, momentum=deferred.momentum,
        )  # fmt: skip
        return _Described(struct, (self._decay[1], near, lookahead, deferred.log_sums))


def num_threads(num_bytes: int) -> int:
    """Return the number of threads for a call: all that torch uses if there is work for two or more, else one.

    There is no number in between, because OpenMP ends threads that a call does not use.
    """
    return torch.get_num_threads() if num_bytes >= 2 * BYTES_PER_THREAD else 1


class _Described:
    """A C structure with the arrays that it points to, which must live as long as the structure."""

    def __init__(self, struct: Any, owners: tuple[Any, ...]) -> None:
        self.struct, self._owners = struct, owners


class _Batch:
    def __init__(self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, batch_size: int) -> None:
        self.ids, self.offsets, self.weights = ids.long(), offsets.long(), weights
        self.struct = native.Batch(
            ids=self.ids.data_ptr(), offsets=self.offsets.data_ptr(),
            weights=None if weights is None else weights.data_ptr(), num_ids=len(ids), batch_size=batch_size,
        )  # fmt: skip


class Scratch:
    """Working memory of the compiled update, kept from step to step; copying gives new, empty memory."""

    def __init__(self) -> None:
        self.handle = library().scratch_new()
        if not self.handle:
            raise MemoryError("no memory for the scratch space of an update")
        weakref.finalize(self, library().scratch_free, self.handle).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Scratch:
        return Scratch()

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory to sort the ids of this step: no row was changed; use smaller batches")


def describe_swaps(draws: SwapDraws, step: int, sample_offset: int) -> Any:
    """Return the C structure of some features' swaps; ``draws`` must live as long as the structure."""
    return native.Swaps(
        features=draws.words.ctypes.data, graph_offsets=draws.offsets.ctypes.data,
        neighbours=draws.neighbours.ctypes.data, thresholds=draws.thresholds.ctypes.data,
        sample_offset=sample_offset, step=step & 0xFFFFFFFF,
    )  # fmt: skip


def swap_feature(
    ids: torch.Tensor, offsets: torch.Tensor, draws: SwapDraws, step: int, sample_offset: int
) -> torch.Tensor:
    """Return the ids of one feature after SSE: the compiled form of :func:`embeddings.kernels.swap.swap`.

    ``ids`` [n] and ``offsets`` [B + 1], from 0, are int32 or int64; ``draws`` are those of the one feature.

    Raises:
        ValueError: offsets that decrease or do not end at the number of ids.
    """
    ids, offsets = ids.contiguous(), offsets.contiguous()
    if bool((offsets.diff() < 0).any()) or int(offsets[-1]) != len(ids):
        raise ValueError(f"offsets must not decrease and must end at the number of ids, {len(ids)}")
    batch, used = _Batch(ids, offsets, None, len(offsets) - 1), torch.empty(len(ids), dtype=torch.int64)
    swaps = describe_swaps(draws, step, sample_offset)
    call = native.SwapCall(
        batch=batch.struct, swaps=pointer(swaps), used=used.data_ptr(), num_threads=num_threads(8 * len(ids))
    )
    library().swap(byref(call))
    return used.to(ids.dtype)


def fill_keep_mask(
    keep: torch.Tensor,
    positions: torch.Tensor,
    samples: torch.Tensor,
    threshold: int,
    draw: tuple[int, int],
    key: tuple[int, int],
) -> None:
    """Fill the dropout mask ``keep``, for trainer.models.layers.dropout.

    Args:
        keep: bool [b, l, a multiple of 4], contiguous.
        positions: int64 [b, l], in [0, 2^16).
        samples: int64 [b], index of each sample in the global batch.
        threshold: an element is dropped if its random 32-bit word is below this.
        draw: the step, and the number of the dropout layer.
        key: key of the Philox generator.
    """
    positions, samples = positions.contiguous(), samples.contiguous()
    step, site = draw
    call = native.KeepMaskCall(
        keep=keep.data_ptr(), positions=positions.data_ptr(), samples=samples.data_ptr(), num_samples=len(positions),
        num_positions=positions.shape[1], num_quads=keep.shape[2] // 4, step=step, site=site, threshold=threshold,
        key0=key[0], key1=key[1],
    )  # fmt: skip
    library().keep_mask(byref(call))
