"""Limits on a key's requests and an address's wrong keys: a token bucket each, in this process."""

from __future__ import annotations

import time
from collections import OrderedDict

BURST_SECONDS = 2.0
SIZE = 10_000


class RateLimit:
    """Allows ``per_second`` requests per name, and ``burst`` at once.

    The default burst is what two seconds allow; 0 per second means no limit. The latest ``SIZE`` names are remembered.
    With several processes behind one address, each counts separately.
    """

    def __init__(self, per_second: float, burst: float | None = None):
        self._per_second = per_second
        self._burst = max(per_second * BURST_SECONDS if burst is None else burst, 1.0)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, name: str, now: float | None = None, *, count: bool = True) -> float:
        """Return 0 if the request may be answered, else the seconds to wait for the next one.

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
