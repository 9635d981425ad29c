"""Recent popularity of ids: counts with exponential decay, computed only from earlier occurrences, without torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class RecentCounts:
    """Decayed counts, c_i(t) = sum over occurrences of i at s < t of 2^(-(t - s) / half_life).

    An occurrence counts 1 when it happens and 1/2 after a time of ``half_life`` (exponential decay: Cormode,
    Shkapenyuk, Srivastava and Xu, Forward Decay, ICDE 2009). Occurrences at t itself are not in c_i(t). So the count
    that :meth:`add` gives a row contains neither the row's own occurrence nor later occurrences.

    Args:
        half_life: in the unit of the times, above 0.

    Raises:
        ValueError: half_life is not above 0, or not finite.

    Example:
        >>> from embeddings import RecentCounts
        >>> counts = RecentCounts(half_life=3600.0)  # times are in seconds
        >>> counts.add(["a", "b", "a"], [0, 600, 3600]).tolist()  # a column of rows: the count before each
        [0.0, 0.0, 0.5]
        >>> counts.at(["a", "never seen"], 7200).tolist()  # for ranking at 7200
        [0.75, 0.0]
    """

    def __init__(self, half_life: float):
        if not (math.isfinite(half_life) and half_life > 0):
            raise ValueError(f"half_life is {half_life}: give a time above 0, in the unit of the times")
        self.half_life = float(half_life)
        # By id: count before its last occurrence, time of that, and number of occurrences at the same time.
        self._known: dict[Hashable, tuple[float, float, float]] = {}
        self._latest = -math.inf

    def add(self, ids: Sequence[Hashable] | npt.NDArray[Any], times: Sequence[float] | npt.NDArray[Any]) -> Floats:
        """Add occurrences; return for each the count of its id just before it, float64 [n], in the order given.

        The occurrences of one call may have any order, but none may precede those of an earlier call.

        Args:
            ids: ids [n], of any hashable type.
            times: times [n].

        Raises:
            ValueError: ids and times differ in number, or a time is not finite or precedes an earlier call's.
        """
        keys, at = _as_list(ids), np.asarray(times, dtype=np.float64)
        if at.shape != (len(keys),):
            raise ValueError(f"{len(keys)} ids have times of shape {at.shape}: give one time for each")
        if not np.isfinite(at).all():
            raise ValueError(f"the time of row {int(np.flatnonzero(~np.isfinite(at))[0])} is not finite: leave it out")
        if len(at) and float(at.min()) < self._latest:
            raise ValueError(
                f"a time is {at.min():g}, and {self._latest:g} was added before: add occurrences in the order of time"
            )
        order = np.argsort(at, kind="stable")
        counts = np.empty(len(at))
        for position, time in zip(order.tolist(), at[order].tolist(), strict=True):
            before, last, tied = self._known.get(keys[position], (0.0, time, 0.0))
            if time > last:
                before, tied = (before + tied) * 2.0 ** ((last - time) / self.half_life), 0.0
            counts[position] = before
            self._known[keys[position]] = before, time, tied + 1.0
        if len(at):
            self._latest = float(at.max())
        return counts

    def at(self, ids: Sequence[Hashable] | npt.NDArray[Any], time: float) -> Floats:
        """Return the counts at a time, float64 [n]; 0 for an id that never occurred.

        Args:
            ids: as in :meth:`add` [n].
            time: a time not before any added occurrence; occurrences at exactly this time are not counted.

        Raises:
            ValueError: occurrences after ``time`` were added, which would leak into the counts.
        """
        if not time >= self._latest:
            raise ValueError(f"time is {time:g}, and {self._latest:g} was added: ask for a time at or after that")
        found = np.zeros(len(ids))
        for position, key in enumerate(_as_list(ids)):
            if key in self._known:
                before, last, tied = self._known[key]
                there = before + tied if time > last else before
                found[position] = there * 2.0 ** ((last - time) / self.half_life)
        return found


def _as_list(ids: Sequence[Hashable] | npt.NDArray[Any]) -> list[Hashable]:
    """Return ids as Python values: numpy values are slower as keys, and Arrow values never equal other values."""
    for in_python in ("to_pylist", "tolist"):
        if hasattr(ids, in_python):
            return list(getattr(ids, in_python)())
    return list(ids)
