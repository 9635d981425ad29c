"""The users of a version: their file, and the items of highest score for them.

``users.arrow`` is an Arrow IPC file of one record batch, sorted by id. Its columns are ``key`` (as in ``items.arrow``),
``offset`` (float32), ``seen`` (lists of int32: rows of the same version's ``items.arrow``) and, last, ``vector``
(fixed-size list of float32). embeddings.vectors.user_vectors has the formula of a score.

``scored.arrow`` has one column, ``vector``, a row for each row of ``items.arrow``. A version whose items are averaged
with earlier ones has it, with the vectors before the average. Without it the served vectors are scored.

All files are named by one manifest, so users are never scored against the items of another version.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from embeddings.store.arrow_stream import write_streamed
from embeddings.store.files import FileEntry
from embeddings.store.version import VersionReader, key_column, keys_of_column, matrix_of, read_arrow
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import MISSING, Array, as_list, chunks, find_rows, keys_of
from embeddings.vectors.top_k import BestSoFar
from embeddings.vectors.user_vectors import SeenLists, UserVectors, take_lists

_PIECE_ITEMS = 1 << 15
_SCORES_AT_ONCE = 1 << 22
"""Number of scores in memory at once: 16 MiB."""


def write_users(
    directory: Path, users: UserVectors, item_keys: Array, dtype: Any = np.float32, suffix: str = ""
) -> list[FileEntry]:
    """Write the files of ``users`` into ``directory``, synced to the disk, and return their manifest entries.

    Seen items that the version does not have are left out.

    Args:
        directory: the directory of the version.
        users: the users.
        item_keys: keys of the version's items, in the order of their rows.
        dtype: type of the item vectors in the version.
        suffix: the end of the files' names, before ``.arrow``.

    Raises:
        ValueError: a vector that is not finite.
    """
    rows = find_rows(item_keys, users.seen.items)[users.seen.positions] if len(users.seen.items) else users.seen.items
    staying = rows >= 0
    starts = np.append(0, np.cumsum(staying))[users.seen.starts]
    seen = pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(rows[staying].astype(np.int32)))
    columns = {"key": key_column(users.keys), "offset": pa.array(users.offsets), "seen": seen}
    files = [write_streamed(directory / f"users{suffix}.arrow", columns, "vector", users.vectors)]
    if users.scored is not None:
        files.append(write_streamed(directory / f"scored{suffix}.arrow", {}, "vector", users.scored, dtype))
    return files


def users_entry(users: UserVectors, feature: str) -> dict[str, Any]:
    """Return the manifest's entry ``users``."""
    return {
        "feature": feature,
        "rows": len(users),
        "id_type": "int64" if users.keys.dtype.kind == "i" else "string",
        "unit_items": users.unit_items,
    }


def read_users(path: Path, scored: Path | None, entry: Mapping[str, Any], item_keys: Array) -> UserVectors:
    """Return the users in files that :func:`write_users` wrote, memory-mapped.

    ``entry``: the manifest's entry ``users``. ``item_keys``: as the files were written with.
    """
    batch = read_arrow(path)
    seen = batch.column("seen")
    lists = SeenLists(item_keys, seen.values.to_numpy(), seen.offsets.to_numpy())
    return UserVectors(
        keys_of_column(batch.column("key")), matrix_of(batch.column("vector")), lists,
        batch.column("offset").to_numpy(), bool(entry["unit_items"]),
        None if scored is None else matrix_of(read_arrow(scored).column("vector")),
    )  # fmt: skip


class Recommended(NamedTuple):
    """Items of highest score for each user, best first.

    ``found``: bool [n], False for a user whom the version does not have. ``items``, ``scores``: n lists each.
    """

    version: str
    found: Array
    items: list[list[Any]]
    scores: list[list[float]]


class Recommender:
    """The items and users of one version; thread-safe."""

    def __init__(self, reader: VersionReader, users: Path, scored: Path | None):
        entry = reader.manifest.users
        assert entry is not None
        self.reader, self.version = reader, reader.version
        self.users = read_users(users, scored, entry, reader.keys)

    def top(self, users: Any, k: int, *, exclude: Any = (), exclude_seen: bool = False) -> Recommended:
        """Return the ``k`` items of highest score for each of ``users``; there are fewer if no others are left.

        All items with a vector are candidates, carried ones too. The search is exact.

        Args:
            users: ids of users.
            k: largest number of items for each.
            exclude: ids of items that nobody gets.
            exclude_seen: True to leave out the items that the user had in training.

        Raises:
            ItemIdError: ids of another type than the version's.
            ValueError: ``k`` below 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        rows = find_rows(self.users.keys, keys_of(users, query=True))
        left_out = find_rows(self.reader.keys, keys_of(exclude, query=True)) if len(exclude) else np.empty(0, np.int64)
        left_out = left_out[left_out >= 0]
        known = np.flatnonzero(rows >= 0)
        items: list[list[Any]] = [[] for _ in rows]
        scores: list[list[float]] = [[] for _ in rows]
        at_once = max(1, _SCORES_AT_ONCE // max(1, min(_PIECE_ITEMS, len(self.reader))))
        for part in chunks(len(known), at_once):
            best = self._best(rows[known[part]], k, left_out, exclude_seen)
            is_answer = np.isfinite(best.scores)
            ids = as_list(self.reader.keys[best.columns[is_answer]])
            ends = np.cumsum(is_answer.sum(axis=1))
            for place, end, start in zip(known[part], ends, np.append(0, ends), strict=False):
                items[place] = ids[start:end]
            for place, values, answers in zip(known[part], best.scores, is_answer, strict=True):
                scores[place] = values[answers].tolist()
        return Recommended(self.version, rows >= 0, items, scores)

    def _best(self, rows: Array, k: int, left_out: Array, exclude_seen: bool) -> BestSoFar:
        queries, offsets = np.asarray(self.users.vectors[rows]), self.users.offsets[rows]
        seen, starts = take_lists(self.users.seen.positions, self.users.seen.starts, rows)
        owners = np.repeat(np.arange(len(rows)), np.diff(starts))
        vectors = self.reader.vectors if self.users.scored is None else np.asarray(self.users.scored)
        best = BestSoFar(len(rows), k)
        for part in chunks(len(self.reader), _PIECE_ITEMS):
            scores = queries @ as_float32(vectors[part]).T
            if self._scales is not None:
                scores *= self._scales[part]
            if self._biases is not None:
                scores += self._biases[part]
            scores += offsets[:, None]
            for rows_out in (self._no_vector, left_out):
                scores[:, rows_out[_inside(rows_out, part)] - part.start] = -np.inf
            if exclude_seen:
                inside = _inside(seen, part)
                scores[owners[inside], seen[inside] - part.start] = -np.inf
            best.add(part.start, scores)
        return best

    @functools.cached_property
    def _scales(self) -> Array | None:
        return None if self.users.unit_items else np.asarray(self.reader.norms)

    @functools.cached_property
    def _biases(self) -> Array | None:
        return self.reader.items().biases

    @functools.cached_property
    def _no_vector(self) -> Array:
        return np.flatnonzero(self.reader.statuses == MISSING)


def _inside(rows: Array, part: slice) -> Array:
    """Flag the rows that lie in ``part``."""
    return (rows >= part.start) & (rows < part.stop)
