"""FBGEMM's compiled CPU kernels on the layout's storage: fused SGD, exact Adagrad and exact rowwise Adagrad.

FBGEMM's module (``SplitTableBatchedEmbeddingBagsCodegen``) applies its optimizer inside ``backward``, once for each
backward, keeps rows of its own, and takes dims that are multiples of 4. The operators that it calls have none of these
limits: they read and write any flat tensor at any offsets. So a step works as in every backend: ``backward`` records,
and ``update`` passes *all* records to the fused backward operator as one batch. FBGEMM sums the gradients of a row
before it applies them, so two backwards are one exact step. Ids that add nothing (padding, weight 0, out of bounds) are
removed before FBGEMM sees them, and a mean is a sum with weights 1 / count (docs/adr/0009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import torch

from embeddings.kernels.layout import FeatureDescriptor, Layout, Record, Swaps
from embeddings.kernels.swap import swap
from embeddings.optim import SGD, Adagrad, RowwiseAdagrad
from embeddings.optim.deferred_update import DeferredUpdateCoefficients

# FBGEMM's numbers of PoolingMode.SUM, EmbeddingLocation.HOST and SparseType.FP32.
_SUM, _HOST, _FP32 = 0, 0, 0

OPTIMIZERS = (SGD, Adagrad, RowwiseAdagrad)


class Bags(NamedTuple):
    """The bags of a group in FBGEMM's form: the ids that add something, and their weights."""

    indices: torch.Tensor  # int32 or int64 [m]
    lengths: torch.Tensor  # int64 [F, B]
    pooling_weights: torch.Tensor  # float32 [m]

    @property
    def offsets(self) -> torch.Tensor:
        """The offset of each bag, of the type of the indices [F * B + 1]."""
        ends = self.lengths.reshape(-1).cumsum(0, dtype=self.indices.dtype)
        return torch.cat([ends.new_zeros(1), ends])


class Group:
    """Features that one call looks up, and for each feature the position of its table in the flat storage."""

    def __init__(self, layout: Layout, descriptors: Sequence[FeatureDescriptor]) -> None:
        self.descriptors = tuple(descriptors)
        tables = [descriptor.table for descriptor in descriptors]
        # Give an empty table one row: FBGEMM would merge it with the next table if both started at the same number.
        starts = [0]
        for table in layout.tables:
            starts.append(starts[-1] + max(1, table.row_count))
        columns = [0]
        for descriptor in descriptors:
            columns.append(columns[-1] + descriptor.dim)
        base = layout.step_base if layout.row_names else layout.vector_base
        self.placements = torch.full((len(descriptors),), _HOST, dtype=torch.int32)
        self.weight_offsets = torch.tensor([int(layout.weight_base[t]) for t in tables])
        self.state_offsets = torch.tensor([int(base[t]) for t in tables])
        self.column_offsets = torch.tensor(columns, dtype=torch.int32)
        self.total_dim, self.max_dim = columns[-1], max(descriptor.dim for descriptor in descriptors)
        self.row_starts = torch.tensor([*(starts[t] for t in tables), starts[max(tables) + 1]])
        self.row_bits = int(math.log2(starts[-1])) + 1


