"""FBGEMM's compiled CPU kernels on our storage: fused SGD, exact Adagrad and exact rowwise Adagrad.

FBGEMM's module (``SplitTableBatchedEmbeddingBagsCodegen``) applies its optimizer inside ``backward``, once for each
backward, keeps rows of its own, and takes dims that are multiples of 4. The operators under it have none of these
limits: they read and write any flat tensor at any offsets. So a step is here what it is in every backend: ``backward``
records, and ``update`` hands *all* records to the fused backward operator as one batch. FBGEMM sums the gradients of a
row before it applies them, so two backwards are one exact step. What a bag leaves out (padding, weight 0, ids out of
bounds) is taken out before FBGEMM sees it, and a mean is a sum with weights 1 / count (docs/adr/0009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import torch

from embeddings.decay import IdleCoefficients
from embeddings.kernels.layout import FeatureSlot, Layout, Record, Swaps
from embeddings.optim import SGD, Adagrad, RowOptimizer, RowwiseAdagrad
from embeddings.sse import swap

# FBGEMM's numbers of PoolingMode.SUM, EmbeddingLocation.HOST and SparseType.FP32.
_SUM, _HOST, _FP32 = 0, 0, 0

OPTIMIZERS = (SGD, Adagrad, RowwiseAdagrad)


class Bags(NamedTuple):
    """What FBGEMM is given: ids without those that add nothing, and their weights."""

    indices: torch.Tensor  # int32 or int64 [m]
    lengths: torch.Tensor  # int64 [F, B]
    shares: torch.Tensor  # float32 [m]

    @property
    def offsets(self) -> torch.Tensor:
        """Where each bag starts, of the type of the indices [F * B + 1]."""
        ends = self.lengths.reshape(-1).cumsum(0, dtype=self.indices.dtype)
        return torch.cat([ends.new_zeros(1), ends])


class _Geometry:
    """Where FBGEMM finds the tables of some features: one entry for each feature, as its operators want it."""

    def __init__(self, layout: Layout, slots: Sequence[FeatureSlot]) -> None:
        tables = [slot.table for slot in slots]
        # A table without rows would be taken for a part of the next one, which starts at the same number.
        starts = [0]
        for table in layout.tables:
            starts.append(starts[-1] + max(1, table.row_count))
        columns = [0]
        for slot in slots:
            columns.append(columns[-1] + slot.dim)
        base = layout.step_base if layout.row_names else layout.vector_base
        self.placements = torch.full((len(slots),), _HOST, dtype=torch.int32)
        self.weight_offsets = torch.tensor([int(layout.weight_base[t]) for t in tables])
        self.state_offsets = torch.tensor([int(base[t]) for t in tables])
        self.column_offsets = torch.tensor(columns, dtype=torch.int32)
        self.total_dim, self.max_dim = columns[-1], max(slot.dim for slot in slots)
        self.row_starts = torch.tensor([*(starts[t] for t in tables), starts[max(tables) + 1]])
        self.row_bits = int(math.log2(starts[-1])) + 1


class FbgemmKernel:
    """See :class:`embeddings.kernels.layout.Kernel`. Raises ValueError for what FBGEMM's CPU kernels cannot do."""

    def __init__(self, layout: Layout) -> None:
        refuse(layout.optimizer, layout.dtype)
        self.layout = layout
        self._all = _Geometry(layout, layout.slots)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        idle: IdleCoefficients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(indices, offsets, batch_size)
        used = indices if swaps is None else self._swapped(indices, offsets, batch_size, swaps)
        bags, g = self._bags(used, offsets, weights, batch_size), self._all
        if batch_size == 0:
            return torch.zeros(0, self.layout.total_dim), used
        output: torch.Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            self.layout.weights, g.weight_offsets, g.column_offsets, g.total_dim, g.row_starts, bags.indices,
            bags.offsets, _SUM, bags.shares, _FP32,
        )  # fmt: skip
        return output, used

    def _check(self, indices: torch.Tensor, offsets: torch.Tensor, batch_size: int) -> None:
        """That bags and ids exist: FBGEMM would read whatever memory they point to."""
        if int(offsets[0]) != 0 or int(offsets[-1]) != indices.numel():
            raise self.layout.bad_ends(int(offsets[0]), int(offsets[-1]), indices.numel())
        for slot in self.layout.slots:
            bounds = offsets[slot.number * batch_size : (slot.number + 1) * batch_size + 1]
            if bool((bounds.diff() < 0).any()):
                raise self.layout.bad_offsets(slot)
            ids = indices[int(bounds[0]) : int(bounds[-1])]
            if not ids.numel():
                continue
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.layout.tables[slot.table].row_count:
                raise self.layout.bad_id(slot, low if low < 0 else high)

    def _swapped(self, indices: torch.Tensor, offsets: torch.Tensor, batch_size: int, swaps: Swaps) -> torch.Tensor:
        """The ids after SSE, which FBGEMM knows nothing of: the same bits as inside the other backends' lookups."""
        used = indices.clone()
        for slot, config in zip(self.layout.slots, swaps.configs, strict=True):
            if config.probability == 0.0:
                continue
            bounds = offsets[slot.number * batch_size : (slot.number + 1) * batch_size + 1]
            span = slice(int(bounds[0]), int(bounds[-1]))
            used[span] = swap(
                used[span], bounds, table=self.layout.tables[slot.table], feature=slot.name, config=config,
                seed=self.layout.seed, step=swaps.step, sample_offset=swaps.sample_offset,
            )  # fmt: skip
        return used

    def _bags(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, batch_size: int
    ) -> Bags:
        """The ids that add something, with their weights."""
        layout = self.layout
        lengths = offsets.diff().view(len(layout.slots), batch_size).long()
        real = torch.ones(len(indices), dtype=torch.bool)
        shares = torch.ones(len(indices)) if weights is None else weights.float()
        for slot in layout.slots:
            padding_row = layout.tables[slot.table].padding_row
            span = slice(int(offsets[slot.number * batch_size]), int(offsets[(slot.number + 1) * batch_size]))
            if padding_row >= 0:
                torch.ne(indices[span], padding_row, out=real[span])
            if slot.mean:
                counts = _sums(real[span], lengths[slot.number]).clamp(min=1)
                shares = shares.clone() if shares is weights else shares
                shares[span] /= counts.repeat_interleave(lengths[slot.number])
        kept = real if weights is None else real & (shares != 0)
        if bool(kept.all()):
            return Bags(indices, lengths, shares)
        return Bags(indices[kept], _sums(kept, lengths.reshape(-1)).view_as(lengths), shares[kept])

    def read(self, t: int, rows: torch.Tensor, idle: IdleCoefficients | None) -> torch.Tensor:
        return self.layout.weight(t)[rows]

    def update(self, records: Sequence[Record], step: int, idle: IdleCoefficients | None, scale: float = 1.0) -> None:
        bags, grad = self._joined(records)
        if not bags.indices.numel():
            return
        if scale != 1.0:
            grad = grad * scale
        layout, optimizer, g = self.layout, self.layout.optimizer, self._all
        rate = torch.tensor(optimizer.rate(step), dtype=torch.float32)
        common = (
            grad, layout.weights, g.placements, g.weight_offsets, g.column_offsets, g.max_dim, g.row_starts,
            g.row_bits, bags.indices, bags.offsets, _SUM, bags.shares, False,
        )  # fmt: skip
        ops = torch.ops.fbgemm
        if isinstance(optimizer, RowwiseAdagrad):
            ops.split_embedding_backward_codegen_rowwise_adagrad_cpu(
                *common, layout.row_values, g.placements, g.state_offsets, rate, optimizer.eps
            )
        elif isinstance(optimizer, Adagrad):
            ops.split_embedding_backward_codegen_adagrad_cpu(
                *common, layout.vectors, g.placements, g.state_offsets, rate, optimizer.eps
            )
        else:
            ops.split_embedding_backward_codegen_sgd_cpu(*common, rate)
        for t, ids in self._touched(bags):
            layout.last_update_step(t)[ids] = step

    def squared_norm(self, records: Sequence[Record]) -> float:
        """Sum over touched rows of the squared length of their gradient, in float64."""
        bags, grad = self._joined(records)
        total, first = 0.0, 0
        rows = dict(self._touched(bags))
        sums: dict[int, list[torch.Tensor]] = {}
        for slot, lengths in zip(self.layout.slots, bags.lengths, strict=True):
            end = first + int(lengths.sum())
            samples = torch.arange(lengths.numel()).repeat_interleave(lengths)
            block = grad[:, slot.column : slot.column + slot.dim].double()
            sums.setdefault(slot.table, []).append(block[samples] * bags.shares[first:end, None].double())
            first = end
        for t, ids in rows.items():
            unique, inverse = torch.unique(ids, return_inverse=True)
            parts = torch.cat(sums[t])
            summed = torch.zeros(len(unique), parts.shape[1], dtype=torch.float64).index_add_(0, inverse, parts)
            total += float(summed.square().sum())
        return total

    def _joined(self, records: Sequence[Record]) -> tuple[Bags, torch.Tensor]:
        """All records as one batch, and its output gradient [samples of all records, sum of dims]."""
        parts = [self._bags(record.indices, record.offsets, record.weights, len(record.grad)) for record in records]
        if len(parts) == 1:
            return parts[0], records[0].grad
        sizes = [part.lengths.sum(dim=1).tolist() for part in parts]
        indices = [part.indices.split(size) for part, size in zip(parts, sizes, strict=True)]
        shares = [part.shares.split(size) for part, size in zip(parts, sizes, strict=True)]
        features = range(len(self.layout.slots))
        return (
            Bags(
                torch.cat([each[f] for f in features for each in indices]),
                torch.cat([part.lengths for part in parts], dim=1),
                torch.cat([each[f] for f in features for each in shares]),
            ),
            torch.cat([record.grad for record in records]),
        )

    def _touched(self, bags: Bags) -> list[tuple[int, torch.Tensor]]:
        """(table, its ids in the batch)."""
        ends = [0, *bags.lengths.sum(dim=1).cumsum(0).tolist()]
        found = []
        for t in range(len(self.layout.tables)):
            numbers = [slot.number for slot in self.layout.slots if slot.table == t]
            found.append((t, bags.indices[ends[numbers[0]] : ends[numbers[-1] + 1]].long()))
        return found


