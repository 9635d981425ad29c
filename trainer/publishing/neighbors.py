"""Neighbours of items in the last published version, which hard negatives are drawn from (``model.hard_negatives``).

They are found once, by the driver, and lie with the run's prepared data: a run that goes on from a checkpoint has the
same ones, whatever has become of the version.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from embeddings.durable_files import appearing
from embeddings.store import StoreError, StoreUnavailable, open_store
from embeddings.store.nearest_neighbors import EXACT_ROWS, NeighborSearch, build_index
from embeddings.store.version import VersionReader
from embeddings.vectors.item_vectors import FOUND, MISSING, keys_of
from trainer.data.batches.hard_negatives import NEIGHBORS_FILE
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData
    from trainer.runs.directory import Run
    from trainer.spec.models.hard_negatives import HardNegatives


def version_of(run: Run) -> VersionReader:
    """Return the version that was current when the job was submitted, else the one that ``init_from`` names.

    Raises:
        ValueError: there is none.
        StoreUnavailable: the store's server cannot be reached.
    """
    publish, init_from = run.job.publish, run.job.init_from
    assert publish is not None
    named = [(publish.collection, run.parent_version)] if run.parent_version is not None else []
    if init_from is not None and init_from.collection is not None:
        named.append((init_from.collection, init_from.version or "current"))
    if not named:
        raise ValueError(
            f"model.hard_negatives: collection '{publish.collection}' has no version yet to take neighbours from: "
            "train a first job without them, or name a collection in init_from"
        )
    collection, version = named[0]
    try:
        return open_store(run.store_url).collection(collection).open(version)
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise ValueError(
            f"model.hard_negatives: neighbours cannot be taken from '{collection}': {error}; or leave them out"
        ) from error


def write_neighbors(run: Run, data: PreparedData, settings: HardNegatives) -> str:
    """Write NEIGHBORS_FILE beside the run's data, unless it is there; return what to report.

    Neighbours are among the items that have training rows in these data: an item that is never a positive would only
    be pushed away.

    Raises:
        ValueError: no version, or none of these items is in it.
    """
    path = data.directory / NEIGHBORS_FILE
    if path.exists():
        return "hard negatives from the same neighbours as before"
    version = version_of(run)
    table = next(key.table for key in data.keys if key.name == "item")
    status, vectors = version.lookup(keys_of(data.vocabulary(table)))
    counts = data.example_counts("item")
    there = np.flatnonzero((status != MISSING) & (counts[NUM_SPECIAL_ROWS:] > 0))
    if len(there) < 2:
        raise ValueError(
            f"model.hard_negatives: {len(there)} of the job's items are in version {version.version}: "
            "leave them out until a version has the items"
        )
    with tempfile.TemporaryDirectory(prefix="evenkeel-neighbors-") as folder:
        found = nearest(np.asarray(vectors[there]), settings.nearest, settings.skip, Path(folder))
    neighbors = np.full((len(counts), settings.nearest), -1, dtype=np.int32)
    rows = (there + NUM_SPECIAL_ROWS).astype(np.int32)
    neighbors[rows] = np.where(found >= 0, rows[found], -1)
    with appearing(path, durable=False, fence=run.fence) as file, Path(file).open("wb") as stream:
        np.save(stream, neighbors)
    return f"hard negatives from neighbours of {len(there)} items in version {version.version}"


def nearest(vectors: npt.NDArray[np.float32], count: int, skip: int, scratch: Path) -> npt.NDArray[np.int32]:
    """Return the places of each vector's nearest others by cosine, int32 [n, count], best first, then -1.

    The first ``skip`` of each are left out. Beyond EXACT_ROWS vectors an index is built in ``scratch`` and asked.
    """
    statuses = np.full(len(vectors), FOUND, dtype=np.uint8)
    index = None
    if len(vectors) > EXACT_ROWS:
        index = scratch / "index"
        build_index(vectors, statuses, index)
    search = NeighborSearch(vectors, statuses, index)
    found = np.full((len(vectors), count), -1, dtype=np.int32)
    for number in np.flatnonzero(vectors.any(axis=1)):
        near = search.search(vectors[number], skip + count, leave_out=int(number))[0][skip:]
        found[number, : len(near)] = near
    return found
