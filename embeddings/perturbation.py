"""Move touched rows along their gradient for a second lookup, then put them back bit for bit, as SAM needs.

SAM is sharpness-aware minimization. Before a row is moved, its deferred update is applied. So the second lookup of
the same step reads theta_read + scale g, however long ago the row was touched. Until it is restored, the row is stored
with state 0 and as touched by the last step, so that no update of it is deferred.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.reference import read_rows, row_gradients


def perturb(tables: EmbeddingTables, scale: float) -> Callable[[], None]:
    """Move every touched row by ``scale`` times the sum of its recorded gradients, for lookups of the same step.

    The recorded gradients are kept. Until the function that is returned is called, the tables must take no step, and
    only the second lookup may read them.

    Returns:
        A function that puts rows, state and last update steps back as they were, to the last bit.

    Raises:
        ValueError: half-precision rows, which could not hold a small change.
    """
    layout = tables.layout
    if layout.dtype != layout.compute_dtype:
        raise ValueError(f"rows of {layout.dtype} cannot hold a small change: use float32")
    # For each table the moved rows, views of its parts, and copies of these rows in the parts.
    saved: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
    idle = tables._idle_now()
    for t, table in enumerate(layout.tables):
        rows, gradient = row_gradients(layout, t, tables._records)
        state = tables.state(table.name)
        parts = [tables.weight(table.name), state["last_update_step"]]
        # Lookups read the state only of optimizers with deferred updates.
        parts += [state[name] for name in layout.vector_names] if idle is not None else []
        moved = read_rows(layout, t, rows, idle) + scale * gradient
        saved.append((rows, parts, [part[rows] for part in parts]))
        parts[0][rows] = moved
        parts[1][rows] = tables.completed_steps - tables.birth_step
        for part in parts[2:]:
            part[rows] = 0

    def restore() -> None:
        # Lookups since then may have left rows in a kernel's cache.
        layout.access()
        for rows, parts, values in saved:
            for part, value in zip(parts, values, strict=True):
                part[rows] = value
        saved.clear()

    return restore
