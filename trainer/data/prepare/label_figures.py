"""Figures of the labels of a split, as they are appended: how many, their sum, their range. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError


class LabelFigures:
    """Figures of one label of a split. ``name``: "" where it is the only one; absent labels, NaN, are in none."""

    def __init__(self, name: str = ""):
        self.name = name
        self.count = self.num_positives = 0
        self.sum, self.low, self.high = 0.0, np.inf, -np.inf

    def add(self, labels: npt.NDArray[Any]) -> None:
        """Add labels [n]."""
        labels = labels[~np.isnan(labels)] if labels.dtype.kind == "f" else labels
        self.count += len(labels)
        self.num_positives += int((labels == 1).sum())
        self.sum += float(labels.sum(dtype=np.float64))
        if len(labels):
            self.low, self.high = min(self.low, float(labels.min())), max(self.high, float(labels.max()))

    @property
    def mean(self) -> float:
        return self.sum / max(self.count, 1)

    def check(self, where: str) -> None:
        """Check that there is something to learn.

        Raises:
            DataError: the label is absent everywhere, or the same everywhere.
        """
        if self.name and not self.count:
            raise DataError(
                f"no row has label '{self.name}'",
                where=where,
                remedy=f"check labels.{self.name}: its source is null, or its mask 0, in every row; or leave it out",
            )
        if self.low == self.high:
            of = f" '{self.name}'" if self.name else ""
            raise DataError(
                f"every one of its {self.count} labels{of} is {self.low:g}",
                where=where,
                remedy="check the label's column or rule; where every row is a positive use label: {negatives: ...}",
            )
