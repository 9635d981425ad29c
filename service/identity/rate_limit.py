"""Limits on requests per key and wrong keys per address: a token bucket for each key or address, in this process."""

from __future__ import annotations

import time
from collections import OrderedDict

BURST_SECONDS = 2.0
SIZE = 10_000


class RateLimit:
    """Token buckets that allow each name ``per_second`` requests, and ``burst`` requests at once.

    The default burst is the number of requests allowed in two seconds; ``per_second`` 0 means no limit. The latest
    ``SIZE`` names are remembered. Several processes behind one address count separately.
    """

    def __init__(self, per_second: float, burst: float | None = None):
        self._per_second = per_second
        self._burst = max(per_second * BURST_SECONDS if burst is None else burst, 1.0)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, name: str, now: float | None = None, *, count: bool = True) -> float:
        """Return 0 if a request of ``name`` is allowed now, else the seconds to wait before the next request.

        An allowed request is counted unless ``count`` is False.
        """
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
