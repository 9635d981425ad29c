"""Comparison of two versions of a collection: their drift, and maps of their vectors.

One map shows the vectors of both versions as they are served, the other shows them as they would be without alignment.
Both maps have the same axes: the two directions in which the earlier version's vectors differ most. Without alignment,
each run's vectors have coordinates of their own: the second map shows what a consumer of the earlier version would have
read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from embeddings.store import Collection, StoreError
from embeddings.store.version import VersionReader
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import FOUND, Array, as_list, shared_rows, unit_rows
from service.core.errors import invalid
from service.features.store_access import in_store
from service.web.charts.movement import half_width, histogram, movement_map
from service.web.content.item_words import categories, coloured, words_of
from service.web.request import DashboardRequest
from trainer.spec.problems import FieldProblem

NUM_KEPT = 16
"""Number of comparisons kept in memory, since versions do not change and a map takes a singular value decomposition."""
DRIFT_ITEMS = 20_000
"""Most items whose movement is measured, spread evenly over the ids that both versions have vectors for."""
NUM_BINS = 20
NUM_MOVED = 10
MAP_ITEMS = 400
"""Most items on a map, spread evenly over the ids that both versions have vectors for."""
SAME_ROTATION = 1e-6
_kept: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()
_lock = threading.Lock()


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Compare the versions that the query names in ``before`` and ``after``.

    ``after`` defaults to the served version, ``before`` to the version from which ``after`` was made.

    Raises:
        Problem: 404 for a version that does not exist, 422 for versions of different dimensions.
    """
    return await in_store(_compared, request)


def _compared(request: DashboardRequest) -> dict[str, Any]:
    collection = request.collection()
    usable = [
        manifest for manifest in collection.versions() if manifest["state"] != "expired" and not manifest["damaged"]
    ]
    shown: dict[str, Any] = {"name": collection.name, "usable": [manifest["version"] for manifest in usable][::-1]}
    if len(usable) < 2:
        return {**shown, "before": None, "after": None}
    names = [manifest["version"] for manifest in usable]
    after = request.asked("after") or _served(collection, names)
    before = request.asked("before") or _earlier(collection, after, names)
    pair = _pair(collection, before, after, request.asked("colour"), request.principal.tenant)
    return {**shown, "before": before, "after": after, **pair}


def _served(collection: Collection, names: list[str]) -> str:
    """Return the served version if it is usable and not the first usable version, else the newest usable version."""
    current = collection.current()
    return current if current in names[1:] else names[-1]


def _earlier(collection: Collection, version: str, names: list[str]) -> str:
    """Return the version to compare ``version`` with: its parent, or else the preceding usable version."""
    parent = collection.manifest(version)["parent"]
    if parent in names:
        return str(parent)
    return max((name for name in names if name < version), default=names[0])


def _pair(collection: Collection, before: str, after: str, colour: str | None, tenant: str) -> dict[str, Any]:
    readers = collection.open(before), collection.open(after)
    if readers[0].dim != readers[1].dim:
        dims = f"{before} has {readers[0].dim} coordinates and {after} {readers[1].dim}"
        raise invalid(FieldProblem("before", dims, "compare versions of the same dimension"))
    key = tenant, collection.name, colour, *((reader.version, reader.manifest.identity) for reader in readers)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    columns = collection.item_columns(after)
    compared = {"drift": drift(*readers, columns), "maps": maps(collection, *readers, columns, colour)}
    with _lock:
        _kept[key] = compared
        while len(_kept) > NUM_KEPT:
            _kept.popitem(last=False)
    return compared


def drift(before: VersionReader, after: VersionReader, columns: ItemColumns | None = None) -> dict[str, Any] | None:
    """Measure the movement of the items that both versions have vectors for; None if there are no such items.

    Returns:
        ``num_items`` compared; ``mean``, ``low`` (10th percentile) and ``least`` cosine of an item's two vectors;
        ``svg``, a histogram of cosines; ``moved``, the ids that moved most, each with its words (``columns``) and
        cosine; the numbers of ids that ``came`` and ``went``.
    """
    pair = shared_directions(before, after, DRIFT_ITEMS)
    if not pair.ids:
        return None
    cosines: Array = np.einsum("nd,nd->n", pair.before, pair.after)
    lowest = float(np.floor(cosines.min() * 20) / 20)
    counts, edges = np.histogram(cosines, bins=NUM_BINS, range=(min(lowest, 0.95), 1.0 + 1e-9))
    order = np.argsort(cosines, kind="stable")[:NUM_MOVED]
    moved = [pair.ids[row] for row in order]
    title = f"{len(pair.ids)} items by cosine between {before.version} and {after.version}"
    return {
        "num_items": len(pair.ids),
        "mean": float(cosines.mean()),
        "low": float(np.quantile(cosines, 0.1)),
        "least": float(cosines.min()),
        "svg": histogram(counts.tolist(), edges.tolist(), title, "cosine to itself"),
        "moved": list(zip(moved, words_of(columns, moved), cosines[order].tolist(), strict=True)),
        "came": len(after) - pair.num_shared,
        "went": len(before) - pair.num_shared,
    }


