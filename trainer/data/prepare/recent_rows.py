"""The training rows in the order of their times, from which recent negatives are drawn. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.batches.recent_negatives import EARLIER_FILE, TIME_ORDER_FILE
from trainer.data.prepare.arrays import OFFSET, write_array
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.examples import Examples
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import TRAIN


class RecentRows:
    """Collector of the times of the rows that train, of a model that draws recent negatives.

    It holds two integers for each such row in memory while it sorts.
    """

    def __init__(self, plan: DataPlan, encoded: Encoded):
        self._enabled = plan.draws_recent
        if not self._enabled:
            return
        assert plan.dataset.timestamp is not None
        self._times = encoded.orders[plan.dataset.timestamp]
        self._parts: list[npt.NDArray[Any]] = []

    def add(self, examples: Examples) -> None:
        """Add examples, in ascending order of rows."""
        if self._enabled:
            own = (examples.sides == TRAIN) & (examples.labels == 1)
            self._parts.append(np.asarray(self._times[examples.rows[own]]))

    def write(self, directory: Path) -> None:
        """Write TIME_ORDER_FILE and EARLIER_FILE (trainer.data.batches.recent_negatives)."""
        if not self._enabled:
            return
        times = np.concatenate(self._parts)
        order = np.argsort(times, kind="stable")
        ordered = times[order]
        write_array(directory / TIME_ORDER_FILE, order, OFFSET)
        write_array(directory / EARLIER_FILE, np.searchsorted(ordered, times, side="left"), OFFSET)
