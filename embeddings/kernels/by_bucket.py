"""Tables whose rows have an optimizer by bucket: a kernel for each optimizer, over the same rows.

Each is given the ids of its own rows, the others with weight 0: such a row adds nothing, is not touched, and counts
in a mean all the same. So kernels know nothing of buckets, and tables without them pay nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from embeddings.kernels.layout import Kernel, Layout, Record, Swaps
from embeddings.kernels.reference import read_rows_without_decay
from embeddings.optim import ByBucket
from embeddings.optim.deferred_update import ByBucketCoefficients


class ByBucketKernel:
    """A :class:`embeddings.kernels.layout.Kernel` of tables that are trained by a :class:`embeddings.optim.ByBucket`.

    Args:
        layout: the storage; its optimizer is a ByBucket.
        make: returns the kernel of a layout with one optimizer.
    """

    def __init__(self, layout: Layout, make: Callable[[Layout], Kernel]) -> None:
        assert isinstance(layout.optimizer, ByBucket)
        self.layout, self._make = layout, make
        self._layouts = [layout.trained_by(one) for one in layout.optimizer.optimizers]
        self._kernels = [make(one) for one in self._layouts]
        self._numbers = torch.from_numpy(layout.optimizer.numbers).to(layout.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ByBucketKernel:
        # Its kernels share the rows of the copy.
        return ByBucketKernel(copy.deepcopy(self.layout, memo), self._make)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        swaps: Swaps | None,
        deferred: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        used = indices
        if swaps is not None:
            # Which bucket an id is in is known after it is swapped.
            _, used = self._kernels[0].forward(indices, offsets, weights, batch_size, swaps, None)
        output: torch.Tensor | None = None
        owners = self._owners(used, offsets, batch_size)
        for number, kernel in enumerate(self._kernels):
            own = self._weights(owners, weights, number)
            part, _ = kernel.forward(used, offsets, own, batch_size, None, _of(deferred, number))
            output = part if output is None else output.add_(part)
        assert output is not None
        return output, used

    def read(self, t: int, rows: torch.Tensor, deferred: Any) -> torch.Tensor:
        return self._read(t, rows, lambda number, own: self._kernels[number].read(t, own, _of(deferred, number)))

    def read_without_decay(self, t: int, rows: torch.Tensor, deferred: Any) -> torch.Tensor:
        """Return rows as :func:`embeddings.kernels.reference.read_rows_without_decay` does."""
        return self._read(t, rows, lambda n, own: read_rows_without_decay(self._layouts[n], t, own, _of(deferred, n)))

    def _read(self, t: int, rows: torch.Tensor, read: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        output = torch.empty(
            len(rows), self.layout.tables[t].dim, dtype=self.layout.compute_dtype, device=self.layout.device
        )
        owners = self._numbers[self.layout.bucket(t)[rows].long()]
        for number in range(len(self._kernels)):
            own = torch.nonzero(owners == number).flatten()
            output[own] = read(number, rows[own])
        return output

    def update(self, records: Sequence[Record], step: int, deferred: Any, scale: float = 1.0) -> None:
        """Apply the recorded gradients, optimizer by optimizer.

        Where memory fails in one of them but the first, rows of those before it have changed: go on from a checkpoint.
        """
        owners = [self._owners(record.indices, record.offsets, self._batch_size(record)) for record in records]
        for number, kernel in enumerate(self._kernels):
            own = [
                record._replace(weights=self._weights(of_record, record.weights, number))
                for record, of_record in zip(records, owners, strict=True)
            ]
            kernel.update(own, step, _of(deferred, number), scale)

    def squared_norm(self, records: Sequence[Record]) -> float:
        return self._kernels[0].squared_norm(records)

    def check(self) -> None:
        """Raise what a device found of the ids since it was asked last."""
        for kernel in self._kernels:
            if hasattr(kernel, "check"):
                kernel.check()

    def forget(self) -> None:
        """Drop what a device found of the ids."""
        for kernel in self._kernels:
            if hasattr(kernel, "forget"):
                kernel.forget()

    def _batch_size(self, record: Record) -> int:
        return record.batch_size(len(self.layout.descriptors))

    def _owners(self, ids: torch.Tensor, offsets: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Return which optimizer trains each looked-up row, int64 [n]; of bad ids and offsets, which kernels refuse, 0.

        Ids are in the order of features.
        """
        owners = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        if not batch_size:
            return owners
        ends = offsets[::batch_size].tolist()
        for descriptor in self.layout.descriptors:
            of_feature = slice(ends[descriptor.number], ends[descriptor.number + 1])
            own, num_rows = ids[of_feature].long(), self.layout.tables[descriptor.table].row_count
            if num_rows:
                buckets = self.layout.bucket(descriptor.table)[own.clamp(0, num_rows - 1)]
                owners[of_feature] = self._numbers[buckets.long()]
        return owners

    def _weights(self, owners: torch.Tensor, weights: torch.Tensor | None, number: int) -> torch.Tensor:
        """Return the weights of the ids for one optimizer's kernel, [n]: 0 where another one trains the row."""
        own = (owners == number).to(self.layout.compute_dtype)
        return own if weights is None else torch.where(owners == number, weights.to(own.dtype), own)


def _of(deferred: ByBucketCoefficients | None, number: int) -> Any:
    return None if deferred is None else deferred.of_each[number]
