"""Scores of a version's items for users: of all items, or of those that an index finds.

A score (embeddings.vectors.user_vectors) is the product of an item's row [s_i z_i, b_i] and a query [q_u, 1], plus the
user's offset. An index of nearest directions finds the largest products once all rows have one length: an extra column,
0 in the query, makes each row as long as the longest (Bachrach et al., Speeding Up the Xbox Recommender System Using a
Euclidean Transformation for Inner-Product Spaces, RecSys 2014).
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embeddings.durable_files import write_file
from embeddings.store.nearest_neighbors import BLOCK_ROWS, make_index, open_index, save_index
from embeddings.store.version import VersionReader
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import MISSING, Array, chunks
from embeddings.vectors.top_k import BestSoFar

EXACT_ITEMS = 2_000_000
"""Largest number of items for which no index is kept, because exact search takes about ten milliseconds a user."""
EXPANSIONS = (512, 1_024, 2_048)
"""Numbers of rows that a search of an index keeps in view; the first that finds enough is taken."""
LEAST_SHARE = 0.99
"""Least share of users' best items that an index has to find."""
NUM_CHECKED = 20
"""Number of a user's best items on which an index is judged."""
_QUERIES_AT_ONCE = 16
"""Number of queries that a search answers before it lets another search begin."""


class ItemScores:
    """The items of a version, to be scored.

    ``scored`` are vectors [items, d] that scores need instead of the served vectors. With ``unit_items`` norms do not
    count.
    """

    def __init__(self, reader: VersionReader, scored: Array | None, unit_items: bool):
        self._reader, self._unit_items = reader, unit_items
        self._vectors = reader.vectors if scored is None else scored

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def index_dim(self) -> int:
        """Number of coordinates of a row in an index."""
        return int(self._vectors.shape[1]) + 2

    @property
    def num_scored(self) -> int:
        """Number of items with a vector."""
        return len(self) - len(self._no_vector)

    def of_piece(self, queries: Array, piece: slice) -> Array:
        """Return scores [n, rows of the piece] for ``queries`` [n, d], without offsets; -inf without a vector."""
        scores = self._scores_of(queries @ as_float32(self._vectors[piece]).T, piece)
        no_vector = self._no_vector
        scores[:, no_vector[(no_vector >= piece.start) & (no_vector < piece.stop)] - piece.start] = -np.inf
        return scores

    def of_rows(self, queries: Array, rows: Array) -> Array:
        """Return scores [n, m] of ``rows`` [n, m], which have vectors, for ``queries`` [n, d], without offsets."""
        return self._scores_of(np.einsum("nd,nmd->nm", queries, as_float32(self._vectors[rows])), rows)

    def _scores_of(self, products: Array, rows: Array | slice) -> Array:
        if self._scales is not None:
            products *= self._scales[rows]
        if self._biases is not None:
            products += self._biases[rows]
        return products

    def build_index(self, path: Path, queries: Array, *, threads: int = 1) -> float:
        """Build an index for :class:`ScoreIndex`.

        ``path`` tells, as JSON, the share of the queries' best NUM_CHECKED items that the index finds, and how far it
        has to look for them: ``expansion``, one of EXPANSIONS. The index is beside it, with suffix ``.usearch``. If the
        share is below LEAST_SHARE by each of them, ``expansion`` is null, no index is kept, and search stays exact.

        The index is judged by ``queries``, vectors of users [n, d]. Return the share.
        """
        squares = [np.einsum("nd,nd->n", rows, rows) for _, rows in self._rows()]
        longest = max((float(part.max()) for part in squares if len(part)), default=0.0)

        def of_one_length() -> Iterator[tuple[Array, Array]]:
            for (numbers, rows), square in zip(self._rows(), squares, strict=True):
                fill = np.sqrt(np.maximum(longest - square, 0.0))
                yield numbers, np.column_stack([rows, fill]) / np.float32(np.sqrt(longest) or 1.0)

        index = make_index(self.index_dim, of_one_length(), threads)
        least = self._least_best(queries)
        for expansion in EXPANSIONS:
            index.expansion_search = expansion
            share = self._share(index, queries, least)
            if share >= LEAST_SHARE:
                save_index(index, path.with_suffix(".usearch"))
                break
        document = {"share": round(share, 4), "expansion": expansion if share >= LEAST_SHARE else None}
        write_file(path, json.dumps(document).encode(), durable=False)
        return share

    def _least_best(self, queries: Array) -> Array:
        """Return a score [n, 1] that no more than NUM_CHECKED items exceed, but for ties up to rounding."""
        best = BestSoFar(len(queries), NUM_CHECKED)
        for piece in chunks(len(self), BLOCK_ROWS):
            best.add(piece.start, self.of_piece(queries, piece))
        return best.scores[:, -1:] - 1e-5 * np.abs(best.scores).max(axis=1, keepdims=True, initial=0.0)

    def _share(self, index: Any, queries: Array, least: Array) -> float:
        """Return the share of the best items that ``index`` finds; of items with equal scores any is as good."""
        if not len(queries) or not self.num_scored:
            return 1.0
        found = self.of_rows(queries, _candidates(index, queries, 2 * NUM_CHECKED + 16))
        expected = min(NUM_CHECKED, self.num_scored)
        return float(np.minimum((found >= least).sum(axis=1), expected).mean() / expected)

    def _rows(self) -> Iterator[tuple[Array, Array]]:
        """Yield the numbers [n] of items with a vector and their rows [s_i z_i, b_i], in blocks."""
        usable = np.ones(len(self), dtype=np.bool_)
        usable[self._no_vector] = False
        for part in chunks(len(self), BLOCK_ROWS):
            numbers = part.start + np.flatnonzero(usable[part])
            rows = as_float32(self._vectors[numbers])
            if self._scales is not None:
                rows = rows * self._scales[numbers, None]
            biases = np.zeros(len(numbers), np.float32) if self._biases is None else self._biases[numbers]
            yield numbers, np.column_stack([rows, biases])

    @functools.cached_property
    def _scales(self) -> Array | None:
        return None if self._unit_items else np.asarray(self._reader.norms)

    @functools.cached_property
    def _biases(self) -> Array | None:
        return self._reader.items().biases

    @functools.cached_property
    def _no_vector(self) -> Array:
        return np.flatnonzero(self._reader.statuses == MISSING)


