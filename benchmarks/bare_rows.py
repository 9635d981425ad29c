"""The least that an update does: read and write the rows, state and last steps that it touches, and read gradients.

No sum, no root, no optimizer: what is left is memory, and how far below this an update could ever come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.threads import AHEAD
from embeddings.tables import EmbeddingTables


@njit(parallel=True, nogil=True, error_model="numpy")
def _touch(weights, vectors, last_steps, grads, places, ends, dim, width):  # type: ignore[no-untyped-def]
    for t in prange(ends.size - 1):
        for i in range(ends[t], ends[t + 1]):
            ahead = min(i + AHEAD, ends[t + 1] - 1)
            simd.prefetch_write(weights, places[ahead, 0], dim)
            simd.prefetch_write(vectors, places[ahead, 1], width)
            simd.prefetch_write(last_steps, places[ahead, 2], 1)
            simd.prefetch_read(grads, places[ahead, 3], dim)
            # One weight of the gradient is 0: it is read, and changes nothing.
            simd.descend(
                weights, places[i, 0], weights, places[i, 0], grads, places[i, 3], _NO_WORDS, 0,
                (np.float32(1.0), np.float32(0.0)), dim,
            )  # fmt: skip
            simd.put_scaled(vectors, places[i, 1], vectors, places[i, 1], (np.float32(1.0),), width)
            last_steps[places[i, 2]] += 0


_NO_WORDS = np.zeros(1, dtype=np.uint32)


class BareRows:
    """A pass over the rows that a batch touches in ``tables`` (one id for each feature and sample)."""

    def __init__(self, tables: EmbeddingTables) -> None:
        self.layout = tables.layout
        self.dim = self.layout.tables[0].dim

    def places(self, indices: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Where each touched row, its state, last step and one gradient of it lie, int64 [rows, 4]; table ends."""
        layout, parts = self.layout, []
        for t, ids in enumerate(indices.view(len(layout.tables), -1).numpy()):
            rows, first = np.unique(ids, return_index=True)
            width = self.dim * len(layout.vector_names)
            bases = layout.weight_base[t], layout.vector_base[t], layout.step_base[t]
            gradient = first * layout.total_dim + layout.slots[t].column
            columns = bases[0] + rows * self.dim, bases[1] + rows * width, bases[2] + rows, gradient
            parts.append(np.stack(columns, axis=1).astype(np.int64))
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    def __call__(self, places: tuple[np.ndarray, np.ndarray], grad: torch.Tensor) -> None:
        layout: Any = self.layout
        _touch(
            layout.weights.numpy(), layout.vectors.numpy(), layout.last_steps.numpy(), grad.numpy().reshape(-1),
            *places, self.dim, self.dim * len(layout.vector_names),
        )  # fmt: skip
