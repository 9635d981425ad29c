"""Cache on disk of the columns that a preparation has read, to resume from if it is killed. Torch-free.

Files are appended to; a manifest, written last, records how many values of each file are saved, and their checksum.
Values beyond these were written after the manifest, and are cut off. If a saved value has changed (a torn write, a
flipped bit), nothing of the cache is used: the rows are read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from embeddings.durable_files import fsync_path, write_file, write_json
from trainer.data.prepare.arrays import Appender, JaggedAppender
from trainer.data.prepare.workers import Workers

MANIFEST = "parts.json"
VERSION = 5
CODED = ".coded"
"""Suffix of the file that replaces a column's codes once they number the ids of the whole table."""
_SUM = ".crc32"
"""Further suffix of the file with its checksum."""
_BLOCK_BYTES = 1 << 20


class PartCache:
    """The files of one preparation in ``folder``, and the state in which they were last saved.

    Files of another fingerprint (of the rows and the columns that are read), or that differ from their manifest, are
    removed.
    """

    def __init__(self, folder: Path, fingerprint: str):
        self.folder = folder
        self.state: dict[str, Any] | None = None
        """State of the last :meth:`save`, by this process or by an earlier process."""
        self._fingerprint = fingerprint
        self._appenders: list[Appender] = []
        self._lengths: dict[str, int] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        """Number of saved bytes and their checksum, by file."""
        folder.mkdir(parents=True, exist_ok=True)
        self._load()
        if self.state is None:
            for path in folder.iterdir():
                path.unlink()

    def appender(self, name: str, dtype: npt.DTypeLike) -> Appender:
        """Return the file ``name``, at its end."""
        appender = Appender(self.folder / name, dtype, self._length(name))
        self._appenders.append(appender)
        return appender

    def jagged(self, name: str, dtype: npt.DTypeLike) -> JaggedAppender:
        """Return the files of lists ``name``, at their end."""
        lengths = self._length(f"{name}.values.bin"), self._length(f"{name}.offsets.bin")
        lists = JaggedAppender(self.folder / name, dtype, lengths)
        self._appenders += [lists.values, lists.offsets]
        return lists

    def save(self, state: dict[str, Any], workers: Workers, whole: Iterable[Path] = ()) -> None:
        """Save the appended values; once this returns they survive a loss of power.

        ``workers`` sync the files to disk and read the appended values again for their checksums. ``whole``: other
        files of the folder, which are complete and on disk.
        """

        def settle(appender: Appender) -> None:
            appender.sync()
            self._add_to_sum(appender.path, appender.length * appender.dtype.itemsize)

        workers.map(settle, self._appenders)
        for path in whole:
            self._add_to_sum(path, path.stat().st_size)
        fsync_path(self.folder)
        files = {one.path.name: [one.length, one.dtype.itemsize] for one in self._appenders}
        document = {"version": VERSION, "fingerprint": self._fingerprint, "files": files, "state": state}
        document |= {"checksums": {name: list(one) for name, one in self._sums.items()}}
        write_json(self.folder / MANIFEST, document | {"checksum": _sum_of_json(document)})
        self.state = state

    def close(self) -> None:
        for appender in self._appenders:
            appender.close()

    def _length(self, name: str) -> int:
        return 0 if (self.folder / f"{name}{CODED}").exists() else self._lengths.get(name, 0)

    def _load(self) -> None:
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text("utf-8"))
        except (OSError, ValueError):
            return
        if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
            return
        checksum = manifest.pop("checksum", None)
        if manifest.get("fingerprint") != self._fingerprint or checksum != _sum_of_json(manifest):
            return
        sums = {name: (num_bytes, value) for name, (num_bytes, value) in manifest["checksums"].items()}
        is_coded = {name: (self.folder / f"{name}{CODED}").exists() for name in sums}
        for name, (num_bytes, value) in sums.items():
            path = self.folder / name
            if is_coded[name]:
                if not _is_as_summed(Path(f"{path}{CODED}")):
                    return
            elif not path.exists() or path.stat().st_size < num_bytes or _checksum(path, 0, num_bytes) != value:
                return
        self._sums = {name: one for name, one in sums.items() if not is_coded[name]}
        self._lengths = {name: length for name, (length, _) in manifest["files"].items() if not is_coded[name]}
        self.state = manifest["state"]

    def _add_to_sum(self, path: Path, num_bytes: int) -> None:
        """Update the checksum of a file that now has ``num_bytes`` on disk."""
        done, value = self._sums.get(path.name, (0, 0))
        self._sums[path.name] = num_bytes, _checksum(path, done, num_bytes, value)


def write_checksum(path: Path, place: Path) -> None:
    """Write, durably, the checksum of a file that is at ``place`` now and will be at ``path``."""
    write_file(Path(f"{path}{_SUM}"), f"{_checksum(place, 0, place.stat().st_size):08x}".encode())


def _is_as_summed(path: Path) -> bool:
    """Return True if a file still has the checksum that :func:`write_checksum` wrote."""
    try:
        told = Path(f"{path}{_SUM}").read_bytes()
    except OSError:
        return False
    return told == f"{_checksum(path, 0, path.stat().st_size):08x}".encode()


def _checksum(path: Path, start: int, stop: int, value: int = 0) -> int:
    """Return the CRC-32 of a file's first ``stop`` bytes; ``value`` is the CRC-32 of the first ``start`` bytes."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (block := file.read(min(_BLOCK_BYTES, stop - start))):
            value = zlib.crc32(block, value)
            start += len(block)
    return value


def _sum_of_json(document: dict[str, Any]) -> int:
    # Through JSON first, as :meth:`PartCache._load` reads it: tuples become lists, and keys become text.
    return zlib.crc32(json.dumps(json.loads(json.dumps(document)), sort_keys=True).encode())


@contextlib.contextmanager
def part_cache(directory: Path, fingerprint: str, private: Path) -> Iterator[PartCache]:
    """Yield the cache of a preparation of ``directory``, in a folder beside it.

    The cache is removed when the body ends. If the body fails, saved files stay for the next attempt: an unavailable
    storage may come back, and corrected rows have another fingerprint.

    ``private``: folder to use instead if another process holds the one beside ``directory``.
    """
    folder = directory.with_name(f".{directory.name}.parts")
    lock = _lock(folder)
    parts = PartCache(private if lock is None else folder, fingerprint)
    done = False
    try:
        yield parts
        done = True
    finally:
        parts.close()
        if done or parts.state is None or lock is None:
            shutil.rmtree(parts.folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return the descriptor that locks a folder, None if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have removed the folder since.
        if os.fstat(descriptor).st_ino == folder.stat().st_ino:
            return descriptor
    os.close(descriptor)
    return None