class FbgemmKernel:
    """FBGEMM's CPU operators as a :class:`embeddings.kernels.layout.Kernel`.

    One call looks up all tables. Without pooling there is one call for each table, in which every id is a bag.

    Raises:
        ValueError: FBGEMM's CPU kernels do not support the tables or the optimizer.
    """

    def __init__(self, layout: Layout) -> None:
        refuse(layout)
        self.layout = layout
        descriptors = layout.descriptors
        by_table = [
            [descriptor for descriptor in descriptors if descriptor.table == t][:1] for t in range(len(layout.tables))
        ]
        self._groups = [Group(layout, group) for group in ([descriptors] if layout.pooled else by_table)]

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
        # FBGEMM would read whatever memory bad ids and offsets point to.
        layout.check_lookup(indices, offsets, batch_size)
        used = indices if swaps is None else self._swapped(indices, offsets, batch_size, swaps)
        if batch_size == 0 or (indices.numel() == 0 and not layout.pooled):
            return torch.zeros(0, layout.total_dim, device=indices.device), used
        outputs = [
            self._look_up(group, bags)
            for group, bags in zip(self._groups, self._bags(used, offsets, weights, batch_size), strict=True)
            if bags.lengths.numel()
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), used

    def _look_up(self, group: Group, bags: Bags) -> torch.Tensor:
        """Return the weighted sums of the bags, [B, columns of the group]."""
        return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            self.layout.weights, group.weight_offsets, group.column_offsets, group.total_dim, group.row_starts,
            bags.indices, bags.offsets, _SUM, bags.pooling_weights, _FP32,
        )  # fmt: skip

    def _swapped(self, indices: torch.Tensor, offsets: torch.Tensor, batch_size: int, swaps: Swaps) -> torch.Tensor:
        """Return the ids after SSE, the same bits as inside the other backends' lookups."""
        used = indices.clone()
        for descriptor, config in zip(self.layout.descriptors, swaps.configs, strict=True):
            if config.probability == 0.0:
                continue
            bounds = offsets[descriptor.number * batch_size : (descriptor.number + 1) * batch_size + 1]
            span = slice(int(bounds[0]), int(bounds[-1]))
            table = self.layout.tables[descriptor.table]
            swapped = swap(
                used[span].long().cpu(), bounds.long().cpu(), table=table, feature=descriptor.name, config=config,
                seed=self.layout.seed, step=swaps.step, sample_offset=swaps.sample_offset,
            )  # fmt: skip
            inside = (used[span] >= 0) & (used[span] < table.row_count)
            used[span] = torch.where(inside, swapped.to(used), used[span])
        return used

    def _bags(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, batch_size: int
    ) -> list[Bags]:
        """Return the bags of each group: the ids that add something, with their weights."""
        layout = self.layout
        lengths = offsets.diff().view(len(layout.descriptors), batch_size).long()
        real = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
        pooling_weights = torch.ones(len(indices), device=indices.device) if weights is None else weights.float()
        ends = [0, *lengths.sum(dim=1).cumsum(0).tolist()]
        for descriptor in layout.descriptors:
            table, span = layout.tables[descriptor.table], slice(ends[descriptor.number], ends[descriptor.number + 1])
            if table.padding_row >= 0:
                torch.ne(indices[span], table.padding_row, out=real[span])
            if layout.bounds == "ignore":
                real[span] &= (indices[span] >= 0) & (indices[span] < table.row_count)
            if descriptor.mean:
                counts = _sums(real[span], lengths[descriptor.number]).clamp(min=1)
                pooling_weights = pooling_weights.clone() if pooling_weights is weights else pooling_weights
                pooling_weights[span] /= counts.repeat_interleave(lengths[descriptor.number])
        kept = real if weights is None else real & (pooling_weights != 0)
        if layout.pooled:
            if bool(kept.all()):
                return [Bags(indices, lengths, pooling_weights)]
            return [Bags(indices[kept], _sums(kept, lengths.reshape(-1)).view_as(lengths), pooling_weights[kept])]
        found = []
        for group in self._groups:
            t = group.descriptors[0].table
            features = [descriptor.number for descriptor in layout.descriptors if descriptor.table == t]
            span = slice(ends[features[0]], ends[features[-1] + 1])
            mine = kept[span]
            found.append(Bags(indices[span][mine], mine.long()[None], pooling_weights[span][mine]))
        return found

    def read(self, t: int, rows: torch.Tensor, deferred: DeferredUpdateCoefficients | None) -> torch.Tensor:
        return self.layout.weight(t)[rows]

    def update(
        self, records: Sequence[Record], step: int, deferred: DeferredUpdateCoefficients | None, scale: float = 1.0
    ) -> None:
        for group, bags, grad in list(self._joined(records)):
            if bags.indices.numel():
                self._apply(group, bags, grad if scale == 1.0 else grad * scale, step)
                for t, ids in self._touched(group, bags):
                    self.layout.last_update_step(t)[ids] = step

    def _apply(self, group: Group, bags: Bags, grad: torch.Tensor, step: int) -> None:
        layout, optimizer, ops = self.layout, self.layout.optimizer, torch.ops.fbgemm
        rate = torch.tensor(optimizer.rate(step), dtype=torch.float32)
        batch = (
            grad, layout.weights, group.placements, group.weight_offsets, group.column_offsets, group.max_dim,
            group.row_starts, group.row_bits, bags.indices, bags.offsets, _SUM, bags.pooling_weights, False,
        )  # fmt: skip
        if isinstance(optimizer, RowwiseAdagrad):
            ops.split_embedding_backward_codegen_rowwise_adagrad_cpu(
                *batch, layout.row_values, group.placements, group.state_offsets, rate, optimizer.eps
            )
        elif isinstance(optimizer, Adagrad):
            ops.split_embedding_backward_codegen_adagrad_cpu(
                *batch, layout.vectors, group.placements, group.state_offsets, rate, optimizer.eps
            )
        else:
            ops.split_embedding_backward_codegen_sgd_cpu(*batch, rate)

    def squared_norm(self, records: Sequence[Record]) -> float:
        """Return the sum over touched rows of the squared length of their gradient, in float64."""
        total = 0.0
        for group, bags, grad in self._joined(records):
            parts: dict[int, list[torch.Tensor]] = {}
            first = column = 0
            for descriptor, lengths in zip(group.descriptors, bags.lengths, strict=True):
                end = first + int(lengths.sum())
                samples = torch.arange(lengths.numel(), device=grad.device).repeat_interleave(lengths)
                block = grad[:, column : column + descriptor.dim].double()[samples]
                block *= bags.pooling_weights[first:end, None].double()
                parts.setdefault(descriptor.table, []).append(block)
                first, column = end, column + descriptor.dim
            for t, ids in self._touched(group, bags):
                unique, inverse = torch.unique(ids, return_inverse=True)
                summed = grad.new_zeros(len(unique), self.layout.tables[t].dim, dtype=torch.float64)
                total += float(summed.index_add_(0, inverse, torch.cat(parts[t])).square().sum())
        return total

    def _joined(self, records: Sequence[Record]) -> Iterator[tuple[Group, Bags, torch.Tensor]]:
        """Yield for each group all records as one batch, and its output gradient [samples or ids, columns]."""
        num_features = len(self.layout.descriptors)
        batches = [
            self._bags(record.indices, record.offsets, record.weights, record.batch_size(num_features))
            for record in records
        ]
        starts = [0] * len(records)
        for number, group in enumerate(self._groups):
            parts = [batch[number] for batch in batches]
            grads = []
            for r, record in enumerate(records):
                end = starts[r] + parts[r].lengths.shape[1]
                grads.append(record.grad[starts[r] : end])
                starts[r] = end
            if len(parts) == 1:
                yield group, parts[0], grads[0].contiguous()
                continue
            sizes = [part.lengths.sum(dim=1).tolist() for part in parts]
            indices = [part.indices.split(size) for part, size in zip(parts, sizes, strict=True)]
            pooling_weights = [part.pooling_weights.split(size) for part, size in zip(parts, sizes, strict=True)]
            features = range(len(group.descriptors))
            joined = Bags(
                torch.cat([each[f] for f in features for each in indices]),
                torch.cat([part.lengths for part in parts], dim=1),
                torch.cat([each[f] for f in features for each in pooling_weights]),
            )
            yield group, joined, torch.cat(grads)

    def _touched(self, group: Group, bags: Bags) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (table, its ids in the batch)."""
        ends = [0, *bags.lengths.sum(dim=1).cumsum(0).tolist()]
        for t in dict.fromkeys(descriptor.table for descriptor in group.descriptors):
            numbers = [number for number, descriptor in enumerate(group.descriptors) if descriptor.table == t]
            yield t, bags.indices[ends[numbers[0]] : ends[numbers[-1] + 1]].long()


def refuse(layout: Layout) -> None:
    """Raise ValueError, with the remedy, if FBGEMM's fused CPU kernels do not support the layout."""
    optimizer, kind = layout.optimizer, type(layout.optimizer)
    remedy = "use backend 'cpu' (kernel: evenkeel)"
    if kind not in OPTIMIZERS:
        names = ", ".join(each.__name__ for each in OPTIMIZERS)
        raise ValueError(f"FBGEMM has no fused {kind.__name__} on CPU: {remedy}, or one of {names}")
    for option in ("eps_inside_root", "weight_decay", "clip_row_norm"):
        if getattr(optimizer, option, None):
            raise ValueError(f"FBGEMM's fused {kind.__name__} has no {option}: {remedy}, or leave it out")
    if layout.dtype != torch.float32 or layout.state_dtype != torch.float32:
        raise ValueError(
            f"FBGEMM trains float32 rows and state on CPU, not {layout.dtype} with {layout.state_dtype}: use "
            f"torch.float32, or {remedy.removeprefix('use ')}"
        )


def _sums(flags: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Count the set ``flags`` in each of the consecutive runs of these lengths, int64."""
    before = torch.nn.functional.pad(flags.cumsum(0), (1, 0))
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return before[ends[1:]] - before[ends[:-1]]
