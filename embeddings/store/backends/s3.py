"""The feature store in object storage: S3, and servers that speak its protocol.

    s3://BUCKET/PREFIX/collections/NAME/INDEX                                 map of files to objects
                                        versions/v000001/items-SHA256.arrow   the files of the embedded store, their
                                        states/v000001-SHA256.json            names with the sha256 of the content
                                        LOCK                                  token of the writer, or empty

The index and the lock are replaced only if they are unchanged since they were read (conditional puts, ``If-Match``). So
a writer that was suspended for too long replaces nothing. A lock that has not changed for the time of a lease belongs
to a dead writer. See docs/adr/0019-remote-stores.md.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from embeddings.object_storage import MissingFileError, ObjectStorage, StorageError, Version
from embeddings.store.backends.remote import INDEX_FILE, content_name
from embeddings.store.backends.remote_store import RemoteStore
from embeddings.store.files import StoreBusy, StoreUnavailable, decode_document
from embeddings.store.lease import Lease, leased, now
from embeddings.store.manifest import VersionManifest
from embeddings.store.url import StoreUrl, parse_store_url
from embeddings.store.version import VersionReader
from embeddings.vectors.item_vectors import Array

FOLLOW_SECONDS = 1.0
LOCK = "LOCK"
OPTIONS = ("endpoint_override", "scheme", "region", "anonymous")
_REQUEST_SECONDS = 30.0
_RETRIES = 2
_KNOWN_INDEXES = 8
"""Number of index contents, the last read or written, whose object version is kept: a commit replaces one of these."""


def open_objects(text: str) -> RemoteStore:
    """Open the store at ``s3://BUCKET/PREFIX``.

    Options in its query: ``endpoint_override``, ``scheme``, ``region``, ``anonymous``, and the options of every remote
    store. Credentials are found as :mod:`embeddings.object_storage` says, never in the URL.

    Raises:
        ValueError: a URL without a bucket, or an option that does not exist.
    """
    url = parse_store_url(text, FOLLOW_SECONDS, OPTIONS)
    scheme, bucket, *_ = urlsplit(url.address)
    if not bucket or "@" in bucket:
        raise ValueError(f"store url '{url.url}': write {scheme}://BUCKET/PREFIX, and credentials into the environment")
    root = f"{url.address.rstrip('/')}/collections"

    def connected(name: str = "") -> ObjectStorage:
        with reaching(url.url):
            options = _options(url)
            return ObjectStorage(f"{root}/{name}", retries=_RETRIES, request_seconds=_REQUEST_SECONDS, **options)

    def names() -> list[str]:
        with reaching(url.url):
            return connected().folders("")

    return RemoteStore(url, names, lambda name: Objects(lambda: connected(name), f"{root}/{name}", url))


def _options(url: StoreUrl) -> dict[str, Any]:
    options: dict[str, Any] = {}
    endpoint = url.options.get("endpoint_override", "")
    if endpoint:
        scheme = url.options.get("scheme", "https")
        options["endpoint"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    if "region" in url.options:
        options["region"] = url.options["region"]
    if url.options.get("anonymous") in ("1", "true"):
        options["skip_signature"] = True
    return options


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turn a StorageError inside this context into StoreUnavailable; ``where`` begins the message."""
    try:
        yield
    except StorageError as error:
        raise StoreUnavailable(
            f"{where}: the object store failed: {error}. What is served is unchanged; see that it is up, that "
            "the bucket exists and that the credentials in the environment may use it, then try again"
        ) from error


class Objects:
    """One collection in object storage."""

    items_stay_there = False

    def __init__(self, connected: Callable[[], ObjectStorage], base: str, url: StoreUrl):
        self._connected = connected
        self._base = base
        self._where = f"{url.url} ({base})"
        self._lease_seconds = url.lease_seconds
        self._indexes: OrderedDict[bytes, Version] = OrderedDict()
        self._lock: Version | None = None
        self._watched: tuple[Any, float] = (None, 0.0)

    @functools.cached_property
    def _objects(self) -> ObjectStorage:
        return self._connected()

    def index(self) -> bytes | None:
        with reaching(self._where):
            found = self._objects.read_version(INDEX_FILE)
        if found is None:
            return None
        data, version = found
        decode_document(data, Path(self._base, INDEX_FILE))
        self._remember(data, version)
        return data

    def _remember(self, data: bytes, version: Version) -> None:
        self._indexes[data] = version
        while len(self._indexes) > _KNOWN_INDEXES:
            self._indexes.popitem(last=False)

    def commit(self, index: bytes, before: bytes | None, lease: Lease) -> None:
        lease.check()
        with reaching(self._where):
            version = None if before is None else self._indexes.get(before)
            if before is None or version is not None:
                version = self._objects.put_if_unchanged(INDEX_FILE, index, version)
        if version is None:
            raise StoreBusy(
                f"{self._where}: another process has published meanwhile: nothing of this was published and what is "
                "served is unchanged; run again"
            )
        self._remember(index, version)

    def put(self, path: str, file: Path, sha256: str) -> str:
        name = content_name(path, sha256)
        with reaching(self._where):
            self._objects.put_file(name, file)
        return name

    def fetch(self, name: str, to: Path) -> None:
        # The caller has made the file that the content goes to.
        to.unlink(missing_ok=True)
        with reaching(self._where):
            try:
                self._objects.fetch(name, to)
            except MissingFileError as error:
                raise FileNotFoundError(str(error)) from error

    def sweep(self, named: set[str], lease: Lease) -> None:
        with reaching(self._where):
            for name, _ in self._objects.list(""):
                if name not in named and name not in (INDEX_FILE, LOCK):
                    lease.check()
                    self._objects.delete([name])

    def lock(self) -> contextlib.AbstractContextManager[Lease]:
        return leased(self, uuid.uuid4().hex, self._lease_seconds, self._where)

    def reader(self, manifest: VersionManifest, name: str) -> VersionReader:
        raise AssertionError("item rows are fetched: they are mapped here")

    def lookup(self, reader: VersionReader, ids: Any, index: bytes) -> tuple[Array, Array] | None:
        raise AssertionError("item rows are fetched: they are mapped here")

    # --- the lock --------------------------------------------------------------------------------------------------

    def acquire(self, token: str) -> bool:
        with reaching(self._where):
            found = self._objects.read_version(LOCK)
            version = None if found is None else found[1]
            if found is not None and found[0]:
                # Renewing changes the lock. If it did not change for a lease, its holder is dead.
                if self._watched[0] != version:
                    self._watched = (version, now())
                if now() - self._watched[1] <= self._lease_seconds:
                    return False
            self._lock = self._objects.put_if_unchanged(LOCK, self._mark(token), version)
        return self._lock is not None

    def renew(self, token: str) -> None:
        with reaching(self._where):
            if self._lock is not None:
                self._lock = self._objects.put_if_unchanged(LOCK, self._mark(token), self._lock)
        if self._lock is None:
            raise StoreBusy(f"{self._where}: another writer holds the lock by now")

    def release(self, token: str) -> None:
        with reaching(self._where):
            if self._lock is not None:
                self._objects.put_if_unchanged(LOCK, b"", self._lock)
            self._lock = None

    @staticmethod
    def _mark(token: str) -> bytes:
        """Return a content for the lock object that names ``token`` and is different at every call."""
        return f"{token} {uuid.uuid4().hex}".encode()
