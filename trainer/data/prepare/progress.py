"""Messages on how far the reading of rows is, and how fast. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer.data.sources.source import Source

_SECONDS = 10.0


class Progress:
    """Rows that were read, told every ten seconds and at the end.

    Args:
        source: what is read.
        log: takes the messages.
        part_rows: rows of a part, after which what was read is saved.
        num_rows: those that an earlier process has read and saved.
    """

    def __init__(self, source: Source, log: Callable[[str], Any], part_rows: int, num_rows: int = 0):
        self._log, self._part_rows = log, part_rows
        self._num_before = self._num_rows = num_rows
        self._total = source.reader.num_rows() if source.window is None else None
        self._begin = self._told = time.monotonic()
        if num_rows:
            log(f"goes on after {self._rows()} that an earlier attempt has read")

    def add(self, num_rows: int) -> None:
        self._num_rows += num_rows
        if time.monotonic() - self._told > _SECONDS:
            self._tell(f"{self._rows()}, part {self._part()}")

    def end(self) -> None:
        self._tell(f"{self._num_rows:,} rows")

    def _rows(self) -> str:
        return f"{self._num_rows:,}" + ("" if self._total is None else f" of {self._total:,}") + " rows"

    def _part(self) -> str:
        part = max(0, self._num_rows - 1) // self._part_rows + 1
        return f"{part}" if self._total is None else f"{part} of {-(-self._total // self._part_rows)}"

    def _tell(self, what: str) -> None:
        self._told = time.monotonic()
        rate = (self._num_rows - self._num_before) / max(self._told - self._begin, 1e-9)
        self._log(f"read and coded {what}, {rate:,.0f} rows a second")
