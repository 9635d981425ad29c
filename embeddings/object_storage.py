"""Objects under a URI: in S3, in compatible servers that support ``If-Match``, and in Google Cloud Storage.

Keys come from the environment or the machine's role, as obstore finds them: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS (files), GOOGLE_BEARER_TOKEN,
GOOGLE_BASE_URL. Profiles in ``~/.aws`` are read by boto3, where it is installed and the environment has no key.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

PART_BYTES = 8 << 20
"""Bytes of a large file in one request. Each rank of a host holds up to PARTS_AT_ONCE such parts in memory."""
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
"""Store class of each URI scheme, and the environment variable with the address of another server."""

Version = Mapping[str, Any]
"""Version of an object that a conditional put replaces: ``e_tag`` and ``version``."""


class StorageError(RuntimeError):
    """A request to the storage failed; objects under other names are unchanged."""


class NotWholeError(StorageError):
    """An object in the storage is missing, truncated, or different from the object that was stored."""


class MissingFileError(NotWholeError):
    """The storage holds no file of this name."""


class StoredFile(NamedTuple):
    """A file in a storage: its name below the storage's URI, and its size in bytes."""

    name: str
    num_bytes: int


class ObjectStorage:
    """The objects under ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``.

    A large file is uploaded in parts, and appears with the last part.
    """

    def __init__(self, uri: str, *, retries: int = RETRIES, request_seconds: float = REQUEST_SECONDS, **options: Any):
        """Open the objects at ``uri``; ``options`` are those of obstore's store, such as ``endpoint``, ``region``."""
        url = urlsplit(uri)
        self.uri = uri.rstrip("/")
        kind, server = STORES[url.scheme]
        if kind is S3Store and not options.get("skip_signature"):
            options |= _profile()
        self._store: Any = kind(
            url.netloc,
            prefix=url.path.strip("/") or None,
            client_options={
                "allow_http": str(options.get("endpoint", os.environ.get(server, ""))).startswith("http://"),
                "timeout": datetime.timedelta(seconds=request_seconds),
                "connect_timeout": datetime.timedelta(seconds=CONNECT_SECONDS),
            },
            retry_config={"max_retries": retries, "retry_timeout": datetime.timedelta(seconds=RETRY_SECONDS)},
            **options,
        )

    def put_file(self, name: str, source: Path) -> None:
        source.stat()  # raises FileNotFoundError; obstore reports a missing file like a missing bucket
        with self._reaching(name):
            obstore.put(self._store, name, source, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self._reaching(name):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # Perhaps this put made it: its response was lost, and the request was sent again.
                return self.read(name) == data
        return True

    def put_if_unchanged(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Put ``data`` at ``name`` if the object there has this version (None: if there is no object).

        Returns:
            The new version; None if the object has another version than ``version``.
        """
        mode: Any = "create" if version is None else {key: value for key, value in version.items() if value is not None}
        with self._reaching(name):
            try:
                return dict(obstore.put(self._store, name, data, mode=mode, use_multipart=False))
            except (AlreadyExistsError, PreconditionError):
                # Perhaps this put changed it: its response was lost, and the request was sent again.
                now = self.read_version(name)
                return now[1] if now is not None and now[0] == data else None

    def read_version(self, name: str) -> tuple[bytes, Version] | None:
        """Read a small object and its version; return None if there is no such object."""
        try:
            with self._reaching(name):
                found = obstore.get(self._store, name)
                return bytes(found.bytes()), {name: found.meta.get(name) for name in ("e_tag", "version")}
        except MissingFileError:
            return None

    def read(self, name: str) -> bytes:
        with self._reaching(name):
            return bytes(obstore.get(self._store, name).bytes())

    def folders(self, prefix: str) -> list[str]:
        """List the folders directly below ``prefix``, which is empty or ends with ``/``."""
        with self._reaching(prefix):
            found = obstore.list_with_delimiter(self._store, prefix.rstrip("/") or None)["common_prefixes"]
            return sorted(one.rstrip("/").rpartition("/")[2] for one in found)

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
                    # Google Cloud Storage raises this for an absent object, and may not delete those after it.
                    for name in doomed[start : start + DELETED_AT_ONCE]:
                        with contextlib.suppress(FileNotFoundError):
                            obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """Turn errors of obstore into StorageError; errors of the local file system pass unchanged."""
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


def _profile() -> dict[str, Any]:
    """Return obstore's options for the credentials of a profile in ``~/.aws``; empty if none is needed.

    No profile is needed if the environment has a key, or if no profile is named and no file has profiles.
    """
    files = [
        Path(os.environ.get(variable, f"~/.aws/{name}")).expanduser()
        for variable, name in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))
    ]
    if "AWS_ACCESS_KEY_ID" in os.environ or not ("AWS_PROFILE" in os.environ or any(one.exists() for one in files)):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise StorageError(
            "keys for S3 are in ~/.aws, and boto3, which reads it, is not installed: pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as error:
        raise StorageError(f"keys for S3: {error}: set AWS_PROFILE, or AWS_ACCESS_KEY_ID") from error


def _reason(error: BaseException) -> str:
    return str(error).strip().split("\n\nDebug source")[0].replace("\n", " ")[:400]
