"""How many requests a key may send, and how many wrong keys an address: a token bucket each, in this process."""

from __future__ import annotations

import time
from collections import OrderedDict

BURST_SECONDS = 2.0
SIZE = 10_000


class RateLimit:
    """``per_second`` requests of one name, and at once ``burst``, or what falls due in two seconds; 0: any number.

    The latest ``SIZE`` names are remembered. With several processes behind one address each counts for itself.
    """

    def __init__(self, per_second: float, burst: float | None = None):
        self._per_second = per_second
        self._burst = max(per_second * BURST_SECONDS if burst is None else burst, 1.0)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, name: str, now: float | None = None, *, count: bool = True) -> float:
        """0 where the request may be answered, which counts it, unless ``count`` is False; else how long to wait for
        the next."""
        if not self._per_second:
            return 0.0
        now = time.monotonic() if now is None else now
        left, at = self._buckets.get(name, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        allowed = left >= 1.0
        if not count:
            return 0.0 if allowed else (1.0 - left) / self._per_second
        self._buckets.pop(name, None)
        self._buckets[name] = (left - 1.0 if allowed else left, now)
        if len(self._buckets) > SIZE:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - left) / self._per_second
