"""Vectors of users, which are published with the item vectors of the same training. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import keys_of
from embeddings.vectors.lazy_rows import Array, Picked, Vectors
from embeddings.vectors.query_tower import QueryTower


@dataclass(frozen=True, eq=False)
class SeenLists:
    """The items that each user had in training: user u had ``items[positions[starts[u] : starts[u + 1]]]``.

    ``items``: ids as keys [m]. ``positions``: int64 [total]. ``starts``: int64 [users + 1].
    """

    items: Array
    positions: Array
    starts: Array


@dataclass(frozen=True, eq=False)
class UserVectors:
    """One row per user, ascending by id; with it the score of an item is computed as the model does.

    score(u, i) = <q_u, s_i z_i> + b_i + o_u, with q_u the user's vector, z_i the item's unit vector, b_i its bias and
    o_u the user's offset. s_i is the item's norm, or 1 with ``unit_items``.

    Args:
        ids: int64 or strings (numpy, Arrow or a sequence), ascending; kept as ``keys``.
        vectors: float32 [n, d], in the coordinates of the items' raw rows.
        offsets: float32 [n]; None: zeros.
        unit_items: True if the model scales item vectors to length 1 before it multiplies them.
        seen: the items that each user had in training.
        tower: the model from features or a history to q_u and o_u, for users without a row; None: there is none.
        columns: columns of items, for filters; None: there are none.
        scored: unit vectors z_i [items, d] of the version's items, in the order of its rows, if scores need other
            vectors than the served vectors, which may be averaged; None: the served vectors.

    Raises:
        ValueError: ids that do not ascend, or shapes that do not agree.
    """

    ids: Any
    vectors: Vectors
    seen: SeenLists
    offsets: Array = None  # type: ignore[assignment]
    unit_items: bool = False
    scored: Vectors | None = None
    tower: QueryTower | None = None
    columns: ItemColumns | None = None

    def __post_init__(self) -> None:
        keys = keys_of(self.ids)
        if len(keys) > 1 and not bool(np.all(keys[1:] > keys[:-1])):
            raise ValueError("ids of users must ascend")
        offsets = np.zeros(len(keys), np.float32) if self.offsets is None else np.asarray(self.offsets, np.float32)
        lengths = {len(keys), len(self.vectors), len(offsets), len(self.seen.starts) - 1}
        if len(lengths) > 1:
            raise ValueError(f"ids, vectors, offsets and seen items of users differ in length: {sorted(lengths)}")
        object.__setattr__(self, "ids", keys)
        object.__setattr__(self, "offsets", offsets)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> Array:
        """The ascending ids as int64 or fixed-width bytes."""
        return self.ids  # type: ignore[no-any-return]

    def take(self, rows: Array) -> UserVectors:
        """Return the users at ``rows``, row numbers that must ascend; their vectors are not copied."""
        positions, starts = take_lists(self.seen.positions, self.seen.starts, rows)
        seen = SeenLists(self.seen.items, positions, starts)
        return replace(
            self, ids=self.keys[rows], vectors=Picked(self.vectors, rows), seen=seen, offsets=self.offsets[rows]
        )


def take_lists(values: Array, starts: Array, rows: Array) -> tuple[Array, Array]:
    """Return (values, starts) of the lists at ``rows``; list i is ``values[starts[i] : starts[i + 1]]``."""
    lengths = starts[rows + 1] - starts[rows]
    taken = np.append(0, np.cumsum(lengths))
    return values[np.arange(taken[-1]) + np.repeat(starts[rows] - taken[:-1], lengths)], taken
