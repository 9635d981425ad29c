"""Counts of keys that a lookup finds among other keys, and likely reasons why it finds few. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.errors import DataError
from trainer.data.sources.source import Source
from trainer.data.sources.types import is_list

LEAST_FOUND = 0.01
"""Share of found keys below which the two sides write their keys in different ways, or name different things."""
LEAST_KEYS = 20
"""Number of keys below which no share is judged."""
_KEPT = 100
_SHOWN = 3
_ENOUGH = 0.5
"""Share of the kept keys that a reason must explain."""
_HASH = re.compile(r"[0-9a-fA-F]{16,}")


@dataclass
class KeyMatches:
    """Number of keys that were looked up, without nulls, and number of keys that were found.

    ``unknown``: the first distinct keys that were not found, as text.
    """

    num_keys: int = 0
    num_found: int = 0
    unknown: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, keys: pa.Array, positions: npt.NDArray[np.integer[Any]]) -> KeyMatches:
        """Count keys by their positions, -1 where a key is null or not found."""
        is_missing = pc.is_null(keys, nan_is_null=True).to_numpy(zero_copy_only=False)
        unknown = pc.unique(keys.filter(pa.array((positions < 0) & ~is_missing)))[:_KEPT]
        texts = unknown.cast(pa.large_string()).to_pylist()
        return cls(len(keys) - int(is_missing.sum()), int(np.count_nonzero(positions >= 0)), texts)

    def add(self, later: KeyMatches) -> None:
        """Add the counts of keys that follow."""
        self.num_keys += later.num_keys
        self.num_found += later.num_found
        self.unknown = list(dict.fromkeys([*self.unknown, *later.unknown]))[:_KEPT]

    def exceeds(self, limit: float) -> bool:
        """Return True if a larger share than ``limit`` was not found, of enough keys to judge."""
        return self.num_keys >= LEAST_KEYS and 1.0 - self.num_found / self.num_keys > limit


def shown(keys: pa.Array | Sequence[str]) -> str:
    """Return some of the keys for a message, in quotes that show white space."""
    first = keys[:_SHOWN]
    return ", ".join(repr(str(one)) for one in (first.to_pylist() if isinstance(first, pa.Array) else first))


def likely_reason(unknown: Sequence[str], there: pa.Array) -> str | None:
    """Return a likely reason, such as another way of writing, why keys were not found; None if none is known."""
    asked, known = pa.array(unknown, pa.large_string()), there.cast(pa.large_string()).drop_null()
    if not len(asked) or not len(known):
        return None
    if _are_hashes(asked) != _are_hashes(known):
        return f"the {'former' if _are_hashes(asked) else 'latter'} look like hashes"
    for words, alike in _ALIKE.items():
        # A conversion that makes different keys equal explains nothing.
        reduced = pc.unique(alike(asked))
        if len(reduced) >= _ENOUGH * len(asked) and _share(reduced, alike(known)) >= _ENOUGH:
            return f"they are equal except for {words}"
    return None


def column_with(unknown: Sequence[str], uri: str, but: str) -> str | None:
    """Return the column of a file, other than ``but``, whose values are distinct and hold most of the keys."""
    asked, source = pa.array(unknown, pa.large_string()), Source(uri)
    for column in source.column_names():
        try:
            source.require([column])
            if column == but or is_list(source.column_type(column)):
                continue
            chunk = next(source.stream([column]), None)
            values = None if chunk is None else chunk.column(column).cast(pa.large_string()).drop_null()
        except (DataError, pa.ArrowException):
            continue
        if values is not None and len(values) == pc.count_distinct(values).as_py() and _share(asked, values) >= _ENOUGH:
            return column
    return None


def _share(asked: pa.Array, known: pa.Array) -> float:
    return float(pc.mean(pc.is_in(asked, value_set=known)).as_py() or 0.0)


def _are_hashes(keys: pa.Array) -> bool:
    return all(_HASH.fullmatch(key) for key in keys[:_KEPT].to_pylist())


def _without(pattern: str) -> Callable[[pa.Array], pa.Array]:
    """Return a function that replaces texts that match a pattern by the pattern's group; other texts stay."""
    return lambda texts: pc.replace_substring_regex(texts, pattern, r"\1")


def _without_all(texts: pa.Array) -> pa.Array:
    for words in (
        "white space",
        "upper and lower case",
        "a fraction of zeros",
        "a prefix of letters",
        "zeros in front",
    ):
        texts = _ALIKE[words](texts)
    return texts


_ALIKE: dict[str, Callable[[pa.Array], pa.Array]] = {
    "white space": lambda texts: pc.replace_substring_regex(texts, r"[\s\x{a0}\x{feff}]+", ""),
    "upper and lower case": pc.utf8_lower,
    "quotes": _without(r"""^["'](.*)["']$"""),
    "zeros in front": _without(r"^0+(\d.*)$"),
    "a fraction of zeros": _without(r"^(-?\d+)\.0*$"),
    "the form of Unicode": lambda texts: pc.utf8_normalize(texts, form="NFKC"),
    "a prefix": _without(r"^.*?([^\W_]+)$"),
    "a suffix": _without(r"^([^\W_]+).*$"),
    "a prefix of letters": _without(r"^\D+(\d+)$"),
    "several of white space, case, fractions of zeros, zeros in front and a prefix": _without_all,
}
