"""Sends what OpenLineage wants to know of a run, where ``OPENLINEAGE_URL`` is set (docs/adr/0038). Torch-free.

The variables are those of OpenLineage's own clients. A receiver that is away, and an event that cannot be made, cost
one line of the run's log and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from trainer.runs.directory import Run

if TYPE_CHECKING:
    from trainer.runs.openlineage_events import EventType

URL_VARIABLE = "OPENLINEAGE_URL"
ENDPOINT_VARIABLE = "OPENLINEAGE_ENDPOINT"
KEY_VARIABLE = "OPENLINEAGE_API_KEY"
DISABLED_VARIABLE = "OPENLINEAGE_DISABLED"
DEFAULT_ENDPOINT = "api/v1/lineage"
ANSWER_SECONDS = 5.0
LAST_WORDS_SECONDS = 5.0
"""Longest wait of an ended run for its events to be sent."""
MAX_WAITING = 100

Tell = Callable[..., None]


@contextlib.contextmanager
def telling(run: Run) -> Iterator[Tell]:
    """Tell of an attempt's start, and yield what tells of the rest, with the arguments of ``event`` after the run.

    Telling takes no time: a thread makes and sends the events, in order. Without ``OPENLINEAGE_URL`` nothing happens.
    """
    url = os.environ.get(URL_VARIABLE, "").strip()
    if not url or os.environ.get(DISABLED_VARIABLE, "").strip().lower() in ("true", "1"):
        yield lambda *_, **__: None
        return
    from trainer.runs.openlineage_events import event

    waiting: queue.Queue[Callable[[], dict[str, Any]] | None] = queue.Queue(MAX_WAITING)
    thread = threading.Thread(target=_send_all, args=(url, waiting), name="openlineage", daemon=True)
    thread.start()

    def tell(kind: EventType, **known: Any) -> None:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(partial(event, run, kind, **known))

    tell("START")
    try:
        yield tell
    finally:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(None)
            thread.join(LAST_WORDS_SECONDS)


def _send_all(url: str, waiting: queue.Queue[Callable[[], dict[str, Any]] | None]) -> None:
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "").strip() or DEFAULT_ENDPOINT
    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    said = False
    while (made := waiting.get()) is not None:
        try:
            where = f"{url.rstrip('/')}/{endpoint.lstrip('/')}"
            httpx.post(where, json=made(), headers=headers, timeout=ANSWER_SECONDS).raise_for_status()
        except Exception as error:  # whatever it is, the run has more important things to do
            if not said:
                print(f"no lineage: {type(error).__name__}: {error}; see {URL_VARIABLE}", file=sys.stderr, flush=True)
            said = True
