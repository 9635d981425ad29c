"""How far two versions of a collection are from each other: items that came and went, and how the others moved."""

from __future__ import annotations

from typing import Any

import numpy as np

from embeddings.store.version import VersionReader
from embeddings.vectors.item_vectors import Array
from service.web.charts.bars import histogram
from service.web.content.vector_map import shared_directions

NUM_ITEMS = 20_000
"""Compared: spread evenly over the ids that both versions found."""
NUM_BINS = 20
NUM_MOVED = 10


def drift(before: VersionReader, after: VersionReader) -> dict[str, Any] | None:
    """Measure the movement of the items that both versions found; None where there is none.

    Returns:
        ``num_items`` compared; ``mean``, ``low`` (the tenth part that moved most is below) and ``least`` cosine;
        ``svg``, a histogram of cosines; ``moved``, the ids that moved most, each with its cosine; how many ids
        ``came`` and ``went``.
    """
    pair = shared_directions(before, after, NUM_ITEMS)
    if not pair.ids:
        return None
    cosines: Array = np.einsum("nd,nd->n", pair.before, pair.after)
    lowest = float(np.floor(cosines.min() * 20) / 20)
    counts, edges = np.histogram(cosines, bins=NUM_BINS, range=(min(lowest, 0.95), 1.0 + 1e-9))
    order = np.argsort(cosines, kind="stable")[:NUM_MOVED]
    title = f"{len(pair.ids)} items by cosine between {before.version} and {after.version}"
    return {
        "num_items": len(pair.ids),
        "mean": float(cosines.mean()),
        "low": float(np.quantile(cosines, 0.1)),
        "least": float(cosines.min()),
        "svg": histogram(counts.tolist(), edges.tolist(), title, "cosine to itself"),
        "moved": [(pair.ids[row], float(cosines[row])) for row in order],
        "came": len(after) - pair.num_shared,
        "went": len(before) - pair.num_shared,
    }
