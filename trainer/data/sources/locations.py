"""Locations of files of rows: on this machine, or in object storage, ``s3://BUCKET/KEY``. Torch-free.

Credentials are found as AWS' own tools find them. The environment variable ``AWS_ENDPOINT_URL_S3``, or else
``AWS_ENDPOINT_URL``, names a server that is not Amazon's. A uri contains neither credentials nor a server.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from trainer.data.errors import DataAwayError, DataError
from trainer.spec.uri_schemes import is_object, is_topic, split

_CONNECT_SECONDS, _REQUEST_SECONDS, _ATTEMPTS = 5.0, 30.0, 3


class Stat(NamedTuple):
    """Size and time of the last change of an object, under the names that ``os.stat`` uses."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class ObjectPath:
    """A file in object storage, with those methods of :class:`pathlib.Path` that readers of rows use.

    ``key`` is the text BUCKET/KEY.
    """

    scheme: str
    key: str
    status: Stat

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> str:
        return str(self).rpartition("/")[0]

    def stat(self) -> Stat:
        """Return the size and time of change that the object had when it was listed."""
        return self.status


FilePath = Path | ObjectPath


def local_path(uri: str) -> Path:
    """Return the path of a ``file://`` uri or of a plain path (relative: from the working directory)."""
    return Path(uri.removeprefix("file://"))


def beside(uri: str, dataset_uri: str) -> str:
    """Return the uri of the file of a join or graph; a name without a slash is a file in the dataset's folder."""
    if "/" in uri:
        return uri
    if is_object(dataset_uri):
        return f"{dataset_uri.rstrip('/').rpartition('/')[0]}/{uri}"
    return str(local_path(dataset_uri).parent / uri)


def opened(path: FilePath) -> Any:
    """Return a source for Arrow's readers: a local path unchanged, or an opened object that can be read by ranges."""
    if isinstance(path, Path):
        return path
    with reaching(str(path)):
        return FILE_SYSTEMS[path.scheme]().open_input_file(path.key)


def read_edges(path: FilePath, num_bytes: int) -> bytes:
    """Return the first ``num_bytes`` bytes of a file followed by its last ``num_bytes``, which may overlap."""
    size = path.stat().st_size
    stream = open(path, "rb") if isinstance(path, Path) else opened(path)  # noqa: SIM115 - closed below
    with stream:
        head: bytes = stream.read(num_bytes)
        stream.seek(max(0, size - num_bytes))
        return head + bytes(stream.read(num_bytes))


def listed(uri: str, may_be_empty: bool = False) -> tuple[bool, list[tuple[tuple[str, ...], FilePath]]]:
    """List the files at or below a uri, in any order.

    ``may_be_empty``: True if a prefix without objects, in a bucket that exists, counts as an empty folder.

    Returns:
        True if the uri is a single file; and (parts of the path below the uri, path) of every file.

    Raises:
        DataError: nothing exists at the uri, the storage does not answer, or the uri names a topic.
    """
    if is_topic(uri):
        remedy = "train with dataset.one_pass and dataset.follow; for anything else write its rows to files"
        raise DataError("is a topic, whose rows are read by jobs that follow it", where=uri, remedy=remedy)
    if not is_object(uri):
        root = local_path(uri)
        if not root.exists():
            raise _nothing(str(root))
        if root.is_file():
            return True, [((root.name,), root)]
        return False, [(path.relative_to(root).parts, path) for path in _files_below(root)]
    scheme, key = split(uri)
    key = key.strip("/")
    with reaching(uri):
        objects = FILE_SYSTEMS[scheme]()
        info = objects.get_file_info(key)
        if info.type == pafs.FileType.File:
            return True, [((info.base_name,), _object(scheme, info))]
        below = objects.get_file_info(pafs.FileSelector(key, recursive=True, allow_not_found=True))
        files = [one for one in below if one.type == pafs.FileType.File]
        if not files and not (may_be_empty and _has_bucket(objects, key)):
            raise _nothing(uri)
    return False, [(tuple(one.path[len(key) + 1 :].split("/")), _object(scheme, one)) for one in files]


