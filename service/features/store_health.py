"""Whether the server of a store that lies elsewhere answers: asked all the time, told in the log and by /readyz."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from embeddings.store import Store

log = logging.getLogger("evenkeel")

CHECK_SECONDS = 5.0
SAID_AGAIN_SECONDS = 300.0


class Answer(NamedTuple):
    """``reached``: the server answers. ``serves``: fetches are answered, be it from what is on this machine.
    ``message``: for everybody who asks /readyz; where the server is, and what it said, is for the log alone."""

    reached: bool
    serves: bool
    message: str


REACHED = Answer(True, True, "ok")
NOT_ASKED = Answer(False, False, "has not answered yet")


class StoreWatch:
    """Asks in a thread of its own between ``start`` and ``stop``: a server that is away may take long to say so.
    A store in a directory is not asked after: the disk is."""

    def __init__(self, store: Store):
        self._store = store
        self._answer = NOT_ASKED
        self._asked = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._store.lies_elsewhere:
            # A daemon: the end of the process does not wait for a server.
            threading.Thread(target=self._run, name="store-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def answer(self, timeout_seconds: float) -> Answer | None:
        """The latest, None where nobody is asked. Waits for the first one."""
        if not self._store.lies_elsewhere:
            return None
        self._asked.wait(timeout_seconds)
        return self._answer

    def _run(self) -> None:
        away_since = said = 0.0
        while not self._stopped.is_set():
            try:
                self._store.reach()
            except Exception as error:  # whatever its client raises is the answer here
                now = time.monotonic()
                if self._answer.reached or not self._asked.is_set():
                    away_since, said = now, now - SAID_AGAIN_SECONDS
                answer = self._without_server()
                if now - said >= SAID_AGAIN_SECONDS:
                    said = now
                    log.error("store: %s: %s (%s)", type(error).__name__, error, answer.message)
                self._answer = answer
            else:
                if self._asked.is_set() and not self._answer.reached:
                    log.warning("store: the server answers again after %.0f s", time.monotonic() - away_since)
                self._answer = REACHED
            self._asked.set()
            self._stopped.wait(CHECK_SECONDS)

    def _without_server(self) -> Answer:
        if self._store.serves_alone():
            return Answer(False, True, "its server cannot be reached: versions that are here are served on")
        return Answer(False, False, "its server cannot be reached: the service's log says why")
