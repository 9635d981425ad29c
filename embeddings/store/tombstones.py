"""Erased ids, stored as hashes only: enough to recognize an id, not enough to list the ids.

An id is stored as a keyed blake2b hash (RFC 7693, 16 bytes) with the collection's own random key, and as a 32-bit tag.
Tags are computed fast for millions of ids, and only ids whose tag is in the set are hashed. Anyone with the key and a
list of possible ids can test each of them. No method of recognizing ids can prevent that.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embeddings.vectors.item_vectors import MAX_ID_BYTES, chunks
from embeddings.vectors.lazy_rows import Array

_TAGGED_ROWS = 1 << 16


@dataclass(frozen=True)
class ErasedIds:
    """A set of ids. ``key`` is the key of the hashes, 32 bytes; ``tags`` maps the hash of each id to its tag."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    tags: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, document: dict[str, Any]) -> ErasedIds:
        """Return the set whose ``as_dict`` is ``document``."""
        return cls(bytes.fromhex(document["key"]), {bytes.fromhex(hash_): tag for hash_, tag in document["ids"]})

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key.hex(), "ids": sorted([hash_.hex(), tag] for hash_, tag in self.tags.items())}

    def __len__(self) -> int:
        return len(self.tags)

    def adding(self, keys: Array) -> ErasedIds:
        """Return a copy of this set with ``keys`` added: ids as embeddings.vectors.item_vectors.keys_of gives them."""
        tags = dict(zip(map(self._hash, keys.tolist()), self._tags(keys).tolist(), strict=True))
        return ErasedIds(self.key, {**self.tags, **tags})

    def without(self, keys: Array) -> ErasedIds:
        gone = set(map(self._hash, keys.tolist()))
        return ErasedIds(self.key, {hash_: tag for hash_, tag in self.tags.items() if hash_ not in gone})

    def matches(self, keys: Array) -> Array:
        """Return bool [n], True for the ``keys`` [n] that are in the set."""
        matched = np.zeros(len(keys), dtype=np.bool_)
        if not self.tags:
            return matched
        known = np.unique(np.fromiter(self.tags.values(), dtype=np.uint32, count=len(self.tags)))
        for part in chunks(len(keys), _TAGGED_ROWS):
            tags = self._tags(keys[part])
            likely = np.flatnonzero(known[np.minimum(np.searchsorted(known, tags), len(known) - 1)] == tags)
            hashes = map(self._hash, keys[part][likely].tolist())
            matched[part.start + likely] = [hash_ in self.tags for hash_ in hashes]
        return matched

    def _hash(self, key: int | bytes) -> bytes:
        # Fixed-width keys are padded with NUL, to widths that differ between versions.
        data = key.to_bytes(8, "little", signed=True) if isinstance(key, int) else key.rstrip(b"\0")
        return hashlib.blake2b(data, key=self.key, digest_size=16).digest()

    def _tags(self, keys: Array) -> Array:
        """Return a tag of each key, uint32 [n].

        For strings it is the sum of their bytes, each times a number for its position, so padding does not matter. For
        integers it is a product. Sum and product are computed modulo 2^64, and the tag is the upper half.
        """
        words = np.frombuffer(hashlib.shake_256(self.key).digest(8 * (MAX_ID_BYTES + 1)), dtype="<u8") | np.uint64(1)
        with np.errstate(over="ignore"):
            if keys.dtype.kind == "i":
                mixed = keys.astype(np.int64).view(np.uint64) * words[0]
            else:
                letters = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), keys.dtype.itemsize)
                mixed = np.zeros(len(keys), dtype=np.uint64)
                for position in range(letters.shape[1]):
                    mixed += letters[:, position] * words[position + 1]
            return (mixed >> np.uint64(32)).astype(np.uint32)
