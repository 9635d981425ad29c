"""Rows of the files of a followed folder. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from trainer.data.errors import DataError
from trainer.data.one_pass.following import pause
from trainer.data.one_pass.position import Place
from trainer.data.one_pass.windows import CHANGED_REMEDY
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.followed_folder import Taken
from trainer.data.sources.locations import FilePath, as_it_is, located
from trainer.data.sources.source import Chunk, Source, file_below

UNSEEN_SECONDS = 120.0
"""Longest time that a host waits to see a file that rank 0 has found, as in a network file system."""


class FolderRows:
    """Reader of the rows of files that were found in a folder.

    ``unseen_seconds``: longest time to wait until this host sees a file that rank 0 has found.
    """

    def __init__(self, plan: DataPlan, unseen_seconds: float):
        self._dataset, self._columns, self._unseen_seconds = plan.dataset, plan.columns(), unseen_seconds

    def count(self, place: Place, num_rows: int, num_bad: int) -> Place:
        """Return the place after ``num_rows`` more rows; there are no bad rows, because any bad row is an error."""
        return replace(place, rows=place.rows + num_rows)

    def close(self) -> None:
        """Do nothing: no file is held open between chunks."""

    def chunks(self, taken: Taken, place: Place, stopped: threading.Event) -> Iterator[Chunk]:
        """Yield the rows of a file from ``place`` on.

        Raises:
            DataError: the file cannot be read, or was changed after its reading began.
        """
        only = [file_below(taken.parts, self._seen(taken, stopped))]
        source = Source(self._dataset.uri, None, self._dataset.filter, only=only, ids=self._dataset.id_columns)
        for chunk in source.stream(self._columns, start=(0, place.row)):
            if not _is_still(taken, chunk.file.path):
                raise DataError("has changed since its reading began", where=self._where(taken), remedy=CHANGED_REMEDY)
            yield chunk

    def _seen(self, taken: Taken, stopped: threading.Event) -> FilePath:
        """Return the path of a file that rank 0 has found, once this host sees it with the same size and time."""
        path: FilePath | None = None
        give_up = time.monotonic() + self._unseen_seconds
        while True:
            try:
                path = located(self._dataset.uri, taken.parts)
            except FileNotFoundError:
                path = None
            if path is not None and taken.is_still(path):
                return path
            if time.monotonic() >= give_up:
                break
            pause(stopped, 0.5)
        what = "is gone" if path is None else "has changed"
        raise DataError(f"{what} since its reading began", where=self._where(taken), remedy=CHANGED_REMEDY)

    def _where(self, taken: Taken) -> str:
        return f"{self._dataset.uri.rstrip('/')}/{taken.name}"


def _is_still(taken: Taken, path: FilePath) -> bool:
    try:
        return taken.is_still(as_it_is(path))
    except FileNotFoundError:
        return False
