"""The feature store in object storage: S3, and whatever speaks its protocol.

    s3://BUCKET/PREFIX/collections/NAME/INDEX                                 which object each file is
                                        versions/v000001/items-SHA256.arrow   the files of the embedded store, their
                                        states/v000001-SHA256.json            names with the sha256 of the content
                                        LOCKS/TOKEN                           who writes, or wants to

An object is there whole or not at all, and a listing shows every one that is there (Amazon has promised both since
2020), so the lock is a marker that is alone: every writer puts a marker and then looks; one that sees no other has the
lock, one that does removes its own and tries again. A marker that was not put again for a lease belongs to a dead
writer. Ages are by the server's clock. See docs/adr/0019-remote-stores.md.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from embeddings.store.backends.remote import INDEX_FILE, content_name
from embeddings.store.backends.remote_store import RemoteStore
from embeddings.store.files import CorruptStore, StoreUnavailable, decode_document
from embeddings.store.lease import Lease, leased
from embeddings.store.manifest import VersionManifest
from embeddings.store.url import StoreUrl, parse_store_url
from embeddings.store.version import VersionReader
from embeddings.vectors.item_vectors import Array

FOLLOW_SECONDS = 1.0
LOCKS = "LOCKS"
OPTIONS = ("endpoint_override", "scheme", "region", "anonymous")
_PART_BYTES = 1 << 23
_CONNECT_SECONDS = 5.0
_REQUEST_SECONDS = 30.0
_ATTEMPTS = 20


def open_objects(text: str) -> RemoteStore:
    """Return the store at ``s3://BUCKET/PREFIX``.

    Options: ``endpoint_override``, ``scheme``, ``region``, ``anonymous``, and the options of every remote store.
    Credentials come from where AWS' own tools look for them, never from the URL.

    Raises:
        ValueError: a URL without a bucket, or an option that does not exist.
    """
    url = parse_store_url(text, FOLLOW_SECONDS, OPTIONS)
    root = url.address.removeprefix("s3://").strip("/")
    bucket = urlsplit(url.address).netloc
    if not bucket or "@" in bucket:
        raise ValueError(f"store url '{url.url}': write s3://BUCKET/PREFIX, and credentials into the environment")
    opened: list[fs.FileSystem] = []

    def connected() -> fs.FileSystem:
        if not opened:
            opened.append(_file_system(url))
        return opened[0]

    def names() -> list[str]:
        base = f"{root}/collections"
        with reaching(url.url):
            entries = connected().get_file_info(fs.FileSelector(base, allow_not_found=True))
        return [info.base_name for info in entries if info.type == fs.FileType.Directory]

    def connect(name: str) -> Objects:
        return Objects(connected, f"{root}/collections/{name}", url)

    return RemoteStore(url.url, url.cache, names, connect, url.follow_seconds)


def _file_system(url: StoreUrl) -> fs.FileSystem:
    options: dict[str, Any] = dict(url.options)
    endpoint = options.get("endpoint_override", "")
    if "://" in endpoint:
        scheme, _, options["endpoint_override"] = endpoint.partition("://")
        options.setdefault("scheme", scheme)
    if "anonymous" in options:
        options["anonymous"] = options["anonymous"] in ("1", "true")
    return fs.S3FileSystem(
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        # A small object is put by one request instead of three.
        allow_delayed_open=True,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3),
        **options,
    )


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turn what Arrow raises about a server that is away, or that refuses, into StoreUnavailable."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        # Errors of this machine's own files have a number, Arrow's about S3 have none.
        if error.errno is not None:
            raise
        raise StoreUnavailable(
            f"{where}: the object store did not do it: {error}. What is served is unchanged; see that it is up, that "
            "the bucket exists and that the credentials in the environment may use it, then try again"
        ) from error


class Objects:
    """One collection in object storage."""

    items_stay_there = False

    def __init__(self, connected: Any, base: str, url: StoreUrl):
        self._connected = connected
        self._base = base
        self._where = f"{url.url} ({base})"
        self._lease_seconds = url.lease_seconds

    def index(self) -> bytes | None:
        # Arrow asks for the length first and then for so many bytes; in between the index may become a longer one.
        for attempt in range(_ATTEMPTS):
            with reaching(self._where):
                data = self._read(INDEX_FILE)
            try:
                if data is not None:
                    decode_document(data, Path(self._base, INDEX_FILE))
                return data
            except CorruptStore:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def commit(self, index: bytes, lease: Lease) -> None:
        lease.check()
        with reaching(self._where):
            self._write(INDEX_FILE, index)

    def put(self, path: str, file: Path, sha256: str) -> str:
        name = content_name(path, sha256)
        with reaching(self._where), open(file, "rb") as source:
            with self._connected().open_output_stream(f"{self._base}/{name}") as target:
                shutil.copyfileobj(source, target, _PART_BYTES)
        return name

    def fetch(self, name: str, to: Path) -> None:
        with reaching(self._where), open(to, "wb") as target:
            with self._connected().open_input_stream(f"{self._base}/{name}") as source:
                shutil.copyfileobj(source, target, _PART_BYTES)

    def sweep(self, named: set[str], lease: Lease) -> None:
        with reaching(self._where):
            for name in self._names(""):
                if name not in named and name != INDEX_FILE and not name.startswith(f"{LOCKS}/"):
                    lease.check()
                    self._delete(name)

    def lock(self) -> contextlib.AbstractContextManager[Lease]:
        return leased(self, uuid.uuid4().hex, self._lease_seconds, self._where)

    def reader(self, manifest: VersionManifest, name: str) -> VersionReader:
        raise AssertionError("item rows are fetched: they are mapped here")

    def lookup(self, reader: VersionReader, ids: Any, index: bytes) -> tuple[Array, Array] | None:
        raise AssertionError("item rows are fetched: they are mapped here")

    # --- the lock --------------------------------------------------------------------------------------------------

    def acquire(self, token: str) -> bool:
        self.renew(token)
        with reaching(self._where):
            marks = self._names(LOCKS)
            put_at = marks.get(f"{LOCKS}/{token}")
            others = [name for name in marks if not name.endswith(f"/{token}")]
            if put_at is not None and not others:
                return True
            for name in others:
                # A second more, because servers give the time in whole seconds.
                if put_at is not None and put_at - marks[name] > self._lease_seconds + 1:
                    self._delete(name)
            self._delete(f"{LOCKS}/{token}")
        return False

    def renew(self, token: str) -> None:
        with reaching(self._where):
            self._write(f"{LOCKS}/{token}", str(time.time()).encode())

    def release(self, token: str) -> None:
        with reaching(self._where):
            self._delete(f"{LOCKS}/{token}")

    # --- objects ---------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> bytes | None:
        try:
            with self._connected().open_input_stream(f"{self._base}/{name}") as source:
                data: bytes = source.readall()
                return data
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes) -> None:
        with self._connected().open_output_stream(f"{self._base}/{name}") as target:
            target.write(data)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._connected().delete_file(f"{self._base}/{name}")

    def _names(self, folder: str) -> dict[str, float]:
        """Return the objects below ``folder`` and when each was put, in seconds."""
        selector = fs.FileSelector(f"{self._base}/{folder}".rstrip("/"), allow_not_found=True, recursive=True)
        entries = self._connected().get_file_info(selector)
        start = len(self._base) + 1
        return {info.path[start:]: info.mtime_ns / 1e9 for info in entries if info.type == fs.FileType.File}
