"""Object storage as a run storage: S3, servers that speak its protocol and heed ``If-None-Match``, and Google's.

Keys come from the environment or the machine's role, as obstore finds them (it reads no ``~/.aws``): AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS (files),
GOOGLE_BEARER_TOKEN, GOOGLE_BASE_URL.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import GCSStore, S3Store

from trainer.storage.base import MissingFileError, StorageError, StoredFile

PART_BYTES = 8 << 20
"""Bytes of a large file in one request. A host with 8 ranks holds PARTS_AT_ONCE of them for each."""
PARTS_AT_ONCE = 4
DELETED_AT_ONCE = 1000
RETRIES = 5
RETRY_SECONDS = 60.0
REQUEST_SECONDS = 120.0
CONNECT_SECONDS = 5.0


STORES: dict[str, tuple[type[S3Store] | type[GCSStore], str]] = {
    "s3": (S3Store, "AWS_ENDPOINT_URL"),
    "gs": (GCSStore, "GOOGLE_BASE_URL"),
}
"""Store of each scheme, and the variable of a server that is not the provider's."""


class ObjectStorage:
    """The objects under ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``.

    A large file is put in parts, and is there with the last of them.
    """

    def __init__(self, uri: str, *, retries: int = RETRIES):
        url = urlsplit(uri)
        self.uri = uri.rstrip("/")
        kind, server = STORES[url.scheme]
        self._store = kind(
            url.netloc,
            prefix=url.path.strip("/") or None,
            client_options={
                "allow_http": os.environ.get(server, "").startswith("http://"),
                "timeout": datetime.timedelta(seconds=REQUEST_SECONDS),
                "connect_timeout": datetime.timedelta(seconds=CONNECT_SECONDS),
            },
            retry_config={"max_retries": retries, "retry_timeout": datetime.timedelta(seconds=RETRY_SECONDS)},
        )

    def put_file(self, name: str, source: Path) -> None:
        source.stat()  # obstore says of a missing file what it says of a missing bucket
        with self._reaching(name):
            obstore.put(self._store, name, source, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self._reaching(name):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # Perhaps by this put: its answer was lost, and it was sent again.
                return self.read(name) == data
        return True

    def read(self, name: str) -> bytes:
        with self._reaching(name):
            return bytes(obstore.get(self._store, name).bytes())

    def fetch(self, name: str, to: Path) -> None:
        with self._reaching(name):
            found = obstore.get(self._store, name)
            with open(to, "xb") as file:
                for part in found.stream(min_chunk_size=PART_BYTES):
                    file.write(part)

    def path(self, name: str) -> Path | None:
        return None

    def list(self, prefix: str) -> list[StoredFile]:
        with self._reaching(prefix):
            return sorted(
                StoredFile(one["path"], one["size"])
                for batch in obstore.list(self._store, prefix.rstrip("/") or None)
                for one in batch
            )

    def delete(self, names: Iterable[str]) -> None:
        doomed = list(names)
        with self._reaching(doomed[0] if doomed else ""):
            for start in range(0, len(doomed), DELETED_AT_ONCE):
                try:
                    obstore.delete(self._store, doomed[start : start + DELETED_AT_ONCE])
                except FileNotFoundError:
                    # Google's says so of each that is not there, and what comes after it may be left.
                    for name in doomed[start : start + DELETED_AT_ONCE]:
                        with contextlib.suppress(FileNotFoundError):
                            obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """Turn what obstore raises into StorageError; an error of this host's own files stays what it is."""
        where = f"{self.uri}/{name}"
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise MissingFileError(f"{where}: {_reason(error)}: see that the bucket exists") from error
        except BaseError as error:
            raise StorageError(
                f"{where}: {_reason(error)}: see that the object store is up, and that the keys in the environment may "
                "use the bucket"
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise StorageError(f"{where}: {_reason(error)}: try again") from error


def _reason(error: BaseException) -> str:
    return str(error).strip().split("\n\nDebug source")[0].replace("\n", " ")[:400]
