"""Messages on how far the reading of rows is, and how fast. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer.data.sources.source import Source

_SECONDS = 10.0


class Progress:
    """Rows that were read, told every ten seconds and at the end."""

    def __init__(self, source: Source, log: Callable[[str], Any]):
        self._source, self._log = source, log
        self._num_rows = 0
        self._begin = self._told = time.monotonic()

    def add(self, num_rows: int) -> None:
        self._num_rows += num_rows
        if time.monotonic() - self._told > _SECONDS:
            total = self._source.reader.num_rows() if self._source.window is None else None
            self._tell("" if total is None else f" of {total:,}")

    def end(self) -> None:
        self._tell("")

    def _tell(self, of: str) -> None:
        self._told = time.monotonic()
        rate = self._num_rows / max(self._told - self._begin, 1e-9)
        self._log(f"read and coded {self._num_rows:,}{of} rows, {rate:,.0f} a second")
