"""The Numba kernel: table-batched, parallel over samples (lookup) and rows (update), compiled once and cached on disk.

Every row is read or written by one thread, and duplicates of a row are summed in the order in which they occur in the
batch, so results are bitwise the same for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange

from embeddings.decay import IdleCoefficients
from embeddings.kernels import simd
from embeddings.kernels.layout import Layout, Record, Swaps
from embeddings.optim import SGD, Adagrad, Adam
from embeddings.philox import LOW_WORD_STREAM, MULTIPLIERS, NUM_ROUNDS, ONE_WORD_LIMIT, WEYL
from embeddings.sse import HIT_STREAM, ROW_STREAM, draw_words

# Samples that one task looks up: enough to pay for the task, few enough to balance threads.
BLOCK = 64
# Ids ahead of the current one whose rows are prefetched.
AHEAD = 12
# Entries that one task of the update sorts: both buffers stay in the second-level cache.
STRIPE = 4096
RADIX_BITS = 9
# Rows that one thread should have to itself, about 0.1 ms. On a busy machine each thread more is one more to wait for.
BYTES_PER_THREAD = 1 << 18

# Columns of the feature description given to compiled code.
TABLE, COLUMN, DIM, MEAN, ROWS, PADDING, WEIGHT_BASE, VECTOR_BASE, STEP_BASE = range(9)
RULE_SGD, RULE_ADAGRAD, RULE_ADAM = range(3)
RULES = {Adam: RULE_ADAM, Adagrad: RULE_ADAGRAD, SGD: RULE_SGD}


def _disk_cache() -> bool:
    """Whether compiled code can be kept: beside this file, or else in the user's cache directory (NUMBA_CACHE_DIR)."""
    try:
        njit(cache=True)(_disk_cache)
    except RuntimeError:
        return False
    return True


