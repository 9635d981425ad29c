"""The users of a version: their file, and the items of highest score for them.

``users.arrow`` is an Arrow IPC file of one record batch, sorted by id. Its columns are ``key`` (as in ``items.arrow``),
``offset`` (float32), ``seen`` (lists of int32: rows of the same version's ``items.arrow``) and, last, ``vector``
(fixed-size list of float32). embeddings.vectors.user_vectors has the formula of a score.

``scored.arrow`` has one column, ``vector``, a row for each row of ``items.arrow``. A version whose items are averaged
with earlier vectors has this file, with the vectors before the average. Without it the served vectors are scored.

``columns.arrow`` has columns of the item table, a row for each row of ``items.arrow``, if there is a table with ids.
``tower.onnx`` answers queries by features or by a history (embeddings.vectors.query_tower), if the model can.

All files are named by one manifest, so users are never scored against the items of another version.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from embeddings.store.arrow_stream import write_streamed
from embeddings.store.files import FileEntry, HashingFile
from embeddings.store.item_scores import ItemScores, ScoreIndex
from embeddings.store.queries import Queries, QueryError, QuerySession, is_id
from embeddings.store.version import VersionReader, key_column, keys_of_column, matrix_of, read_arrow, write_arrow
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import Array, as_list, chunks, find_rows, keys_of
from embeddings.vectors.top_k import BestSoFar, top_k
from embeddings.vectors.user_vectors import SeenLists, UserVectors, take_lists

_PIECE_ITEMS = 1 << 15
_PIECE_SCORES = 1 << 17
"""Least number of scores in a piece: half a MiB for one user, which stays in a cache, is faster than more pieces."""
_SCORES_AT_ONCE = 1 << 22
"""Number of scores in memory at once: 16 MiB."""
_MOST_CANDIDATES = 4_096
"""Most items that an index chooses for a user; more cost as much as comparing all."""
_USERS_CHECKED = 200
"""Number of users by whose best items an index is judged."""


def write_users(
    directory: Path, users: UserVectors, item_keys: Array, dtype: Any = np.float32, suffix: str = ""
) -> list[FileEntry]:
    """Write the files of ``users`` into ``directory``, synced to the disk, and return their manifest entries.

    Seen items that the version does not have are left out. ``item_keys`` are the keys of the version's items, in the
    order of their rows, ``dtype`` is the type of its item vectors. The files' names end with ``suffix`` and ``.arrow``.

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
    if users.columns is not None:
        batch = pa.record_batch(dict(users.columns.aligned(item_keys).columns))
        files.append(write_arrow(directory / f"columns{suffix}.arrow", batch))
    if users.tower is not None:
        with contextlib.closing(HashingFile(directory / f"tower{suffix}.onnx")) as file:
            file.write(users.tower.data)
        files.append(file.entry())
    return files


def users_entry(users: UserVectors, feature: str) -> dict[str, Any]:
    """Return the manifest's entry ``users``."""
    return {
        "feature": feature,
        "rows": len(users),
        "id_type": "int64" if users.keys.dtype.kind == "i" else "string",
        "unit_items": users.unit_items,
        **({} if users.tower is None else {"tower": users.tower.described()}),
        **({} if users.columns is None else {"columns": users.columns.described()}),
    }


def read_users(
    path: Path, scored: Path | None, columns: Path | None, entry: Mapping[str, Any], item_keys: Array
) -> UserVectors:
    """Return the users in files that :func:`write_users` wrote, memory-mapped, without the query tower.

    ``entry``: the manifest's entry ``users``. ``item_keys``: as the files were written with.
    """
    batch = read_arrow(path)
    seen = batch.column("seen")
    lists = SeenLists(item_keys, seen.values.to_numpy(), seen.offsets.to_numpy())
    return UserVectors(
        keys_of_column(batch.column("key")), matrix_of(batch.column("vector")), lists,
        batch.column("offset").to_numpy(), bool(entry["unit_items"]),
        None if scored is None else matrix_of(read_arrow(scored).column("vector")),
        columns=None if columns is None else read_columns(columns, item_keys),
    )  # fmt: skip


def read_columns(path: Path, item_keys: Array) -> ItemColumns:
    """Return the columns in a file that :func:`write_users` wrote with these keys, memory-mapped."""
    batch = read_arrow(path)
    return ItemColumns(item_keys, dict(zip(batch.schema.names, batch.columns, strict=True)))


class Recommended(NamedTuple):
    """Items of highest score for each user, best first.

    ``found``: bool [n], False for a user whom the version does not have. ``items``, ``scores``: n lists each.
    ``exact``: False if an index chose the items whose scores were compared.
    """

    version: str
    found: Array
    items: list[list[Any]]
    scores: list[list[float]]
    exact: bool = True


