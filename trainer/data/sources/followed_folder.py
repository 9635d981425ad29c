"""A folder whose files are read as they appear: finds the next file, and detects late and changed files. Torch-free.

Files are read in the sorted order of their paths below the folder, compared part by part. A file is late if a
file that sorts after it was already being read when it appeared. A file that cannot be opened counts as still being
written, and the reader waits for it. Files are skipped if their name begins with ``.`` or ``_``, or no reader has their
ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath, is_still, listed
from trainer.data.sources.readers.registry import holds_rows, reader_of
from trainer.data.sources.source import Source
from trainer.data.sources.tables.registry import snapshot_of
from trainer.spec import Follow

COLUMNS_FILE = "columns.parquet"
"""Name of a Parquet file without rows in the run's prepared data; it has the columns of the folder's first file."""
UNREADABLE_SECONDS = 60.0
"""Time until a warning about an unreadable file, which until then counts as still being written."""
_NAMED = 5


@dataclass(frozen=True)
class Taken:
    """A file whose reading has begun, with its size and time of change at that moment.

    ``number`` files were read before it. ``name`` is its path below the folder, with ``/`` between the parts.
    """

    number: int
    name: str
    size: int
    changed_ns: int

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split("/"))

    def is_still(self, path: FilePath) -> bool:
        """Return True if the file at ``path`` is unchanged since its reading began; False if it is gone."""
        return is_still(path, self.size, self.changed_ns)


class FollowedFolder:
    """The files of a folder in the order in which one reader reads them. Safe for use by several threads.

    ``note`` is called with each message for the job's owner.
    """

    def __init__(self, uri: str, follow: Follow, note: Callable[[str], None] = lambda message: None):
        self.uri, self.follow, self._note = uri, follow, note
        self._lock = threading.RLock()
        self._taken: dict[int, Taken] = {}
        self._number_of: dict[tuple[str, ...], int] = {}
        self._last: tuple[str, ...] | None = None
        self._there: dict[tuple[str, ...], FilePath] = {}
        self._listed_at = -float("inf")
        self._is_marked = False
        self._late: set[tuple[str, ...]] = set()
        self._told_changed: set[tuple[str, ...]] = set()
        self._told_unreadable: set[tuple[str, ...]] = set()
        self._unreadable: tuple[tuple[str, ...], float, str] | None = None

    # --- what is read ------------------------------------------------------------------------------------------------

    def begin(self, files: Iterable[Taken]) -> None:
        """Continue after the given files, which an earlier run has read, the last of them perhaps in part."""
        with self._lock:
            for file in sorted(files, key=lambda one: one.number):
                self._keep(file)

    def pieces_until(self, number: int) -> list[Taken]:
        """Return the files whose reading has begun, up to number ``number``, in order.

        Files numbered below ``number - 1`` that are gone from the folder are left out and forgotten, because no
        checkpoint resumes from them any more.
        """
        with self._lock:
            for one, old in list(self._taken.items()):
                if one < number - 1 and old.parts not in self._number_of:
                    del self._taken[one]
            known = [file for file in self._taken.values() if file.number <= number]
            return sorted(known, key=lambda one: one.number)

    def next(self, number: int) -> Taken | None:
        """Return the file of this number (the first is 0); None while it cannot be read yet.

        Raises:
            EndOfFolder: the last file was read, and the marker file ``follow.until`` says that no more will come.
            DataError: a late file is refused, or the folder cannot be listed.
        """
        with self._lock:
            if number in self._taken:
                return self._taken[number]
            was_marked = self._is_marked
            self._list()
            if self._is_marked and not was_marked:
                # List again: the listing may have missed a file that appeared just before the marker.
                was_marked = True
                self._list()
            waiting = self._waiting()
            if not waiting:
                if was_marked:
                    raise EndOfFolder
                return None
            parts = waiting[0]
            stat = _stat(self._there[parts]) if self._is_whole(parts, was_marked) else None
            if stat is None or not (was_marked or time.time() - stat.st_mtime_ns / 1e9 >= self.follow.settle_seconds):
                return None
            taken = Taken(number, "/".join(parts), stat.st_size, stat.st_mtime_ns)
            self._keep(taken)
            return taken

    def figures(self, number: int) -> dict[str, float | int]:
        """Return the lag of a reader that is reading the file of this number, for the job's events.

        ``files_behind`` counts the files whose reading has not begun, ``seconds_behind`` is the time since the change
        of the one changed longest ago, and ``late_files`` counts those so far that came too late to be read.
        """
        with self._lock:
            if time.monotonic() - self._listed_at > self.follow.poll_seconds:
                self._list()
            ahead = [file.parts for file in self._taken.values() if file.number > number]
            behind = [*self._waiting(), *(parts for parts in ahead if parts in self._there)]
            changed = [stat.st_mtime_ns for parts in behind if (stat := _stat(self._there[parts])) is not None]
            seconds = max(0.0, time.time() - min(changed) / 1e9) if changed else 0.0
            return {
                "files": number, "files_behind": len(behind), "seconds_behind": round(seconds, 1),
                "late_files": len(self._late),
            }  # fmt: skip

    def _keep(self, file: Taken) -> None:
        self._taken[file.number], self._number_of[file.parts], self._last = file, file.number, file.parts

    def _waiting(self) -> list[tuple[str, ...]]:
        return sorted(parts for parts in self._there if self._last is None or parts > self._last)

    # --- what is there -----------------------------------------------------------------------------------------------

    def _list(self) -> None:
        """List the folder, and report files that are late, gone or changed."""
        single, listing = listed(self.uri, may_be_empty=True)
        if single:
            remedy = "name its folder in the dataset's uri, or leave dataset.follow out"
            raise DataError("is a file, and files are followed in a folder", where=self.uri, remedy=remedy)
        if (table := snapshot_of(self.uri, dict(listing))) is not None:
            raise DataError(
                f"is a table with versions ({table.version}), whose files have no order of their own",
                where=self.uri,
                remedy="follow a folder of files, or leave follow out",
            )
        self._there = {parts: path for parts, path in listing if holds_rows(parts)}
        self._is_marked = self.follow.until is not None and any(parts == (self.follow.until,) for parts, _ in listing)
        self._listed_at = time.monotonic()
        self._tell_late()
        self._tell_changed()

    def _tell_late(self) -> None:
        if self._last is None:
            return
        late = [p for p in self._there if p <= self._last and p not in self._number_of and p not in self._late]
        if not late:
            return
        last = "/".join(self._last)
        if self.follow.late == "refuse":
            raise DataError(
                f"appeared after the reading of {last}, which sorts after it, had begun",
                where=_words(late),
                remedy="give it a name that sorts after the files that are there, or set dataset.follow.late to report",
            )
        self._late.update(late)
        self._note(f"not read, because it sorts before {last} and appeared after the reading of that: {_words(late)}")

    def _tell_changed(self) -> None:
        gone = [parts for parts in self._number_of if parts not in self._there]
        changed = []
        for parts, number in self._number_of.items():
            is_known = parts in self._there and parts not in self._told_changed
            if is_known and not self._taken[number].is_still(self._there[parts]):
                changed.append(parts)
        if gone:
            self._note(f"removed while or after it was read: {_words(gone)}")
            for parts in gone:
                del self._number_of[parts]
        if changed:
            self._told_changed.update(changed)
            self._note(f"changed after its reading began, and is not read again: {_words(changed)}")

    def _is_whole(self, parts: tuple[str, ...], is_marked: bool) -> bool:
        """Return True if a file exists, is not empty and can be opened."""
        path = self._there[parts]
        try:
            size = path.stat().st_size
            problem = "" if size else "it is empty"
            if size:
                reader = reader_of(path.name)
                assert reader is not None
                reader([path]).schema(path)
        except FileNotFoundError:
            return False
        except DataError as error:
            problem = str(error)
            if is_marked:
                raise
        if not problem:
            self._unreadable = None
            return True
        if is_marked:
            raise DataError("is empty (0 bytes)", where=str(path), remedy="write it again, or remove it")
        self._tell_unreadable(parts, problem)
        return False

    def _tell_unreadable(self, parts: tuple[str, ...], problem: str) -> None:
        """Warn once about a file that could not be opened for a while; the files after it are not read before it."""
        if self._unreadable is None or self._unreadable[0] != parts:
            self._unreadable = (parts, time.monotonic(), problem)
        elif time.monotonic() - self._unreadable[1] > UNREADABLE_SECONDS and parts not in self._told_unreadable:
            self._told_unreadable.add(parts)
            self._note(
                f"{'/'.join(parts)} cannot be opened, and the files after it wait: {problem}; finish writing it, or "
                "remove it"
            )


class EndOfFolder(Exception):
    """Signal that the folder has its end marker, and that all files were read."""


def first_file(uri: str, follow: Follow) -> tuple[str, ...] | None:
    """Return the parts of the path, below the folder, of its first file; None while that cannot be opened."""
    try:
        taken = FollowedFolder(uri, follow).next(0)
    except EndOfFolder:
        raise DataError("has the end marker but no file", where=uri, remedy="put the data there") from None
    return None if taken is None else taken.parts


def _stat(path: FilePath) -> Any:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _words(names: Sequence[tuple[str, ...]]) -> str:
    shown = ", ".join(sorted("/".join(parts) for parts in names)[:_NAMED])
    return shown + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def write_columns(source: Source, path: Path) -> None:
    """Write a Parquet file without rows that has the columns of the source's first file, in case that file goes."""
    pq.write_table(source.schema().empty_table(), path)
