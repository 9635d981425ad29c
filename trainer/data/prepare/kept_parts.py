"""What a preparation has read so far, on disk, for the one that goes on after it was killed. Torch-free.

Files are appended to; a manifest, written last, says how many values of each are good. What follows them was written
after it, and goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from embeddings.durable_files import fsync_path, write_json
from trainer.data.prepare.arrays import Appender, JaggedAppender
from trainer.data.prepare.workers import Workers

MANIFEST = "parts.json"
VERSION = 1
CODED = ".coded"
"""Ending of the file that takes the place of a column's codes once they are those of the table's ids."""


class KeptParts:
    """The files of one preparation in ``folder``, and the state in which they were last saved.

    Args:
        folder: what is there of another fingerprint, or not as its manifest says, is removed.
        fingerprint: of the rows and of what is read of them.
    """

    def __init__(self, folder: Path, fingerprint: str):
        self.folder = folder
        self.state: dict[str, Any] | None = None
        """What was handed to :meth:`save` last, by this process or by one before it."""
        self._fingerprint = fingerprint
        self._appenders: list[Appender] = []
        self._lengths: dict[str, int] = {}
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

    def save(self, state: dict[str, Any], workers: Workers) -> None:
        """Keep what was appended, with ``state`` (JSON); when this returns it survives the loss of power."""
        workers.map(lambda appender: appender.sync(), self._appenders)
        fsync_path(self.folder)
        files = {one.path.name: [one.length, one.dtype.itemsize] for one in self._appenders}
        write_json(
            self.folder / MANIFEST,
            {"version": VERSION, "fingerprint": self._fingerprint, "files": files, "state": state},
        )
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
        if (manifest.get("version"), manifest.get("fingerprint")) != (VERSION, self._fingerprint):
            return
        lengths = {}
        for name, (length, item_bytes) in manifest["files"].items():
            path = self.folder / name
            if (self.folder / f"{name}{CODED}").exists():
                continue
            if not path.exists() or path.stat().st_size < length * item_bytes:
                return
            lengths[name] = length
        self._lengths = lengths
        self.state = manifest["state"]


@contextlib.contextmanager
def kept_parts(directory: Path, fingerprint: str, private: Path) -> Iterator[KeptParts]:
    """Yield the parts of a preparation of ``directory``, which lie in a folder beside it.

    They go when the body is done. Where it fails they stay, if any were saved: what was away may come back, and what is
    corrected has another fingerprint.

    Args:
        directory: what is prepared.
        fingerprint: of :class:`KeptParts`.
        private: the folder to take where another process has that beside ``directory``.
    """
    folder = directory.with_name(f".{directory.name}.parts")
    lock = _lock(folder)
    parts = KeptParts(private if lock is None else folder, fingerprint)
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
    """Return the descriptor that locks a folder, None where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have removed the folder since.
        if os.fstat(descriptor).st_ino == folder.stat().st_ino:
            return descriptor
    os.close(descriptor)
    return None