_OPTIONS: dict[str, Any] = {"cache": _disk_cache(), "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_LOW_STREAM = np.uint64(ROW_STREAM + LOW_WORD_STREAM)
_HIT_STREAM, _ROW_STREAM = np.uint64(HIT_STREAM), np.uint64(ROW_STREAM)
_POSITION_MASK, _ONE_WORD = np.uint64(0xFFFF), np.uint64(ONE_WORD_LIMIT)


@njit(**_OPTIONS)
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    for _ in range(NUM_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@njit(**_OPTIONS)
def _lane(words, lane):  # type: ignore[no-untyped-def]
    if lane == 0:
        return words[0]
    if lane == 1:
        return words[1]
    if lane == 2:
        return words[2]
    return words[3]


@njit(**_OPTIONS)
def _draw(step, group, place, lane, key0, key1, num_others):  # type: ignore[no-untyped-def]
    """Uniform in [0, num_others): see embeddings.philox.uniform_below."""
    high = _lane(_philox(step, group, place, _ROW_STREAM, key0, key1), lane)
    if num_others <= _ONE_WORD:
        return np.int64((high * num_others) >> _SHIFT)
    low = _lane(_philox(step, group, place, _LOW_STREAM, key0, key1), lane)
    return np.int64((high * num_others + ((low * num_others) >> _SHIFT)) >> _SHIFT)


@njit(**_OPTIONS)
def _swap_block(indices, used, offsets, first_bag, start, end, sample_offset, step, draws):  # type: ignore[no-untyped-def]
    """SSE-SE of the bags [start, end) of one feature, bit for bit as embeddings.sse.swap."""
    threshold, place, key0, key1 = draws[0], draws[1], draws[2], draws[3]
    num_others, first_live = draws[4], np.int64(draws[5])
    first_id = offsets[first_bag + start]
    single = True
    for bag in range(first_bag + start, first_bag + end):
        single &= offsets[bag + 1] - offsets[bag] == 1
    if single:
        # The usual case, one id for each sample, in a loop that the compiler can turn into vectors.
        group = (sample_offset + start) >> 2
        num_groups = ((sample_offset + end - 1) >> 2) + 1 - group
        words = np.empty((BLOCK // 4 + 1, 4), np.uint32)
        for g in range(num_groups):
            w0, w1, w2, w3 = _philox(step, np.uint64(group + g) & _MASK, place, _HIT_STREAM, key0, key1)
            words[g, 0], words[g, 1], words[g, 2], words[g, 3] = w0, w1, w2, w3
        flat = words.reshape(-1)
        skip = sample_offset + start - 4 * group
        for j in range(end - start):
            row = indices[first_id + j]
            if flat[skip + j] < threshold and row >= first_live:
                sample = sample_offset + start + j
                drawn = _draw(step, np.uint64(sample >> 2) & _MASK, place, sample & 3, key0, key1, num_others)
                row = first_live + drawn + (1 if drawn >= row - first_live else 0)
            used[first_id + j] = row
        return
    group = (sample_offset + start) >> 2
    while group * 4 < sample_offset + end:
        low = max(group * 4, sample_offset + start)
        high = min(group * 4 + 4, sample_offset + end)
        longest = 0
        for sample in range(low, high):
            bag = first_bag + sample - sample_offset
            longest = max(longest, offsets[bag + 1] - offsets[bag])
        for position in range(longest):
            at = place | (np.uint64(position) & _POSITION_MASK)
            words = _philox(step, np.uint64(group) & _MASK, at, _HIT_STREAM, key0, key1)
            for sample in range(low, high):
                bag = first_bag + sample - sample_offset
                i = offsets[bag] + position
                if i < offsets[bag + 1]:
                    row = indices[i]
                    if row >= first_live and _lane(words, sample & 3) < threshold:
                        drawn = _draw(step, np.uint64(group) & _MASK, at, sample & 3, key0, key1, num_others)
                        row = first_live + drawn + (1 if drawn >= row - first_live else 0)
                    used[i] = row
        group += 1


@njit(parallel=True, **_OPTIONS)
def _swap_feature(indices, used, offsets, sample_offset, step, draws):  # type: ignore[no-untyped-def]
    batch_size = offsets.size - 1
    for block in prange((batch_size + BLOCK - 1) // BLOCK):
        start, end = block * BLOCK, min(block * BLOCK + BLOCK, batch_size)
        _swap_block(indices, used, offsets, 0, start, end, sample_offset, step, draws)


# Inlined as these are called for each id: a call would count references of every array it is given (50 ns).
@njit(inline="always", **_OPTIONS)
def _idle(last, completed, decay, momentum, near_c, near_e, far_c, far_e, late_decay):  # type: ignore[no-untyped-def]
    """P, eta C and eps E of a row last touched at step ``last``: see embeddings.decay."""
    real = decay.dtype.type
    if last == 0:
        return real(1.0), real(0.0), real(1.0)
    idle = completed - last
    p = decay[min(idle, decay.size - 1)]
    if not momentum:
        return p, real(0.0), real(1.0)
    if idle < near_c.size:
        return p, near_c[idle], near_e[idle]
    step = min(last, far_c.size - 1)
    return p, far_c[step] * late_decay[min(idle, late_decay.size - 1)], far_e[step]


@njit(inline="always", **_OPTIONS)
def _share(indices, first, last, slot):  # type: ignore[no-untyped-def]
    """What each id of a bag weighs: 1, or for the mean 1 over the number of ids that are not padding."""
    if slot[MEAN] == 0:
        return 1.0
    count = 0
    for i in range(first, last):
        count += 1 if indices[i] != slot[PADDING] else 0
    return 1.0 / max(count, 1)


@njit(**_OPTIONS)
def _fault(slot, indices, offsets, first_bag, end_bag):  # type: ignore[no-untyped-def]
    """(0, 0) if the bags can be looked up, (1, id) for an id that is no row, (2, 0) for offsets that decrease."""
    first, last = offsets[first_bag], offsets[end_bag]
    ordered = (first >= 0) & (last <= indices.size)
    for bag in range(first_bag, end_bag):
        ordered &= offsets[bag] <= offsets[bag + 1]
    if not ordered:
        return 2, 0
    inside = True
    for i in range(first, last):
        inside &= (indices[i] >= 0) & (indices[i] < slot[ROWS])
    if not inside:
        for i in range(first, last):
            if indices[i] < 0 or indices[i] >= slot[ROWS]:
                return 1, indices[i]
    return 0, 0


@njit(parallel=True, **_OPTIONS)
def _lookup(  # type: ignore[no-untyped-def]
    output, weights, vectors, last_steps, slots, indices, used, offsets, scales, draws, batch_size, sample_offset,
    step_word, completed, has_idle, decay, momentum, near_c, near_e, far_c, far_e, late_decay, faults,
):  # fmt: skip
    real = output.dtype.type
    num_blocks = (batch_size + BLOCK - 1) // BLOCK
    total_dim = output.size // max(batch_size, 1)
    for task in prange(slots.shape[0] * num_blocks):
        f, block = task // num_blocks, task % num_blocks
        slot = slots[f]
        dim, base, vector_base, padding = slot[DIM], slot[WEIGHT_BASE], slot[VECTOR_BASE], slot[PADDING]
        step_base = slot[STEP_BASE]
        start, end = block * BLOCK, min(block * BLOCK + BLOCK, batch_size)
        fault, value = _fault(slot, indices, offsets, f * batch_size + start, f * batch_size + end)
        if fault != 0:
            faults[f, 0], faults[f, 1] = fault, value
            continue
        first_id, end_id = offsets[f * batch_size + start], offsets[f * batch_size + end]
        if draws.size and draws[f, 0] > 0:
            _swap_block(indices, used, offsets, f * batch_size, start, end, sample_offset, step_word, draws[f])
        elif draws.size:
            used[first_id:end_id] = indices[first_id:end_id]
        for i in range(first_id, min(first_id + AHEAD, end_id)):
            simd.prefetch_read(weights, base + used[i] * dim, dim)
        for b in range(start, end):
            out = b * total_dim + slot[COLUMN]
            first, last = offsets[f * batch_size + b], offsets[f * batch_size + b + 1]
            share = _share(used, first, last, slot)
            empty = True
            for i in range(first, last):
                if i + AHEAD < end_id:
                    ahead = used[i + AHEAD]
                    simd.prefetch_read(weights, base + ahead * dim, dim)
                    if has_idle:
                        simd.prefetch_read(last_steps, step_base + ahead, 1)
                    if momentum:
                        simd.prefetch_read(vectors, vector_base + ahead * 2 * dim, 2 * dim)
                row = used[i]
                scale = real(share)
                if scales.size:
                    scale *= scales[i]
                if row == padding or scale == 0.0:
                    continue
                factor, moved, floor = scale, real(0.0), real(1.0)
                if has_idle:
                    p, c, floor = _idle(
                        np.int64(last_steps[step_base + row]), completed,
                        decay, momentum, near_c, near_e, far_c, far_e, late_decay,
                    )  # fmt: skip
                    factor, moved = scale * p, scale * c
                at = base + row * dim
                if moved == 0.0:
                    if empty:
                        simd.put_scaled(output, out, weights, at, (factor,), dim)
                    else:
                        simd.add_scaled(output, out, weights, at, (factor,), dim)
                else:
                    vector = vector_base + row * 2 * dim
                    if empty:
                        simd.put_moved(output, out, weights, at, vectors, vector, (factor, moved, floor), dim)
                    else:
                        simd.add_moved(output, out, weights, at, vectors, vector, (factor, moved, floor), dim)
                empty = False
            if empty:
                for d in range(out, out + dim):
                    output[d] = 0.0


@njit(parallel=True, **_OPTIONS)
def _entries(slots, indices, offsets, scales, batch_size, first_bag, total_dim, rows, places, shares):  # type: ignore[no-untyped-def]
    """For each looked-up id its row (-1: not touched), where its gradient starts, and its weight."""
    num_blocks = (batch_size + BLOCK - 1) // BLOCK
    for task in prange(slots.shape[0] * num_blocks):
        f, block = task // num_blocks, task % num_blocks
        slot = slots[f]
        for b in range(block * BLOCK, min(block * BLOCK + BLOCK, batch_size)):
            first, last = offsets[f * batch_size + b], offsets[f * batch_size + b + 1]
            share = _share(indices, first, last, slot)
            for i in range(first, last):
                scale = share * (scales[i] if scales.size else 1.0)
                touched = indices[i] != slot[PADDING] and scale != 0.0
                rows[i] = indices[i] if touched else -1
                places[i] = (first_bag + b) * total_dim + slot[COLUMN]
                shares[i] = scale


@njit(parallel=True, **_OPTIONS)
def _partition(rows, ranges, masks, blocks, counts, order):  # type: ignore[no-untyped-def]
    """Stably sorts the entries of each block of a table by stripe (row & mask).

    ranges: int64 [blocks, 3], (table, first entry, end) in order. counts: int64 [blocks, stripes], zeroed. Gives in
    ``order`` the entries of table 0 stripe 0, table 0 stripe 1, ..., each in their original order.
    """
    num_blocks = ranges.shape[0]
    for block in prange(num_blocks):
        mask = masks[ranges[block, 0]]
        for i in range(ranges[block, 1], ranges[block, 2]):
            if rows[i] >= 0:
                counts[block, rows[i] & mask] += 1
    total = 0
    for t in range(masks.size):
        for stripe in range(masks[t] + 1):
            blocks[t, stripe] = total
            for block in range(num_blocks):
                if ranges[block, 0] == t:
                    count = counts[block, stripe]
                    counts[block, stripe] = total
                    total += count
        blocks[t, masks[t] + 1] = total
    for block in prange(num_blocks):
        mask = masks[ranges[block, 0]]
        for i in range(ranges[block, 1], ranges[block, 2]):
            if rows[i] >= 0:
                stripe = rows[i] & mask
                order[counts[block, stripe]] = i
                counts[block, stripe] += 1


@njit(**_OPTIONS)
def _sort_by_row(order, rows, num_rows, shift):  # type: ignore[no-untyped-def]
    """Stable radix sort of entry numbers by their row, of which the lowest ``shift`` bits are equal."""
    n = order.size
    keys, other_keys = np.empty(n, np.int64), np.empty(n, np.int64)
    other = np.empty(n, order.dtype)
    for i in range(n):
        keys[i] = rows[order[i]]
    starts = np.empty(1 << RADIX_BITS, np.int64)
    while (num_rows - 1) >> shift > 0:
        starts[:] = 0
        for i in range(n):
            starts[(keys[i] >> shift) & ((1 << RADIX_BITS) - 1)] += 1
        total = 0
        for digit in range(starts.size):
            count = starts[digit]
            starts[digit] = total
            total += count
        for i in range(n):
            digit = (keys[i] >> shift) & ((1 << RADIX_BITS) - 1)
            other[starts[digit]] = order[i]
            other_keys[starts[digit]] = keys[i]
            starts[digit] += 1
        order, other = other, order
        keys, other_keys = other_keys, keys
        shift += RADIX_BITS
    return order, keys


@njit(parallel=True, **_OPTIONS)
def _update(  # type: ignore[no-untyped-def]
    weights, vectors, last_steps, grads, geometry, num_vectors, rows, places, shares, order, tasks, rule, step,
    alpha, beta1, beta2, eta, eps, has_idle, decay, momentum, near_c, near_e, far_c, far_e, late_decay,
):  # fmt: skip
    real = weights.dtype.type
    gain1, gain2, small = real(1.0 - beta1), real(1.0 - beta2), real(eps)
    rate, root = real(eta / (1.0 - beta1**step)), real(1.0 / np.sqrt(1.0 - beta2**step))
    for task in prange(tasks.shape[0]):
        t, first, end, shift = tasks[task]
        if first == end:
            continue
        table = geometry[t]
        dim, base, vector_base, step_base = table[DIM], table[WEIGHT_BASE], table[VECTOR_BASE], table[STEP_BASE]
        width = num_vectors * dim
        entries, keys = _sort_by_row(order[first:end], rows, table[ROWS], shift)
        n = end - first
        total = np.empty(dim, weights.dtype)
        i = 0
        while i < n:
            row = keys[i]
            last = i + 1
            while last < n and keys[last] == row:
                last += 1
            if i + AHEAD < n:
                ahead = keys[i + AHEAD]
                simd.prefetch_write(weights, base + ahead * dim, dim)
                simd.prefetch_write(vectors, vector_base + ahead * width, width)
                simd.prefetch_write(last_steps, step_base + ahead, 1)
                simd.prefetch_read(grads, places[entries[i + AHEAD]], dim)
            grad, g = grads, places[entries[i]]
            share = real(shares[entries[i]])
            if last > i + 1 or share != 1.0:
                simd.put_scaled(total, 0, grads, g, (share,), dim)
                for j in range(i + 1, last):
                    if j + AHEAD < n:
                        simd.prefetch_read(grads, places[entries[j + AHEAD]], dim)
                    share = real(shares[entries[j]])
                    simd.add_scaled(total, 0, grads, places[entries[j]], (share,), dim)
                grad, g = total, 0
            i = last
            at, vector = base + row * dim, vector_base + row * width
            seen = np.int64(last_steps[step_base + row])
            last_steps[step_base + row] = step
            if rule == RULE_ADAM:
                idle = step - 1 - seen if seen > 0 else 0
                p, c, floor = real(1.0), real(0.0), real(1.0)
                if has_idle:
                    p, c, floor = _idle(seen, step - 1, decay, momentum, near_c, near_e, far_c, far_e, late_decay)
                keep = real(1.0 - min(1.0, alpha * idle))
                passed = idle if momentum else 0
                moved = keep * c
                scalars = (
                    keep * p, moved, floor, real(beta1 ** (passed + 1)), real(beta2 ** (passed + 1)),
                    gain1, gain2, rate, root, small,
                )  # fmt: skip
                if moved == 0.0:
                    simd.adam_at_rest(weights, at, vectors, vector, grad, g, scalars, dim)
                else:
                    simd.adam(weights, at, vectors, vector, grad, g, scalars, dim)
            elif rule == RULE_ADAGRAD:
                simd.adagrad(weights, at, vectors, vector, grad, g, (real(eta), small), dim)
            else:
                simd.descend(weights, at, grad, g, (real(eta),), dim)


def swap_feature(ids: np.ndarray, offsets: np.ndarray, words: np.ndarray, step: int, sample_offset: int) -> np.ndarray:
    """Compiled form of :func:`embeddings.sse.swap`; ``words`` from draw_words, ``offsets`` from 0."""
    if (np.diff(offsets) < 0).any() or int(offsets[-1]) != len(ids):
        raise ValueError(f"offsets must not decrease and must end at the number of ids, {len(ids)}")
    _use_threads(8 * len(ids))
    used = np.empty_like(ids)
    _swap_feature(ids, used, offsets, sample_offset, np.uint64(step & 0xFFFFFFFF), words)
    return used


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
        self._no_draws = np.empty((0, 6), dtype=np.uint64)
        self._rate, self._eps = float(layout.optimizer.learning_rate), float(getattr(layout.optimizer, "eps", 0.0))
        self._cast: tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, ...]] | None = None
        self._draws: dict[tuple[float, ...], np.ndarray] = {}

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
        _use_threads(self._bytes(indices.numel()))
        output = torch.empty(batch_size, layout.total_dim, dtype=layout.dtype)
        used, draws, sample_offset, step_word = indices, self._no_draws, 0, np.uint64(0)
        if swaps is not None:
            used, draws = torch.empty_like(indices), self._swap_words(swaps.probabilities)
            sample_offset, step_word = swaps.sample_offset, np.uint64(swaps.step & 0xFFFFFFFF)
        faults = np.zeros((len(layout.slots), 2), dtype=np.int64)
        _lookup(
            output.numpy().reshape(-1), *self._storage(), self._slots, indices.numpy(), used.numpy(),
            offsets.numpy(), self._scales(weights), draws, batch_size, sample_offset, step_word,
            *self._idle_arguments(idle), faults,
        )  # fmt: skip
        for slot in layout.slots:
            if faults[slot.number, 0]:
                fault, value = (int(part) for part in faults[slot.number])
                raise layout.bad_id(slot, value) if fault == 1 else layout.bad_offsets(slot)
        return output, used

    def read(self, t: int, rows: torch.Tensor, idle: IdleCoefficients | None) -> torch.Tensor:
        _use_threads(len(rows) * self.layout.tables[t].dim * self._no_scales.itemsize)
        output = torch.empty(len(rows), self.layout.tables[t].dim, dtype=self.layout.dtype)
        # A lookup of one feature with one id in each bag, padding being a row like others.
        slot = self._geometry[t : t + 1].copy()
        slot[0, [COLUMN, MEAN, PADDING]] = 0, 0, -1
        ids, faults = rows.numpy(), np.zeros((1, 2), dtype=np.int64)
        _lookup(
            output.numpy().reshape(-1), *self._storage(), slot, ids, ids, np.arange(len(ids) + 1), self._no_scales,
            self._no_draws, len(ids), 0, np.uint64(0), *self._idle_arguments(idle), faults,
        )  # fmt: skip
        assert not faults.any()
        return output

    def update(self, records: Sequence[Record], step: int, idle: IdleCoefficients | None) -> None:
        grads = records[0].grad if len(records) == 1 else torch.cat([record.grad for record in records])
        num_entries = sum(record.indices.numel() for record in records)
        _use_threads(self._bytes(num_entries))
        rows, places = np.empty(num_entries, np.int64), np.empty(num_entries, np.int64)
        shares = np.empty(num_entries, self._no_scales.dtype)
        spans: list[list[tuple[int, int]]] = [[] for _ in self.layout.tables]
        first_entry = first_bag = 0
        for record in records:
            batch_size, end = len(record.grad), first_entry + record.indices.numel()
            offsets = record.offsets.numpy()
            _entries(
                self._slots, record.indices.numpy(), offsets, self._scales(record.weights), batch_size, first_bag,
                self.layout.total_dim, rows[first_entry:end], places[first_entry:end], shares[first_entry:end],
            )  # fmt: skip
            for slot in self.layout.slots:
                bounds = offsets[[slot.number * batch_size, (slot.number + 1) * batch_size]] + first_entry
                spans[slot.table].append((int(bounds[0]), int(bounds[1])))
            first_entry, first_bag = end, first_bag + batch_size
        order, tasks = _plan(rows, spans)
        optimizer = self.layout.optimizer
        betas = (optimizer.beta1, optimizer.beta2) if isinstance(optimizer, Adam) else (0.0, 0.0)
        rule = next(number for kind, number in RULES.items() if isinstance(optimizer, kind))
        _update(
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

    def _swap_words(self, probabilities: tuple[float, ...]) -> np.ndarray:
        """embeddings.sse.draw_words of each feature, uint64 [F, 6]."""
        if probabilities not in self._draws:
            tables, slots, seed = self.layout.tables, self.layout.slots, self.layout.seed
            self._draws[probabilities] = np.stack(
                [draw_words(tables[s.table], s.name, p, seed) for s, p in zip(slots, probabilities, strict=True)]
            )
        return self._draws[probabilities]

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


def _plan(rows: np.ndarray, spans: Sequence[Sequence[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Entries grouped by table and stripe; a task for each group: int64 [tasks, 4] (table, first, end, equal bits)."""
    counts = [sum(end - first for first, end in table) for table in spans]
    bits = [min(10, max(0, (count - 1) // STRIPE).bit_length()) for count in counts]
    masks = np.array([(1 << b) - 1 for b in bits], dtype=np.int64)
    ranges = [
        (t, at, min(at + STRIPE * 4, end))
        for t, table in enumerate(spans)
        for first, end in table
        for at in range(first, end, STRIPE * 4)
    ]
    stripes = int(masks.max()) + 1
    bounds = np.zeros((len(spans), stripes + 1), dtype=np.int64)
    order = np.empty(rows.size, dtype=np.int64)
    block_counts = np.zeros((len(ranges), stripes), dtype=np.int64)
    _partition(rows, np.array(ranges, dtype=np.int64).reshape(-1, 3), masks, bounds, block_counts, order)
    tasks = [
        (t, bounds[t, stripe], bounds[t, stripe + 1], bits[t])
        for t in range(len(spans))
        for stripe in range(1 << bits[t])
    ]
    return order, np.array(tasks, dtype=np.int64)


def _use_threads(num_bytes: int) -> None:
    """As many threads as torch uses in this process, as far as Numba has them and there is work for them."""
    wanted = torch.get_num_threads()
    numba.set_num_threads(max(1, min(wanted, numba.config.NUMBA_NUM_THREADS, num_bytes // BYTES_PER_THREAD)))
    if torch.get_num_threads() != wanted:
        # Starting Numba's threads sets the number of OpenMP threads, which torch's is.
        torch.set_num_threads(wanted)
