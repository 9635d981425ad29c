"""Destinations of results: a local path, or a URI in a run storage.

Files keep their plain names there, so any program can read them. If a folder has a file that is written last, the
folder is complete once that file exists.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.storage.base import RunStorage, StorageError
from trainer.storage.storage_registry import open_storage


def is_stored(destination: Path | str) -> bool:
    return "://" in str(destination)


@contextlib.contextmanager
def written(destination: Path | str, last: str | None = None) -> Iterator[Path]:
    """Yield the local path at which to write a file or a folder; for a URI, the result is uploaded afterwards.

    ``last``: name of the file that is uploaded last, if the result is a folder that has such a file.

    Raises:
        FileExistsError: a file or a complete folder exists at the URI already.
        StorageError: the storage cannot be reached, or another process has put the file ``last`` meanwhile.
        ValueError: the URI names no place in a run storage.
    """
    if not is_stored(destination):
        yield Path(destination)
        return
    storage, name = _parted(str(destination))
    if any(one.name == name or one.name.startswith(f"{name}/") for one in storage.list("")) and not _torn(
        storage, name, last
    ):
        raise FileExistsError(f"{destination} is there already: remove it, or name another place")
    with tempfile.TemporaryDirectory(prefix="evenkeel-") as folder:
        path = Path(folder) / name
        yield path
        put(storage, name, path, last)


def put(storage: RunStorage, name: str, path: Path, last: str | None = None) -> None:
    """Upload the local file ``path``, or every file of the folder ``path``, to ``name`` in the storage.

    ``last``: name of the file that is uploaded last, and only if the storage has none of this name; None: no file is
    last.

    Raises:
        StorageError: the storage cannot be reached, or another process has put the file ``last`` meanwhile.
    """
    if path.is_file():
        storage.put_file(name, path)
        return
    files = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())
    for file in files:
        if file != last:
            storage.put_file(f"{name}/{file}", path / file)
    if last is not None and not storage.put_if_absent(f"{name}/{last}", (path / last).read_bytes()):
        raise StorageError(f"{storage.uri}/{name}: another process has put it: remove it, or name another place")


def fetch(destination: str, to: Path) -> None:
    """Download the files at a URI into the folder ``to``, which stays empty if there are none.

    Raises:
        StorageError: the storage cannot be reached.
        ValueError: the URI names no place in a run storage.
    """
    storage, name = _parted(destination)
    to.mkdir(parents=True, exist_ok=True)
    for one in storage.list(f"{name}/"):
        path = to / one.name.removeprefix(f"{name}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.fetch(one.name, path)


def _parted(destination: str) -> tuple[RunStorage, str]:
    parent, _, name = destination.rstrip("/").rpartition("/")
    if not name or parent.endswith("/"):
        raise ValueError(f"'{destination}' names no file or folder in a storage: write s3://BUCKET/NAME, for example")
    return open_storage(parent), name


def _torn(storage: RunStorage, name: str, last: str | None) -> bool:
    """Return True if the folder ``name`` is incomplete, because it lacks the file that is put last."""
    return last is not None and all(one.name != f"{name}/{last}" for one in storage.list(f"{name}/"))