def located(uri: str, parts: tuple[str, ...]) -> FilePath:
    """Return the file at a path below ``uri``, given by its parts, with its present size and time of change.

    Raises:
        FileNotFoundError: the file does not exist, or this machine does not see it yet.
        DataError: the storage does not answer.
    """
    if not is_object(uri):
        return as_it_is(local_path(uri).joinpath(*parts))
    scheme, key = split(uri)
    return as_it_is(ObjectPath(scheme, "/".join([key.strip("/"), *parts]), Stat(0, 0)))


def as_it_is(path: FilePath) -> FilePath:
    """Return a file with its present size and time of change; those in ``path`` date from when it was listed.

    Raises:
        FileNotFoundError: the file does not exist, or this machine does not see it yet.
        DataError: the storage does not answer.
    """
    if isinstance(path, Path):
        path.stat()
        return path
    with reaching(str(path)):
        info = FILE_SYSTEMS[path.scheme]().get_file_info(path.key)
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(str(path))
    return _object(path.scheme, info)


def is_still(path: FilePath, size: int, changed_ns: int) -> bool:
    """Return True if a file exists and has this size and this time of change."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    # A server reports whole seconds for a single object, but may report fractions in a list of objects.
    unit = 1 if isinstance(path, Path) else 10**9
    return (stat.st_size, stat.st_mtime_ns // unit) == (size, changed_ns // unit)


def anything_at(uri: str) -> bool:
    """Return True if an object storage has something at or below a uri such as ``s3://BUCKET/KEY``.

    Raises:
        DataError: the storage does not answer, or refuses.
    """
    scheme, key = split(uri)
    with reaching(uri):
        return bool(FILE_SYSTEMS[scheme]().get_file_info(key.strip("/")).type != pafs.FileType.NotFound)


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turn Arrow's errors into DataError if the server refuses, and into DataAwayError if it does not answer."""
    try:
        yield
    except FileNotFoundError:
        raise _nothing(where) from None
    except (OSError, pa.ArrowException) as error:
        away = isinstance(error, OSError) and "ACCESS_DENIED" not in str(error)
        raise (DataAwayError if away else DataError)(
            f"the object storage did not return it: {str(error).splitlines()[0]}",
            where=where,
            remedy="check that the bucket exists and that the credentials in the environment may read it; "
            "AWS_ENDPOINT_URL names a server other than Amazon's",
        ) from error


def _files_below(root: Path) -> Iterator[Path]:
    def passed_over(error: OSError) -> None:
        # A folder may be removed in the meantime.
        if not isinstance(error, FileNotFoundError | PermissionError):
            raise error

    for folder, _, names in os.walk(root, onerror=passed_over):
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _has_bucket(objects: pafs.FileSystem, key: str) -> bool:
    try:
        return bool(objects.get_file_info(key.partition("/")[0]).type != pafs.FileType.NotFound)
    except OSError as error:
        # Credentials that may only list a prefix may not query its bucket.
        if "ACCESS_DENIED" in str(error):
            return True
        raise


def _object(scheme: str, info: pafs.FileInfo) -> ObjectPath:
    return ObjectPath(scheme, info.path, Stat(info.size, info.mtime_ns or 0))


def _nothing(where: str) -> DataError:
    return DataError("there is no such file or directory", where=where, remedy="correct uri, or put the data there")


def _s3() -> pafs.FileSystem:
    return _connected(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")


@lru_cache(maxsize=4)
def _connected(endpoint: str) -> pafs.FileSystem:
    options: dict[str, Any] = {}
    if endpoint:
        scheme, separator, host = endpoint.rpartition("://")
        options = {"endpoint_override": host.rstrip("/"), **({"scheme": scheme} if separator else {})}
    return pafs.S3FileSystem(
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        **options,
    )


FILE_SYSTEMS: dict[str, Callable[[], pafs.FileSystem]] = {"s3": _s3}
"""Scheme of a uri -> function that returns the file system of the object storage."""
