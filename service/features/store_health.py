"""Watches whether the server of a remote store answers, for the log and /readyz."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from embeddings.store import Store
from service.core.task_health import LOG_AGAIN_SECONDS

log = logging.getLogger("evenkeel")

CHECK_SECONDS = 5.0


class Answer(NamedTuple):
    """The state of a remote store.

    ``reached``: the server answers. ``serves``: fetches are answered, possibly from data on this machine. ``message``:
    text for /readyz, which anyone may read; the server's address and its error appear only in the log.
    """

    reached: bool
    serves: bool
    message: str


REACHED = Answer(True, True, "ok")
NOT_ASKED = Answer(False, False, "has not answered yet")


class StoreHealth:
    """Queries the server in its own thread between ``start`` and ``stop``, since it may take long to fail.

    A store in a directory is not watched; its disk is checked instead.
    """

    def __init__(self, store: Store):
        self._store = store
        self._answer = NOT_ASKED
        self._asked = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._store.is_remote:
            # A daemon thread, so that the process can exit while the server does not answer.
            threading.Thread(target=self._run, name="store-health", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def answer(self, timeout_seconds: float) -> Answer | None:
        """Return the latest answer, waiting for the first answer; None if no server is watched."""
        if not self._store.is_remote:
            return None
        self._asked.wait(timeout_seconds)
        return self._answer

    def _run(self) -> None:
        away_since = logged_at = 0.0
        while not self._stopped.is_set():
            try:
                self._store.reach()
            except Exception as error:  # any error of the store's client means that the server cannot be reached
                now = time.monotonic()
                if self._answer.reached or not self._asked.is_set():
                    away_since, logged_at = now, now - LOG_AGAIN_SECONDS
                answer = self._without_server()
                if now - logged_at >= LOG_AGAIN_SECONDS:
                    logged_at = now
                    log.error("store: %s: %s (%s)", type(error).__name__, error, answer.message)
                self._answer = answer
            else:
                if self._asked.is_set() and not self._answer.reached:
                    log.warning("store: the server answers again after %.0f s", time.monotonic() - away_since)
                self._answer = REACHED
            self._asked.set()
            self._stopped.wait(CHECK_SECONDS)

    def _without_server(self) -> Answer:
        if self._store.available_offline():
            return Answer(False, True, "its server cannot be reached: versions cached on this machine are still served")
        return Answer(False, False, "its server cannot be reached: the service's log says why")
