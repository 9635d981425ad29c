"""Items that a refresh does not carry on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embeddings.refresh.merge import ExpirySettings, expired
from embeddings.store import VersionReader
from embeddings.store.tombstones import ErasedIds
from embeddings.vectors.item_vectors import Array, ItemVectors, keys_of, shared_rows


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
        expiry: ExpirySettings | None,
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
