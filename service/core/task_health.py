"""Health of the background tasks, for /readyz, /metrics and the log: one :class:`TaskHealth` per task."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

log = logging.getLogger("evenkeel")

TROUBLE_SECONDS = 10.0
"""Time for which a task's rounds must have failed before the task counts as failing."""
SILENT_SECONDS = 120.0
LOG_AGAIN_SECONDS = 300.0


class TaskHealth:
    """Outcome of the rounds of one background task.

    A failure that repeats every round is logged once, and then every five minutes, so that a long outage does not push
    its beginning out of the log.
    """

    def __init__(
        self, name: str, clock: Callable[[], float] = time.monotonic, on_error: Callable[[], object] = lambda: None
    ):
        self.name = name
        self._on_error = on_error
        self._clock = clock
        self._last = clock()
        self._note = "ok"
        self._error = ""
        self._failing_since: float | None = None
        self._logged_at: dict[str, float] = {}

    def good(self, note: str = "ok") -> None:
        """Record a successful round; ``note`` is its status message, logged when it changes."""
        now = self._clock()
        if self._failing_since is not None:
            log.warning("%s: works again after %.0f s", self.name, now - self._failing_since)
            self._failing_since = None
            self._logged_at.clear()
        if note not in ("ok", self._note):
            log.warning("%s: %s", self.name, note)
        self._last, self._note = now, note

    def failed(self, error: Exception) -> None:
        """Record a failed round; call this in the ``except`` block, so that the traceback is logged."""
        self._on_error()
        now = self._clock()
        self._last = now
        if self._failing_since is None:
            self._failing_since = now
        self._error = _public_text(error)
        if now - self._logged_at.get(self._error, -LOG_AGAIN_SECONDS) >= LOG_AGAIN_SECONDS:
            self._logged_at[self._error] = now
            log.exception("%s: a round failed; it is tried again", self.name)

    def verdict(self) -> tuple[bool, str]:
        """Return (True, its status message) if the task works, else (False, the reason)."""
        now = self._clock()
        if self._failing_since is not None and now - self._failing_since >= TROUBLE_SECONDS:
            return False, f"has been failing for {now - self._failing_since:.0f} s: {self._error}"
        if now - self._last >= SILENT_SECONDS:
            return False, f"has not completed a round for {now - self._last:.0f} s"
        return True, self._note


async def repeat(round_: Callable[[], Awaitable[object]], seconds: float, health: TaskHealth) -> None:
    """Await ``round_()`` every ``seconds`` until cancelled; a round that fails is reported to ``health``."""
    while True:
        try:
            await round_()
            health.good()
        except Exception as error:
            health.failed(error)
        await asyncio.sleep(seconds)


def _public_text(error: Exception) -> str:
    """Describe an error for /readyz, which anyone may read; the database's address and user appear only in the log."""
    if isinstance(error, SQLAlchemyError | ConnectionError | TimeoutError | socket.gaierror):
        return f"{type(error).__name__}: the service's log says why"
    return f"{type(error).__name__}: {error}".splitlines()[0]
