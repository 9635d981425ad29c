"""Reports on the progress and speed of a preparation: messages for the log, figures for events. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from trainer.data.sources.source import Source

_SECONDS = 10.0
REPORT_SECONDS = 1.0
"""Least time between two reports; a shorter preparation makes none."""

Stage = Literal["read", "write"]


class Progress:
    """The progress of one preparation: rows are read and coded, then the coded rows are written as examples.

    Args:
        log: called with messages, every ten seconds while rows are read, and when all rows are read.
        report: called at most every :data:`REPORT_SECONDS` with ``stage``, ``rows`` (done so far), ``total_rows`` (None
            if the files do not state it) and ``rows_per_second`` of this process.
    """

    def __init__(self, log: Callable[[str], Any], report: Callable[..., Any] = lambda **figures: None):
        self.log = log
        self._report = report
        self._told = self._reported = time.monotonic()
        self._part_rows = 1
        self._start("write", None)

    def start_reading(self, source: Source, part_rows: int, num_rows: int = 0) -> None:
        """Note that the reading begins.

        ``part_rows``: number of rows between saves; ``num_rows``: number of rows that an earlier process has saved.
        """
        self._start("read", source.reader.num_rows() if source.has_all_rows else None, num_rows)
        self._told, self._part_rows = self._began, part_rows
        if num_rows:
            self.log(f"continues after {self._rows()} that an earlier attempt has read")

    def end_reading(self) -> None:
        self._tell(f"{self._num_rows:,} rows")

    def start_writing(self, num_rows: int) -> None:
        """Note that the writing of the ``num_rows`` rows that were read begins."""
        self._start("write", num_rows)

    def add(self, num_rows: int) -> None:
        """Count ``num_rows`` more rows that were read, or written, and report from time to time."""
        self._num_rows += num_rows
        now = time.monotonic()
        if self._stage == "read" and now - self._told > _SECONDS:
            self._tell(f"{self._rows()}, part {self._part()}")
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            rate = round(self._rate(now), 1)
            self._report(stage=self._stage, rows=self._num_rows, total_rows=self._total, rows_per_second=rate)

    def _start(self, stage: Stage, total: int | None, num_rows: int = 0) -> None:
        self._stage, self._total = stage, total
        self._num_before = self._num_rows = num_rows
        self._began = time.monotonic()

    def _rows(self) -> str:
        return f"{self._num_rows:,}" + ("" if self._total is None else f" of {self._total:,}") + " rows"

    def _part(self) -> str:
        part = max(0, self._num_rows - 1) // self._part_rows + 1
        return f"{part}" if self._total is None else f"{part} of {-(-self._total // self._part_rows)}"

    def _tell(self, what: str) -> None:
        self._told = time.monotonic()
        self.log(f"read and coded {what}, {self._rate(self._told):,.0f} rows a second")

    def _rate(self, now: float) -> float:
        return (self._num_rows - self._num_before) / max(now - self._began, 1e-9)
