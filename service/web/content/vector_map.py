"""A map of vectors before and after a refresh: as they are served, and as they would be without the alignment.

Both maps have the same axes: the two directions in which the earlier version's vectors differ most. Without the
alignment a run's vectors have coordinates of their own, so its map is what a consumer of the earlier version would
have read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from embeddings.store import Collection, StoreError
from embeddings.store.version import VersionReader
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import FOUND, Array, as_list, shared_rows, unit_rows
from service.web.charts.clouds import frame_of, movement_map

NUM_ITEMS = 400
"""Drawn: spread evenly over the ids that both versions found."""
SAME_ROTATION = 1e-6


class Pair(NamedTuple):
    """Directions of the same items in two versions: ids, float64 [n, d] of each, and how many ids both have in all."""

    ids: list[Any]
    before: Array
    after: Array
    num_shared: int


def shared_directions(before: VersionReader, after: VersionReader, limit: int) -> Pair:
    """Return directions of at most ``limit`` items that both versions found, spread evenly over their ids."""
    old, new = shared_rows(before.keys, after.keys)
    num_shared = len(old)
    found = (before.statuses[old] == FOUND) & (after.statuses[new] == FOUND)
    old, new = old[found], new[found]
    chosen = np.unique(np.linspace(0, len(old) - 1, min(len(old), limit)).astype(np.int64)) if len(old) else old
    old, new = old[chosen], new[chosen]
    directions = [unit_rows(as_float32(one.vectors[rows]))[0] for one, rows in ((before, old), (after, new))]
    return Pair(as_list(before.keys[old]), directions[0], directions[1], num_shared)


def maps(collection: Collection, before: VersionReader, after: VersionReader) -> dict[str, Any] | None:
    """Return the two maps, and in words what they show; None where fewer than three items can be compared.

    Returns:
        ``aligned`` and ``unaligned``, each with ``svg`` and ``cosine``, the mean cosine of an item to itself;
        ``unaligned`` is None where nothing was turned, and ``note`` says why.
    """
    pair = shared_directions(before, after, NUM_ITEMS)
    if len(pair.ids) < 3:
        return None
    middle = pair.before.mean(axis=0)
    axes = np.linalg.svd(pair.before - middle, full_matrices=False)[2][:2]
    unturned, note = _unturned(collection, after, pair.after)
    flat = [
        (directions - middle) @ axes.T for directions in (pair.before, pair.after, unturned) if directions is not None
    ]
    clouds = [[(float(point[0]), float(point[-1])) for point in points] for points in flat]
    half = frame_of(*clouds)
    names = [str(one) for one in pair.ids]

    def drawn(cloud: int, directions: Array, how: str) -> dict[str, Any]:
        cosine = float(np.einsum("nd,nd->n", pair.before, directions).mean())
        title = f"{len(names)} items in {before.version} and {after.version}, {how}: mean cosine {cosine:.3f}"
        return {"svg": movement_map(clouds[0], clouds[cloud], names, half, title), "cosine": cosine}

    return {
        "num_items": len(names),
        "aligned": drawn(1, pair.after, "aligned"),
        "unaligned": None if unturned is None else drawn(2, unturned, "not aligned"),
        "note": note,
    }


def _unturned(collection: Collection, after: VersionReader, directions: Array) -> tuple[Array | None, str]:
    """Return the directions in the coordinates of the run that made them, None where these are those, and why."""
    try:
        rotation = collection.rotation(after.version)
    except StoreError:
        return None, f"The rotation of {after.version} is not stored, so what it was without it cannot be shown."
    if np.abs(rotation - np.eye(len(rotation))).max() < SAME_ROTATION:
        return None, f"{after.version} was not turned: its run's own coordinates are those that are served."
    turned: Array = directions @ rotation.T
    return turned, ""
