"""Move touched rows along their gradient for a second lookup, then put them back bit for bit, as SAM needs.

SAM is sharpness-aware minimization. Before a row is moved, its deferred update is applied. So the second lookup of
the same step reads theta_read + scale g, however long ago the row was touched. Until it is restored, the row is stored
with state 0 and as touched by the last step, so that no update of it is deferred.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.layout import Layout
from embeddings.kernels.reference import read_rows, row_gradients


class Saved(NamedTuple):
    """Rows of one table as they were stored: ``values`` are copies of these rows in ``parts``, views of the table."""

    rows: torch.Tensor
    parts: list[torch.Tensor]
    values: list[torch.Tensor]


class Perturbed:
    """Rows that :func:`perturb` changed; :meth:`restore` undoes it."""

    def __init__(self, layout: Layout, saved: list[Saved]):
        self._layout, self._saved = layout, saved

    def restore(self) -> None:
        """Put rows, state and last update steps back as they were, to the last bit; call it once."""
        # Lookups since then may have left rows in a kernel's cache.
        self._layout.access()
        for rows, parts, values in self._saved:
            for part, value in zip(parts, values, strict=True):
                part[rows] = value
        self._saved = []


def perturb(tables: EmbeddingTables, scale: float) -> Perturbed:
    """Move every touched row by ``scale`` times the sum of its recorded gradients, for lookups of the same step.

    The recorded gradients are kept. Until :meth:`Perturbed.restore` is called, the tables must take no step, and only
    the second lookup may read them.

    Raises:
        ValueError: half-precision rows, which could not hold a small change.
    """
    layout = tables.layout
    if layout.dtype != layout.compute_dtype:
        raise ValueError(f"rows of {layout.dtype} cannot hold a small change: use float32")
    saved, idle = [], tables._idle_now()
    for t, table in enumerate(layout.tables):
        rows, gradient = row_gradients(layout, t, tables._records)
        state = tables.state(table.name)
        parts = [tables.weight(table.name), state["last_update_step"]]
        # Lookups read the state only of optimizers with deferred updates.
        parts += [state[name] for name in layout.vector_names] if idle is not None else []
        moved = read_rows(layout, t, rows, idle) + scale * gradient
        saved.append(Saved(rows, parts, [part[rows] for part in parts]))
        parts[0][rows] = moved
        parts[1][rows] = tables.completed_steps - tables.birth_step
        for part in parts[2:]:
            part[rows] = 0
    return Perturbed(layout, saved)
