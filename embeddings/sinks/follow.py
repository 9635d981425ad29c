"""Sinks that follow a collection: attaching them, bringing them up to date, measuring their lag.

A collection has a document for each sink that follows it (settings of kind ``sink``): the version that the sink has, or
the reason why it lacks the served version. ``sync`` compares the sink itself with the served version. So it may be
killed, run twice, or run by several processes: it does nothing if both are equal.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Collection as Names
from typing import Any

from embeddings.sinks.base import Batch, Content, Sink, SinkBusy, SinkError
from embeddings.sinks.configured import SINKS_VARIABLE, ConfiguredSink
from embeddings.store import Collection, Store, StoreError, VersionReader
from embeddings.store.views import utc_now
from embeddings.vectors.item_vectors import MISSING, chunks

log = logging.getLogger("evenkeel.sinks")

KIND = "sink"
"""Kind of the collection's settings with the state of each sink."""
BATCH_ROWS = 8192
BUSY_SECONDS = 60.0
"""Longest wait for another process that is loading a sink; a server may take some seconds to see that it was killed."""
LOOK_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause after a sink that failed."""


class SinkBehind(SinkError):
    """A sink did not get the served version in time."""


def attach(collection: Collection, names: Names[str]) -> None:
    """Let only the sinks of these names follow the collection; others lose their table at the next sync."""
    documents = collection.settings(KIND)
    for name in names:
        if name not in documents or "removed_at" in documents[name]:
            collection.save_settings(KIND, name, {"attached_at": utc_now()})
    for name in documents.keys() - set(names):
        if "removed_at" not in documents[name]:
            collection.save_settings(KIND, name, {**documents[name], "removed_at": utc_now()})


def sync(collection: Collection, name: str, sink: Sink) -> bool:
    """Bring a sink up to the version that the collection serves; return True if rows were loaded or removed.

    If the sink was detached, its table is removed.

    Raises:
        SinkError: the sink refuses.
        SinkBusy: another process is loading it.
        StoreError: the served version cannot be read.
        Exception: any error of the sink's client, if its server cannot be reached.
    """
    document = collection.settings(KIND).get(name)
    if document is None:
        raise SinkError(f"sink '{name}' does not follow collection '{collection.name}': attach it")
    if "removed_at" in document:
        sink.drop(collection.name)
        collection.save_settings(KIND, name, None)
        return True
    has_loaded = False
    while True:
        with collection.snapshot_read():
            history, erasures = collection.history(), collection.num_erasures()
            reader = collection.open() if history else None
        if reader is None:
            return has_loaded
        content = _content(collection, reader, erasures)
        try:
            if sink.holds(content.table) != content.identity:
                sink.load(content)
                has_loaded = True
            if document.get("erasures") != erasures:
                sink.purge(content.table)
        except Exception:
            if collection.num_erasures() != erasures:
                continue
            raise
        loaded_at = utc_now() if has_loaded else document.get("loaded_at") or utc_now()
        now = {
            "attached_at": document["attached_at"], "identity": content.identity, "version": content.version,
            "rows": content.num_rows, "loaded_at": loaded_at,
            "switched_at": str(history[-1]["at"]), "erasures": erasures,
        }  # fmt: skip
        if "removed_at" in (collection.settings(KIND).get(name) or {}):
            return has_loaded  # it was detached meanwhile: the next call removes the table
        if now != document:
            collection.save_settings(KIND, name, now)
        document = now
        if not is_behind(collection, document):
            return has_loaded


def sync_when_free(collection: Collection, name: str, sink: Sink, seconds: float = BUSY_SECONDS) -> bool:
    """Do as ``sync``, and wait up to ``seconds`` for another process that is loading the sink."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return sync(collection, name, sink)
        except SinkBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _content(collection: Collection, reader: VersionReader, erasures: int) -> Content:
    items, manifest = reader.items(), reader.manifest
    present = items.statuses != MISSING

    def batches() -> Iterator[Batch]:
        for part in chunks(len(items), BATCH_ROWS):
            rows = present[part]
            columns = (items.keys, items.statuses, items.norms, items.vectors)
            keys, statuses, norms, vectors = (column[part] for column in columns)
            if rows.all():
                yield Batch(keys, statuses, norms, vectors)
            else:
                yield Batch(keys[rows], statuses[rows], norms[rows], vectors[rows])
        if collection.num_erasures() != erasures:
            raise SinkError("ids were erased while the version was being loaded")

    return Content(
        collection.name, reader.version, manifest.identity, manifest.id_type, reader.dim, int(present.sum()), batches
    )


# --- how far behind --------------------------------------------------------------------------------------------------


def is_behind(collection: Collection, document: Mapping[str, Any]) -> bool:
    """Return True if, by the sink's document, the sink has other rows than the served version.

    Raises:
        StoreError: the served version cannot be read.
    """
    if "removed_at" in document:
        return True
    if collection.current() is None:
        return False
    served = (collection.open().manifest.identity, collection.num_erasures())
    return served != (document.get("identity"), document.get("erasures"))