class ScoreIndex:
    """Finds items of high score; thread-safe.

    ``path`` is a file of :meth:`ItemScores.build_index`; without it search is exact. ``is_built`` is True if there is a
    file, which may say that search stays exact.

    Raises:
        ValueError: the file, or the index beside it, is damaged or of other items.
    """

    def __init__(self, items: ItemScores, path: Path | None = None):
        self._index, self._lock, self.is_built = None, threading.Lock(), path is not None
        if path is None:
            return
        try:
            expansion = json.loads(path.read_bytes())["expansion"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} tells of no index: {error}") from error
        if expansion is not None:
            self._index = open_index(path.with_suffix(".usearch"), items.index_dim, items.num_scored)
            self._index.expansion_search = expansion

    @property
    def exact(self) -> bool:
        return self._index is None

    def candidates(self, queries: Array, count: int) -> Array:
        """Return rows [n, at most count] of items that probably score highest for ``queries`` [n, d], ascending."""
        found = []
        for part in chunks(len(queries), _QUERIES_AT_ONCE):
            with self._lock:
                found.append(_candidates(self._index, queries[part], count))
        return np.concatenate(found)


def _candidates(index: Any, queries: Array, count: int) -> Array:
    lengths = np.sqrt(np.einsum("nd,nd->n", queries, queries) + 1.0)
    padded = np.column_stack([queries, np.ones(len(queries)), np.zeros(len(queries))]) / lengths[:, None]
    found = index.search(padded.astype(np.float32), min(count, len(index)), threads=1)
    return np.sort(np.asarray(found.keys).astype(np.int64).reshape(len(queries), -1), axis=1)
