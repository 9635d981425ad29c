"""Raw ids behind hashes of strings, which have no way back: kept of the published feature's table alone. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.hashing import id_keys

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RawIds:
    """Distinct strings, in ascending order of their hashes.

    Attributes:
        keys: the hash of each, int64 [n].
        ids: large_string [n].
    """

    keys: Int64s
    ids: pa.Array

    @staticmethod
    def of(distinct: pa.Array) -> RawIds:
        """Return those of distinct strings without nulls."""
        keys = id_keys(distinct).view(np.int64)
        order = np.argsort(keys)
        return RawIds(keys[order], distinct.take(pa.array(order)))

    @staticmethod
    def joined(parts: Sequence[RawIds]) -> RawIds:
        """Return the strings of all parts, each once."""
        if len(parts) == 1:
            return parts[0]
        keys, first = np.unique(np.concatenate([part.keys for part in parts]), return_index=True)
        return RawIds(keys, pa.concat_arrays([part.ids for part in parts]).take(pa.array(first)))

    def of_keys(self, keys: Int64s) -> list[str]:
        """Return the strings of hashes, each of which is one of :attr:`keys`."""
        strings: list[str] = self.ids.take(pa.array(np.searchsorted(self.keys, keys))).to_pylist()
        return strings
