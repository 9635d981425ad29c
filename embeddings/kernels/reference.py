"""The plain torch kernel, slow and short; every other kernel is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from embeddings.kernels.layout import FeatureDescriptor, Layout, Record, Swaps
from embeddings.optim import Adam
from embeddings.optim.base import TouchedRows, root
from embeddings.optim.deferred_update import DeferredUpdateCoefficients, Movement
from embeddings.optim.stochastic_rounding import rounding_words, to_bfloat16, to_float16
from embeddings.sse.swap import swap_in_numpy
from embeddings.tables.philox import table_key


class ReferenceKernel:
    """The plain torch kernel as a :class:`embeddings.kernels.layout.Kernel`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

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
        layout.check_lookup(indices, offsets, batch_size)
        num_outputs = batch_size if layout.pooled else indices.numel()
        output = torch.zeros(num_outputs, layout.total_dim, dtype=layout.compute_dtype)
        used = indices if swaps is None else indices.clone()
        for descriptor in layout.descriptors:
            table = layout.tables[descriptor.table]
            bounds = offsets[descriptor.number * batch_size : (descriptor.number + 1) * batch_size + 1]
            span = slice(int(bounds[0]), int(bounds[-1]))
            bad = (used[span] < 0) | (used[span] >= table.row_count)
            if swaps is not None and swaps.configs[descriptor.number].probability > 0:
                swapped = swap_in_numpy(
                    used[span], bounds, table=table, feature=descriptor.name, config=swaps.configs[descriptor.number],
                    seed=layout.seed, step=swaps.step, sample_offset=swaps.sample_offset,
                )  # fmt: skip
                used[span] = torch.where(bad, used[span], swapped)
            ids, output_rows, scale = _entries(layout, descriptor, used, offsets, weights, batch_size)
            rows = read_rows(layout, descriptor.table, ids, deferred) * scale[:, None]
            output[:, descriptor.column : descriptor.column + descriptor.dim].index_add_(0, output_rows, rows)
        return output, used

    def read(self, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None) -> torch.Tensor:
        return read_rows(self.layout, t, rows, deferred)

    def update(
        self, records: Sequence[Record], step: int, deferred: DeferredUpdateCoefficients | None, scale: float = 1.0
    ) -> None:
        summed = [row_gradients(self.layout, t, records) for t in range(len(self.layout.tables))]
        for t, (rows, grad) in enumerate(summed):
            self._apply(t, rows, scale * grad, step, deferred)

    def squared_norm(self, records: Sequence[Record]) -> float:
        grads = (row_gradients(self.layout, t, records)[1] for t in range(len(self.layout.tables)))
        return sum(float(grad.double().square().sum()) for grad in grads)

    def _apply(
        self, t: int, rows: torch.Tensor, grad: torch.Tensor, step: int, deferred: DeferredUpdateCoefficients | None
    ) -> None:
        layout, optimizer = self.layout, self.layout.optimizer
        weight, last, real = layout.weight(t), layout.last_update_step(t), layout.compute_dtype
        if optimizer.clip_row_norm is not None:
            norm = grad.norm(dim=1, keepdim=True)
            grad = torch.where(norm > optimizer.clip_row_norm, grad * (optimizer.clip_row_norm / norm), grad)
        owing = (last[rows] > 0) | optimizer.decays_from_start
        num_idle = torch.where(owing, step - 1 - last[rows], 0).to(torch.float64)[:, None]
        rate = optimizer.rate(step)
        kept_share = (1 - torch.clamp(optimizer.idle_alpha * num_idle, max=1.0)) * (1 - rate * optimizer.constant_decay)
        theta = kept_share.to(real) * read_rows(layout, t, rows, deferred)
        left = None
        if optimizer.moments_decay:
            assert deferred is not None
            left = _column(layout, deferred.for_rows(last[rows].cpu().numpy())[0])
        square = grad.square().mean(dim=1, keepdim=True) if layout.row_names else grad**2
        shrunk = num_idle + 1 if optimizer.dense_moments else torch.ones_like(num_idle)
        names = optimizer.state_names[:-1]
        state = {name: layout.state(t, name)[rows].to(real) for name in names}
        touched = TouchedRows(theta, grad, square, state, shrunk, step, rate, deferred, left)
        optimizer.apply_rule(touched)
        for name in names:
            stored = layout.state(t, name)
            stored[rows] = touched.state[name].to(stored.dtype)
        weight[rows] = self._stored(t, rows, touched.theta, step)
        last[rows] = step

    def _stored(self, t: int, rows: torch.Tensor, theta: torch.Tensor, step: int) -> torch.Tensor:
        """Return ``theta`` in the type of stored rows; half types by :mod:`embeddings.optim.stochastic_rounding`."""
        layout, table = self.layout, self.layout.tables[t]
        if layout.dtype == layout.compute_dtype:
            return theta
        whole_rows = rows.cpu().numpy() + table.row_start
        words = rounding_words(table_key(layout.seed, table.name), step, whole_rows, table.column_start, table.dim)
        values = theta.cpu().numpy()
        if layout.dtype == torch.float16:
            return torch.from_numpy(to_float16(values, words)).to(layout.device)
        return torch.from_numpy(to_bfloat16(values, words)).view(torch.bfloat16).to(layout.device)