def refuse(optimizer: RowOptimizer, dtype: torch.dtype) -> None:
    """Raises ValueError, with the remedy, for what FBGEMM's fused CPU kernels have no form of."""
    if type(optimizer) not in OPTIMIZERS:
        raise ValueError(
            f"FBGEMM has no fused {type(optimizer).__name__} on CPU: use backend 'numba' (kernel: evenkeel), or one of "
            f"{', '.join(kind.__name__ for kind in OPTIMIZERS)}"
        )
    options = {"clip_row_norm": optimizer.clip_row_norm, "weight_decay": optimizer.constant_decay}
    options["eps_inside_root"] = getattr(optimizer, "eps_inside_root", False)
    asked = [name for name, value in options.items() if value]
    if asked:
        raise ValueError(
            f"FBGEMM's fused {type(optimizer).__name__} on CPU has no {' and no '.join(asked)}: "
            "use backend 'numba' (kernel: evenkeel), or leave it out"
        )
    if dtype != torch.float32:
        raise ValueError(f"FBGEMM trains {dtype} rows on CPU in no form: use torch.float32, or backend 'numba'")


def _sums(flags: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many of ``flags`` are set in each of the consecutive runs of these lengths, int64."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), flags.cumsum(0)])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return before[ends[1:]] - before[ends[:-1]]