class _Asked(NamedTuple):
    """Known users to recommend items to.

    Attributes:
        found: mask of the known users among all that were requested.
        part: function from a slice of the known users to (vectors [b, d], offsets [b]).
        seen: rows of the items that they had; ``starts``: bounds of each user's rows in it, [known users + 1].
    """

    found: Array
    part: Callable[[slice], tuple[Array, Array]]
    seen: Array
    starts: Array


class _Pairs(NamedTuple):
    """Users and items that they do not get: a user's number among the queries, and a row."""

    users: Array
    items: Array


class Recommender:
    """The items and users of one version, and the bytes of its query tower, memory-mapped; thread-safe."""

    def __init__(
        self,
        reader: VersionReader,
        users: Path,
        scored: Path | None,
        columns: Path | None = None,
        tower: Path | None = None,
    ):
        entry = reader.manifest.users
        assert entry is not None
        self.reader, self.version = reader, reader.version
        self.users = read_users(users, scored, columns, entry, reader.keys)
        own = self.users.scored
        self.items = ItemScores(reader, None if own is None else np.asarray(own), self.users.unit_items)
        self.tower = None if tower is None else pa.memory_map(str(tower)).read_buffer()
        self._entry, self._loading = entry, threading.Lock()
        self._session: QuerySession | None = None

    def build_index(self, path: Path, *, threads: int = 1) -> float:
        """Write an index of the version's items, judged by some of its users (see ItemScores.build_index)."""
        sample = np.unique(np.linspace(0, len(self.users) - 1, min(len(self.users), _USERS_CHECKED)).astype(np.int64))
        return self.items.build_index(path, np.asarray(self.users.vectors[sample]), threads=threads)

    def top(
        self,
        users: Any = None,
        k: int = 10,
        *,
        features: Sequence[Mapping[str, Any]] | None = None,
        histories: Sequence[Sequence[Any]] | None = None,
        exclude: Any = (),
        exclude_seen: bool = False,
        filter: Mapping[str, Sequence[Any]] | None = None,
        index: ScoreIndex | None = None,
    ) -> Recommended:
        """Return the ``k`` items of highest score for each of ``users``; there are fewer if no others are left.

        All items with a vector are candidates, carried items too. Features and histories are read by the version's
        query tower (embeddings.store.queries).

        Args:
            users: ids of users; or, in their place, ``features`` or ``histories``.
            k: largest number of items for each.
            features: for each user a mapping from features to an id or a list of ids.
            histories: for each user the items that it had, oldest first.
            exclude: ids of items that no user gets.
            exclude_seen: True to leave out the items that the user had in training, or the items of the history.
            filter: values of columns of the item table; items have one of the values in each of the columns.
            index: an index of this version's items, which chooses the items to compare. Without it, with a filter, or
                where more than ``_MOST_CANDIDATES`` items would have to be compared, all items are.

        Raises:
            ItemIdError: ids of another type than the version's.
            NoTower: the version has no query tower for such queries.
            RuntimeMissing: onnxruntime is not installed.
            QueryError: the query tower cannot read the features or histories, or a filter's column does not exist.
            ValueError: ``k`` below 1, or not one of users, features and histories.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        if sum(one is not None for one in (users, features, histories)) != 1:
            raise ValueError("give one of users, features and histories")
        if features is not None and exclude_seen:
            why = "features do not say what a user had"
            raise QueryError("exclude_seen", why, "leave it out, or list items in exclude")
        if histories is not None:
            asked = self._of_histories(histories)
        else:
            asked = self._of_users(users) if features is None else _answered(self._queries().of_features(features))
        left_out = find_rows(self.reader.keys, keys_of(exclude, query=True)) if len(exclude) else np.empty(0, np.int64)
        left_out = left_out[left_out >= 0]
        refused = None if not filter else ~self._matching(filter)
        known = np.flatnonzero(asked.found)
        items: list[list[Any]] = [[] for _ in asked.found]
        scores: list[list[float]] = [[] for _ in asked.found]
        at_once = max(1, _SCORES_AT_ONCE // max(1, min(_PIECE_ITEMS, len(self.items))))
        exact = True
        for part in chunks(len(known), at_once):
            queries, offsets = asked.part(part)
            starts = asked.starts[part.start : part.stop + 1]
            owners = np.repeat(np.arange(len(queries)), np.diff(starts))
            seen = asked.seen[starts[0] : starts[-1]]
            # An item of a history that the version does not have is row -1.
            left = (seen >= 0) & exclude_seen
            pairs = _Pairs(owners[left], seen[left])
            num_candidates = 2 * k + 16 + len(left_out) + np.bincount(pairs.users).max(initial=0)
            if index is None or index.exact or refused is not None or num_candidates > _MOST_CANDIDATES:
                columns, best = self._best_of_all(queries, k, left_out, pairs, refused)
            else:
                exact = False
                columns, best = self._best_of(index.candidates(queries, num_candidates), queries, k, left_out, pairs)
            is_answer = np.isfinite(best)
            ids = as_list(self.reader.keys[columns[is_answer]])
            ends = np.cumsum(is_answer.sum(axis=1))
            for place, end, start in zip(known[part], ends, np.append(0, ends), strict=False):
                items[place] = ids[start:end]
            for place, values, answers in zip(known[part], best + offsets[:, None], is_answer, strict=True):
                scores[place] = values[answers].tolist()
        return Recommended(self.version, asked.found, items, scores, exact)

    def _of_users(self, users: Any) -> _Asked:
        rows = find_rows(self.users.keys, keys_of(users, query=True))
        known = rows[rows >= 0]
        seen, starts = take_lists(self.users.seen.positions, self.users.seen.starts, known)

        def part(piece: slice) -> tuple[Array, Array]:
            return np.asarray(self.users.vectors[known[piece]]), self.users.offsets[known[piece]]

        return _Asked(rows >= 0, part, seen, starts)

    def _of_histories(self, histories: Sequence[Sequence[Any]]) -> _Asked:
        answers = self._queries().of_histories(histories)
        had = [one for one, known in zip(histories, answers.known, strict=True) if known]
        rows = find_rows(self.reader.keys, keys_of([item for one in had for item in one], query=True))
        starts = np.append(0, np.cumsum(np.array([len(one) for one in had], dtype=np.int64)))
        return _answered(answers)._replace(seen=rows, starts=starts)

    def _queries(self) -> QuerySession:
        with self._loading:
            if self._session is None:
                self._session = QuerySession(self.version, self._entry, self.tower)
        return self._session

    def _matching(self, filter: Mapping[str, Sequence[Any]]) -> Array:
        entries = self._entry.get("columns", {})
        found = np.ones(len(self.reader), dtype=np.bool_)
        for name, wanted in filter.items():
            if self.users.columns is None or name not in entries:
                what = (
                    f"it has {', '.join(entries)}" if entries else "columns come from ids of the dataset's item table"
                )
                raise QueryError(f"filter.{name}", f"version {self.version} has no such column", what)
            kind = entries[name]["ids"]
            for value in wanted:
                if not is_id(value, kind):
                    raise QueryError(f"filter.{name}", f"{value!r} is no {kind}", f"values of '{name}' are {kind}")
            found &= self.users.columns.matching(name, list(wanted))
        return found

    def _best_of_all(
        self, queries: Array, k: int, left_out: Array, seen: _Pairs, refused: Array | None
    ) -> tuple[Array, Array]:
        """Return rows [n, at most k] and their scores, without offsets; -inf for a row that is no answer."""
        best = BestSoFar(len(queries), k)
        for piece in chunks(len(self.items), max(_PIECE_ITEMS, _PIECE_SCORES // max(1, len(queries)))):
            scores = self.items.of_piece(queries, piece)
            scores[:, left_out[_inside(left_out, piece)] - piece.start] = -np.inf
            if refused is not None:
                scores[:, refused[piece]] = -np.inf
            inside = _inside(seen.items, piece)
            scores[seen.users[inside], seen.items[inside] - piece.start] = -np.inf
            best.add(piece.start, scores)
        return best.columns, best.scores

    def _best_of(self, candidates: Array, queries: Array, k: int, left_out: Array, seen: _Pairs) -> tuple[Array, Array]:
        """Return rows and scores like :meth:`_best_of_all`, of ``candidates`` [n, m] alone."""
        scores = np.concatenate(
            [self.items.of_rows(query[None], rows[None]) for query, rows in zip(queries, candidates, strict=True)]
        )
        scores[np.isin(candidates, left_out)] = -np.inf
        owners = np.arange(len(queries))[:, None] * len(self.items)
        scores[np.isin(candidates + owners, seen.items + seen.users * len(self.items))] = -np.inf
        best = top_k(scores, k)
        return np.take_along_axis(candidates, best, 1), np.take_along_axis(scores, best, 1)


def _answered(answers: Queries) -> _Asked:
    """Return the known queries among the answers of a tower, who have seen no items."""
    known = np.flatnonzero(answers.known)

    def part(piece: slice) -> tuple[Array, Array]:
        return answers.vectors[known[piece]], answers.offsets[known[piece]]

    return _Asked(answers.known, part, np.empty(0, np.int64), np.zeros(len(known) + 1, np.int64))


def _inside(rows: Array, part: slice) -> Array:
    return (rows >= part.start) & (rows < part.stop)