def row_gradients(layout: Layout, t: int, records: Sequence[Record]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the touched rows of table ``t``, int64 [n], and the sum of each row's recorded gradients [n, dim]."""
    table, device = layout.tables[t], layout.device
    ids = [torch.empty(0, dtype=torch.int64, device=device)]
    grads = [torch.empty(0, table.dim, dtype=layout.compute_dtype, device=device)]
    for record in records:
        for descriptor in (descriptor for descriptor in layout.descriptors if descriptor.table == t):
            batch_size = record.batch_size(len(layout.descriptors))
            rows, output_rows, scale = _entries(
                layout, descriptor, record.indices, record.offsets, record.weights, batch_size
            )
            ids.append(rows)
            columns = slice(descriptor.column, descriptor.column + descriptor.dim)
            grads.append(record.grad[output_rows, columns] * scale[:, None])
    rows, inverse = torch.unique(torch.cat(ids), return_inverse=True)
    grad = torch.zeros(len(rows), table.dim, dtype=layout.compute_dtype, device=device)
    return rows, grad.index_add_(0, inverse, torch.cat(grads))


def _entries(
    layout: Layout,
    descriptor: FeatureDescriptor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ids, their output rows, their weights) of those of a feature's ids that add to an output."""
    dtype, table, device = layout.compute_dtype, layout.tables[descriptor.table], indices.device
    bounds = offsets[descriptor.number * batch_size : (descriptor.number + 1) * batch_size + 1]
    span = slice(int(bounds[0]), int(bounds[-1]))
    ids = indices[span].to(torch.int64)
    bags = torch.repeat_interleave(torch.arange(batch_size, device=device), torch.diff(bounds))
    scale = torch.ones(len(ids), dtype=dtype, device=device) if weights is None else weights[span].to(dtype)
    real = (ids != table.padding_row) & (ids >= 0) & (ids < table.row_count)
    if descriptor.mean:
        counts = torch.zeros(batch_size, dtype=dtype, device=device).index_add_(0, bags, real.to(dtype))
        scale = scale / counts.clamp(min=1)[bags]
    kept = real & (scale != 0)
    output_rows = bags if layout.pooled else torch.arange(span.start, span.stop, device=device)
    return ids[kept], output_rows[kept], scale[kept]


def read_rows(layout: Layout, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None) -> torch.Tensor:
    """Return a copy of local rows of table ``t``, deferred updates applied, [len(rows), dim].

    The equation is theta_read in :mod:`embeddings.optim.deferred_update`.
    """
    theta = layout.weight(t)[rows].to(layout.compute_dtype)
    if deferred is None:
        return theta
    decay, movements = deferred.for_rows(layout.last_update_step(t)[rows].cpu().numpy())
    theta *= _column(layout, decay)
    for movement in movements:
        theta = _move(layout, t, rows, theta, movement)
    return theta


def read_rows_without_decay(
    layout: Layout, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None
) -> torch.Tensor:
    """Return rows as :func:`read_rows` does, but without the decay since their last touch; for every backend."""
    theta = layout.weight(t)[rows].to(layout.compute_dtype)
    if deferred is not None:
        for movement in deferred.without_decay(layout.last_update_step(t)[rows].cpu().numpy()):
            theta = _move(layout, t, rows, theta, movement)
    return theta


def _move(layout: Layout, t: int, rows: torch.Tensor, theta: torch.Tensor, movement: Movement) -> torch.Tensor:
    assert isinstance(layout.optimizer, Adam)
    m, v = (layout.state(t, name)[rows].to(layout.compute_dtype) for name in ("m", "v"))
    floor = _column(layout, movement.eps_term)
    return theta - _column(layout, movement.drift) * m / root(v, floor, layout.optimizer.eps_inside_root)


def _column(layout: Layout, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(layout.device, layout.compute_dtype)[:, None]
