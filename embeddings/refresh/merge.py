"""Merge of a run's items with those of the parent version: the items of a version, found or carried.

An item with a usable vector from the run is *found*. An item of the parent without such a vector is *carried*: it keeps
the vector that was served last, until it is *retired* by training (a tombstone), *expires* or is erased. An id without
any vector is *missing*. Vectors are read only to flag the rows that have a usable direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embeddings.vectors.item_vectors import (
    CARRIED,
    FOUND,
    UNCERTAIN,
    ItemVectors,
    chunks,
    keys_of,
    row_norms,
    shared_rows,
)
from embeddings.vectors.lazy_rows import Array

if TYPE_CHECKING:
    from embeddings.store import VersionReader
    from embeddings.store.tombstones import ErasedIds


@dataclass(frozen=True)
class Expiry:
    """Limits after which a carried item becomes missing; None: no such limit.

    The first limit that is exceeded decides: the number of publications through which the item has been carried, or the
    age of its vector in days.
    """

    after_publications: int | None = None
    after_days: int | None = 90


@dataclass(frozen=True)
class Plan:
    """The rows of a version, sorted by id, m of them.

    Attributes:
        keys: ids [m].
        found_rows: int64 [m], the candidate's row, -1 where carried.
        parent_rows: int64 [m], the parent's row, -1 where the parent had none.
        statuses: uint8 [m].
        carried_for, last_found: int32 [m] (see ItemVectors).
        num_missing: number of ids of the candidate that have no vector.
        num_new: number of found items that the parent did not have.
    """

    keys: Array
    found_rows: Array
    parent_rows: Array
    statuses: Array
    carried_for: Array
    last_found: Array
    num_missing: int
    num_new: int

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, fresh: Array, carried: Array | None) -> Array:
        """Return one column of the version, from the candidate's column and the parent's."""
        if carried is None or not (self.found_rows < 0).any():
            return fresh[self.found_rows]
        column = np.empty(len(self), dtype=fresh.dtype)
        is_carried = self.found_rows < 0
        column[is_carried] = carried[self.parent_rows[is_carried]]
        column[~is_carried] = fresh[self.found_rows[~is_carried]]
        return column


def eligible_rows(items: ItemVectors, norm_floor: float) -> Array:
    """Flag the rows that have a usable direction, bool [n].

    Eligible rows were touched in training (``items.evidence``), are finite, and have a norm above ``norm_floor`` (at
    least 0). A row that was never touched, or decayed to zero, has no usable direction.
    """
    usable = items.evidence.copy()
    for part in chunks(len(items)):
        # NaN compares false: a row that is not finite is not usable.
        usable[part] &= row_norms(items.vectors[part]) > norm_floor
    return usable


def expired(parent: ItemVectors | None, renewed: Array, expiry: Expiry | None, today: int) -> Array:
    """Flag the parent's items that were carried for too long, bool [rows of the parent].

    ``renewed``: bool, items found in the run.
    """
    gone = np.zeros(0 if parent is None else len(parent), dtype=np.bool_)
    if parent is None or expiry is None:
        return gone
    if expiry.after_publications is not None and parent.carried_for is not None:
        gone |= parent.carried_for >= expiry.after_publications
    if expiry.after_days is not None and parent.last_found is not None:
        gone |= today - parent.last_found > expiry.after_days
    gone &= ~renewed
    return gone


@dataclass(frozen=True)
class RemovedItems:
    """Items of the parent that are not carried on, bool [items of the parent] each.

    Three kinds: items that training gave up, items that have been carried for too long, and items that are being erased
    at this moment.
    """

    retired: Array
    expired: Array
    erased: Array

    @classmethod
    def of(
        cls,
        parent: VersionReader | None,
        previous: ItemVectors | None,
        candidate: ItemVectors,
        retired: Any,
        erased: ErasedIds,
        expiry: Expiry | None,
        today: int,
    ) -> RemovedItems:
        tombstones = np.zeros(0 if parent is None else len(parent), dtype=np.bool_)
        if parent is None:
            return cls(tombstones, tombstones, tombstones)
        old, new = shared_rows(parent.keys, candidate.keys)
        if len(retired):
            tombstones |= np.isin(parent.keys, keys_of(retired, query=True))
            tombstones[old] = False
        renewed = np.zeros(len(parent), dtype=np.bool_)
        renewed[old] = candidate.evidence[new]
        gone = np.zeros_like(tombstones) if previous is None else expired(previous, renewed, expiry, today)
        return cls(tombstones, gone, erased.matches(parent.keys))

    @property
    def all(self) -> Array:
        return self.retired | self.expired | self.erased


def plan(
    parent: ItemVectors | None,
    keys: Array,
    usable: Array,
    allowed: Array,
    leaves: Array,
    today: int,
    *,
    few: Array | None = None,
) -> Plan:
    """Plan the rows that are served of a candidate and its parent.

    An item flagged in ``few`` is uncertain, unless its status in the parent was found or carried: then its training
    continued from a known vector, and it is found. An uncertain item that is carried stays uncertain.

    Args:
        parent: the served version, in the candidate's coordinates; None in a new anchor generation, which carries
            nothing.
        keys: sorted ids [n] of the candidate.
        usable: bool [n], ids that have a vector.
        allowed: bool [n], ids that may be served at all and count as missing without a vector.
        leaves: bool [rows of the parent], items that are not carried on: retired, expired, erased.
        today: days since 1970-01-01 UTC.
        few: bool [n], ids whose vector comes from few training rows; None: no id.
    """
    rows = np.flatnonzero(usable)
    num_without = int(np.count_nonzero(allowed & ~usable))
    statuses = np.full(len(rows), FOUND, np.uint8)
    if few is not None:
        statuses[few[rows]] = UNCERTAIN
    if parent is None:
        nothing = np.full(len(rows), -1)
        return Plan(
            keys[rows], rows, nothing, statuses, np.zeros(len(rows), np.int32),
            np.full(len(rows), today, np.int32), num_without, len(rows),
        )  # fmt: skip
    old, new = shared_rows(parent.keys, keys)
    stays = ~leaves
    renewed = np.zeros(len(parent), dtype=np.bool_)
    renewed[old] = usable[new]
    num_rescued = int(np.count_nonzero((allowed & ~usable)[new] & stays[old]))
    parent_row_of = np.full(len(keys), -1)
    parent_row_of[new] = old
    parent_rows = parent_row_of[rows]
    num_new = int(np.count_nonzero(parent_rows < 0))
    carried = np.flatnonzero(~renewed & stays)
    in_parent = np.flatnonzero(parent_rows >= 0)
    known_better = np.isin(parent.statuses[parent_rows[in_parent]], (FOUND, CARRIED))
    statuses[in_parent[known_better]] = FOUND
    carried_for = np.zeros(len(rows), np.int32)
    last_found = np.full(len(rows), today, np.int32)
    served = keys[rows]
    if len(carried):
        served = np.concatenate([served, parent.keys[carried]])
        order = np.argsort(served, kind="stable")
        served = served[order]
        rows = np.concatenate([rows, np.full(len(carried), -1)])[order]
        parent_rows = np.concatenate([parent_rows, carried])[order]
        status = np.where(parent.statuses[carried] == UNCERTAIN, UNCERTAIN, CARRIED).astype(np.uint8)
        statuses = np.concatenate([statuses, status])[order]
        before = np.zeros(len(carried), np.int32) if parent.carried_for is None else parent.carried_for[carried]
        carried_for = np.concatenate([carried_for, before + np.int32(1)])[order]
        since = np.full(len(carried), today, np.int32) if parent.last_found is None else parent.last_found[carried]
        last_found = np.concatenate([last_found, since])[order]
    return Plan(served, rows, parent_rows, statuses, carried_for, last_found, num_without - num_rescued, num_new)
