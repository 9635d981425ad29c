"""Which rows of a run mean something: only these steer the rotation, are judged by the gate, and are served."""

from __future__ import annotations

from embeddings.vectors.item_vectors import ItemVectors, chunks, row_norms
from embeddings.vectors.lazy_rows import Array


def eligible_rows(items: ItemVectors, norm_floor: float) -> Array:
    """Flag the rows that have a usable direction, bool [n].

    These were touched in training (``items.evidence``), are finite, and have a norm above ``norm_floor`` (at least 0).
    A row that was never touched, or decayed to nothing, has no direction that anybody could use.
    """
    usable = items.evidence.copy()
    for part in chunks(len(items)):
        # NaN compares false: a row that is not finite is not usable.
        usable[part] &= row_norms(items.vectors[part]) > norm_floor
    return usable