def lag_seconds(collection: Collection, document: Mapping[str, Any]) -> float:
    """Return the seconds since the first change of the served rows that a sink lacks; 0 if it lacks none."""
    history = collection.history()
    if not history or "removed_at" in document:
        return 0.0
    switches = [str(switch["at"]) for switch in history]
    seen = document.get("switched_at")
    if seen is None:
        missed = [document["attached_at"]]
    else:
        missed = switches[switches.index(seen) + 1 :] if seen in switches else switches
        if document["erasures"] != collection.num_erasures():
            missed += [str(erasure["at"]) for erasure in collection.erasures()[-1:]]
    if not missed:
        return 0.0
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(min(missed))
    return max(0.0, round(age.total_seconds(), 3))


def sinks_of(collection: Collection) -> list[dict[str, Any]]:
    """Return the sinks that follow a collection: {name, version, rows, loaded_at, lag_seconds, error}.

    ``version`` is None until the first load. ``error`` describes the last failure since the last success.
    """
    return [
        {
            "name": name,
            **{field: document.get(field) for field in ("version", "rows", "loaded_at")},
            "lag_seconds": lag_seconds(collection, document),
            "error": document.get("error"),
        }
        for name, document in sorted(collection.settings(KIND).items())
        if "removed_at" not in document
    ]


def wait(collection: Collection, names: Names[str], seconds: float, pause: Callable[[], None]) -> None:
    """Wait until sinks have the served version; ``pause`` is called between two looks, and may raise.

    Raises:
        SinkBehind: a sink still lacks it after ``seconds``; the message says why.
    """
    deadline = time.monotonic() + seconds
    while True:
        behind = [sink for sink in sinks_of(collection) if sink["name"] in names and sink["lag_seconds"]]
        if not behind:
            return
        if time.monotonic() > deadline:
            errors = "; ".join(f"{sink['name']}: {sink['error'] or 'no attempt has failed'}" for sink in behind)
            raise SinkBehind(
                f"version {collection.current()} of '{collection.name}' is served, but not in its sinks after "
                f"{seconds:g} s ({errors}): look at the service that has {SINKS_VARIABLE}, then retry"
            )
        pause()


# --- a process that follows ------------------------------------------------------------------------------------------


class SinkFollower:
    """Threads that keep sinks up to date from ``start`` to ``stop``, one for each sink: a slow sink delays no other.

    ``store_of`` returns a tenant's store.
    """

    def __init__(self, sinks: Iterable[ConfiguredSink], store_of: Callable[[str], Store]):
        self._followed = [_Followed(sink, store_of) for sink in sinks]
        self._stopped = threading.Event()

    def start(self) -> None:
        for followed in self._followed:
            # Daemon threads: the process can exit during a load, and the next one does it again.
            threading.Thread(target=self._run, args=(followed,), name=f"sink-{followed.name}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, followed: _Followed) -> None:
        while not self._stopped.is_set():
            followed.look()
            self._stopped.wait(LOOK_SECONDS)


class _Followed:
    """One sink and the collections that it follows."""

    def __init__(self, configured: ConfiguredSink, store_of: Callable[[str], Store]):
        self.name = configured.name
        self._configured, self._store_of = configured, store_of
        self._sink: Sink | None = None
        self._compared: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}

    def look(self) -> None:
        """Bring the sink up to date for each collection, unless its last failure was just now."""
        try:
            store = self._store_of(self._configured.tenant)
            for name in store.collections():
                self._follow(store.collection(name))
        except Exception as error:
            log.warning("sink '%s': no collection can be read: %s: %s", self.name, type(error).__name__, error)

    def _follow(self, collection: Collection) -> None:
        until, pause = self._pauses.get(collection.name, (0.0, LOOK_SECONDS))
        document = collection.settings(KIND).get(self.name)
        if document is None or time.monotonic() < until:
            return
        try:
            # The sink itself is asked once: it may have been changed while no process followed.
            if collection.name in self._compared and "error" not in document and not is_behind(collection, document):
                return
            self._sink = self._sink or self._configured.open()
            if sync(collection, self.name, self._sink):
                log.info("sink '%s' has what collection '%s' serves", self.name, collection.name)
            self._compared.add(collection.name)
            self._pauses.pop(collection.name, None)
        except SinkBusy:
            return
        except Exception as error:
            self._pauses[collection.name] = time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)
            # Users see the document, and may not see the address that a client's error names.
            is_ours = isinstance(error, SinkError | StoreError)
            text = str(error) if is_ours else f"{type(error).__name__}: the service's log says why"
            if document.get("error") != text:
                reason = f"{type(error).__name__}: {error}"
                log.warning("sink '%s', collection '%s': %s", self.name, collection.name, reason)
                collection.save_settings(KIND, self.name, {**document, "error": text})
