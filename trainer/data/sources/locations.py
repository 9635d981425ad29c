"""Locations of files of rows: on this machine, or in object storage, ``s3://BUCKET/KEY``. Torch-free.

Credentials come from where AWS' own tools look for them; ``AWS_ENDPOINT_URL_S3``, or ``AWS_ENDPOINT_URL``, names a
server that is not Amazon's. A uri carries neither.
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
    """Size and time of an object, under the names that os.stat gives them."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class ObjectPath:
    """A file in object storage, with the part of :class:`pathlib.Path` that readers of rows use.

    ``key`` is BUCKET/KEY.
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
        """Return the object's state when it was listed."""
        return self.status


FilePath = Path | ObjectPath


def local_path(uri: str) -> Path:
    """Return the path of a ``file://`` uri or of a plain path (relative: from the working directory)."""
    return Path(uri.removeprefix("file://"))


def beside(uri: str, dataset_uri: str) -> str:
    """Return the uri of a join or graph: one without a directory lies beside the dataset's."""
    if "/" in uri:
        return uri
    if is_object(dataset_uri):
        return f"{dataset_uri.rstrip('/').rpartition('/')[0]}/{uri}"
    return str(local_path(dataset_uri).parent / uri)


def opened(path: FilePath) -> Any:
    """Open a path for Arrow's readers: a local path is returned, an object becomes a file that reads ranges."""
    if isinstance(path, Path):
        return path
    with reaching(str(path)):
        return FILE_SYSTEMS[path.scheme]().open_input_file(path.key)


def read_edges(path: FilePath, num_bytes: int) -> bytes:
    """Return the first and the last bytes of a file, up to ``num_bytes`` each."""
    size = path.stat().st_size
    stream = open(path, "rb") if isinstance(path, Path) else opened(path)  # noqa: SIM115 - closed below
    with stream:
        head: bytes = stream.read(num_bytes)
        stream.seek(max(0, size - num_bytes))
        return head + bytes(stream.read(num_bytes))


def listed(uri: str, may_be_empty: bool = False) -> tuple[bool, list[tuple[tuple[str, ...], FilePath]]]:
    """Return (whether the uri is a file itself, every file with the parts of its path below the uri), in any order.

    ``may_be_empty``: a prefix without objects in a bucket is an empty folder, as there may be one on this machine.

    Raises:
        DataError: there is nothing, the storage does not answer, or the uri is of a topic.
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
    """Return the file at these parts of a path below ``uri``, as it is now.

    Raises:
        FileNotFoundError: it is not there, or not seen from here yet.
        DataError: the storage does not answer.
    """
    if not is_object(uri):
        return as_it_is(local_path(uri).joinpath(*parts))
    scheme, key = split(uri)
    return as_it_is(ObjectPath(scheme, "/".join([key.strip("/"), *parts]), Stat(0, 0)))


def as_it_is(path: FilePath) -> FilePath:
    """Return a file as it is now; an object was as it is when it was listed.

    Raises:
        FileNotFoundError: it is not there, or not seen from here yet.
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
    """Return True if a file has the size and the time of change that it had; not, if it is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    # Of one object a server tells whole seconds, in a list of objects it may tell more.
    unit = 1 if isinstance(path, Path) else 10**9
    return (stat.st_size, stat.st_mtime_ns // unit) == (size, changed_ns // unit)


def anything_at(uri: str) -> bool:
    """Return True if an object storage has something at or below a URI of OBJECTS.

    Raises:
        DataError: the storage does not answer, or refuses.
    """
    scheme, key = split(uri)
    with reaching(uri):
        return bool(FILE_SYSTEMS[scheme]().get_file_info(key.strip("/")).type != pafs.FileType.NotFound)


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turn what Arrow raises about a server that refuses into DataError, about one that is away into DataAwayError."""
    try:
        yield
    except FileNotFoundError:
        raise _nothing(where) from None
    except (OSError, pa.ArrowException) as error:
        away = isinstance(error, OSError) and "ACCESS_DENIED" not in str(error)
        raise (DataAwayError if away else DataError)(
            f"the object storage did not give it: {str(error).splitlines()[0]}",
            where=where,
            remedy="see that the bucket is there and that the credentials in the environment may read it; a server "
            "that is not Amazon's is named by AWS_ENDPOINT_URL",
        ) from error


def _files_below(root: Path) -> Iterator[Path]:
    def passed_over(error: OSError) -> None:
        # Folders may be taken away meanwhile.
        if not isinstance(error, FileNotFoundError | PermissionError):
            raise error

    for folder, _, names in os.walk(root, onerror=passed_over):
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _has_bucket(objects: pafs.FileSystem, key: str) -> bool:
    try:
        return bool(objects.get_file_info(key.partition("/")[0]).type != pafs.FileType.NotFound)
    except OSError as error:
        # Who may list a prefix alone may not look at its bucket.
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
"""By scheme, how each object storage is reached."""
