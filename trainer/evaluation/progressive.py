"""Progressive validation: each batch is scored before it is trained on, and windows of scored rows have metrics.

On a stream, where each row is seen once, no row has to be held out (Blum, Kalai and Langford, Beating the hold-out,
COLT 1999). Each score is that which the model would have served: ids without a row read the row of unknown ids, and
there is no dropout or swapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.numpy import load_file, save_file

from trainer.checkpoint.format import Checkpoint
from trainer.evaluation.evaluator import Columns, Evaluator

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch

SPLIT = "progressive"
KEPT_WINDOWS = 200
"""Most windows whose metrics a checkpoint keeps: a job that follows a folder may have any number."""
SCORES = "progressive.safetensors"
"""Name of the checkpoint's file with the scores and labels of the window that is not yet full."""


class Progressive:
    """Windows of rows that were scored before they were trained on. Every method is collective.

    A window ends with the batch that fills ``every_rows``.
    """

    def __init__(self, evaluator: Evaluator, every_rows: int):
        self._evaluator, self._every = evaluator, every_rows
        self._parts: list[Columns] = []

    @torch.no_grad()
    def add(self, parts: tuple[Batch, ...], num_before: int) -> Iterator[dict[str, Any]]:
        """Score the micro-batches of a batch; if it fills a window, yield the window's figures ({} but on rank 0).

        The model must be in evaluation mode.

        ``parts``: micro-batches of this rank's part of the batch, whose new ids have no rows yet. ``num_before``:
        number of rows trained on before the batch.
        """
        self._parts += [self._evaluator.scored(part, num_before) for part in parts]
        window = (num_before + parts[0].global_size) // self._every
        if window > num_before // self._every:
            yield self._taken(window)

    def end(self, num_rows: int) -> Iterator[dict[str, Any]]:
        """Yield the figures of the last window if it is not full; ``num_rows``: number of rows of the whole job."""
        if num_rows % self._every and self._num_rows():
            yield self._taken(num_rows // self._every + 1)

    def _taken(self, window: int) -> dict[str, Any]:
        figures = self._evaluator.figures(self._rows())
        self._parts = []
        return {"epoch": window, "split": SPLIT, **figures}

    def write(self, directory: Path) -> dict[str, Path]:
        """Write the rows of the window to a file for a checkpoint, on rank 0.

        Returns {name in the checkpoint: file}; {} on other ranks, or without rows.
        """
        rows = self._evaluator.in_order(self._rows()) if self._num_rows() else None
        if rows is None:
            return {}
        directory.mkdir(parents=True, exist_ok=True)
        save_file({"places": rows.positions, "scores": rows.scores, "labels": rows.labels}, directory / SCORES)
        return {SCORES: directory / SCORES}

    def _rows(self) -> Columns:
        return Columns.joined([self._evaluator.no_rows(), *self._parts])

    def _num_rows(self) -> int:
        """Return the window's number of rows, summed over all ranks."""
        return self._evaluator.total(sum(len(part.positions) for part in self._parts))

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the job; rank 0 takes all rows of the window."""
        path = checkpoint.attached(SCORES)
        self._parts = []
        if path is not None and self._evaluator.rank == 0:
            stored = load_file(path)
            self._parts = [Columns(stored["places"], stored["scores"], stored["labels"])]


def forget_windows(history: list[dict[str, Any]]) -> None:
    """Remove the oldest window from the metrics of a run if there are more than KEPT_WINDOWS."""
    windows = [number for number, one in enumerate(history) if one["split"] == SPLIT]
    if len(windows) > KEPT_WINDOWS:
        del history[windows[0]]