class SharedItems(NamedTuple):
    """Unit vectors [n, d] of the same n items in two versions, and their ids.

    ``num_shared``: ids in both versions; ``num_found``: those of them that have a vector in both.
    """

    ids: list[Any]
    before: Array
    after: Array
    num_shared: int
    num_found: int


def shared_directions(before: VersionReader, after: VersionReader, limit: int) -> SharedItems:
    """Return unit vectors of at most ``limit`` items with vectors in both versions, spread evenly over their ids."""
    old, new = shared_rows(before.keys, after.keys)
    num_shared = len(old)
    in_both = (before.statuses[old] == FOUND) & (after.statuses[new] == FOUND)
    old, new, num_found = old[in_both], new[in_both], int(in_both.sum())
    chosen = np.unique(np.linspace(0, len(old) - 1, min(len(old), limit)).astype(np.int64)) if len(old) else old
    old, new = old[chosen], new[chosen]
    directions = [unit_rows(as_float32(reader.vectors[rows]))[0] for reader, rows in ((before, old), (after, new))]
    return SharedItems(as_list(before.keys[old]), directions[0], directions[1], num_shared, num_found)


def maps(
    collection: Collection,
    before: VersionReader,
    after: VersionReader,
    columns: ItemColumns | None = None,
    colour: str | None = None,
) -> dict[str, Any] | None:
    """Return the maps with and without alignment; None if fewer than three items can be compared.

    ``columns``: columns of the items. ``colour``: the column whose values colour them; None: one colour for all.

    Returns:
        ``aligned`` and ``unaligned``, each with ``svg`` and ``cosine``, the mean cosine of an item to itself;
        ``unaligned`` is None if the version was not rotated or its rotation is unknown; ``note`` then says which.
        ``share`` of the differences that the axes show, of ``dim``; ``num_items`` drawn of ``num_found``;
        ``offered`` columns, the ``colour`` in use, and its ``legend``: (value, number of items).
    """
    pair = shared_directions(before, after, MAP_ITEMS)
    if len(pair.ids) < 3:
        return None
    middle = pair.before.mean(axis=0)
    _, lengths, directions_of_most = np.linalg.svd(pair.before - middle, full_matrices=False)
    axes = directions_of_most[:2]
    unturned, note = _unturned(collection, after, pair.after)
    flat = [
        (directions - middle) @ axes.T for directions in (pair.before, pair.after, unturned) if directions is not None
    ]
    clouds = [[(float(point[0]), float(point[-1])) for point in points] for points in flat]
    half = half_width(*clouds)
    words = words_of(columns, pair.ids)
    names = [f"{identifier} {text}".rstrip() for identifier, text in zip(pair.ids, words, strict=True)]
    offered = categories(columns, pair.ids)
    legend, colours = coloured(offered[colour]) if colour in offered else ([], None)

    def drawn(cloud: int, directions: Array, how: str) -> dict[str, Any]:
        cosine = float(np.einsum("nd,nd->n", pair.before, directions).mean())
        title = f"{len(names)} items in {before.version} and {after.version}, {how}: mean cosine {cosine:.3f}"
        return {"svg": movement_map(clouds[0], clouds[cloud], names, half, title, colours), "cosine": cosine}

    return {
        "num_items": len(names),
        "num_found": pair.num_found,
        "dim": after.dim,
        "share": float((lengths[:2] ** 2).sum() / max((lengths**2).sum(), 1e-30)),
        "offered": list(offered),
        "colour": colour if colour in offered else None,
        "legend": legend,
        "aligned": drawn(1, pair.after, "aligned"),
        "unaligned": None if unturned is None else drawn(2, unturned, "not aligned"),
        "note": note,
    }


def _unturned(collection: Collection, after: VersionReader, directions: Array) -> tuple[Array | None, str]:
    """Return the unit vectors in the coordinates of the run that made them, and an empty text.

    If the version was not rotated or its rotation is unknown, return None and a sentence that says so.
    """
    try:
        rotation = collection.rotation(after.version)
    except StoreError:
        note = f"The rotation of {after.version} is not stored, so its vectors before the rotation cannot be shown."
        return None, note
    if np.abs(rotation - np.eye(len(rotation))).max() < SAME_ROTATION:
        return None, f"{after.version} was not rotated: the coordinates of its run are served."
    turned: Array = directions @ rotation.T
    return turned, ""
