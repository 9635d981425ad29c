"""CURRENT: the file that names the served version; replacing it switches versions."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.store.files import NewerStore, decode_document, replace_document

HISTORY_LENGTH = 200


class Served(NamedTuple):
    """The content of CURRENT.

    Attributes:
        history: the latest switches, oldest first, {version, at, kind, reason, override_gate}.
        versions: all versions that were ever served, the latest served last.
        erasures: number of erasures so far; a change tells processes that versions lost rows.
    """

    version: str | None
    history: list[dict[str, Any]]
    versions: list[str]
    erasures: int = 0


class Pointer:
    """Reads and replaces CURRENT; thread-safe.

    The file is read again only when it was replaced. A caller that replaces it holds the writer lock.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self.mark: tuple[int, ...] | None = None
        """Identity of the file that was read last; None before the first read."""
        self._served = Served(None, [], [])

    def read(self) -> Served:
        """Read CURRENT.

        A later format of the store marks itself with a new entry in CURRENT, which all readers read first. Code that
        does not know the entry refuses to read or change the collection.

        Raises:
            CorruptStore: the file is damaged.
            NewerStore: the file has an entry that this version of Evenkeel does not know.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Served(None, [], [])
        try:
            status = os.fstat(descriptor)
            mark = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            with self._lock:
                if mark == self.mark:
                    return self._served
            document = decode_document(os.read(descriptor, status.st_size + 1), self._path)
            if unknown := sorted(document.keys() - set(Served._fields)):
                raise NewerStore(
                    f"{self._path}: this version of Evenkeel does not know {', '.join(unknown)}: a newer one wrote the "
                    "collection: install that, or restore a backup made before"
                )
            served = Served(**document)
        finally:
            os.close(descriptor)
        with self._lock:
            self.mark, self._served = mark, served
        return served

    def switch(self, to: dict[str, Any]) -> None:
        """Make ``to["version"]`` the served version, in one durable step, and append ``to`` to the history."""
        served = self.read()
        version = to["version"]
        after = Served(
            version,
            [*served.history, to][-HISTORY_LENGTH:],
            [name for name in served.versions if name != version] + [version],
            served.erasures,
        )
        self._replace(after._asdict())

    def count_erasure(self) -> None:
        """Increase the count of erasures by one, in one durable step."""
        served = self.read()
        self._replace(served._replace(erasures=served.erasures + 1)._asdict())

    def _replace(self, document: dict[str, Any]) -> None:
        replace_document(self._path, document)
