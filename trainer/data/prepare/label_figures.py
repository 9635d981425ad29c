"""Count, sum and range of a split's labels, added up while labels are appended. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError


class LabelFigures:
    """Figures of one label of a split; absent labels, NaN, do not count. ``name`` is "" for a dataset's only label."""

    def __init__(self, name: str = ""):
        self.name = name
        self.count = self.num_positives = 0
        self.sum, self.low, self.high = 0.0, np.inf, -np.inf

    def add(self, labels: npt.NDArray[Any]) -> None:
        """Add the labels [n] of n examples to the figures."""
        labels = labels[~np.isnan(labels)] if labels.dtype.kind == "f" else labels
        self.count += len(labels)
        self.num_positives += int((labels == 1).sum())
        self.sum += float(labels.sum(dtype=np.float64))
        if len(labels):
            self.low, self.high = min(self.low, float(labels.min())), max(self.high, float(labels.max()))

    def state(self) -> dict[str, Any]:
        """Return the counts, as JSON."""
        there = {"low": float(self.low), "high": float(self.high)} if self.count else {}
        return {"count": self.count, "num_positives": self.num_positives, "sum": self.sum} | there

    def take_over(self, state: dict[str, Any]) -> None:
        """Add the figures of other labels, as their :meth:`state` returned them.

        Rounding makes the sum of labels that are no integers depend on the division into such parts.
        """
        self.count += state["count"]
        self.num_positives += state["num_positives"]
        self.sum += state["sum"]
        self.low = min(self.low, state.get("low", np.inf))
        self.high = max(self.high, state.get("high", -np.inf))

    @property
    def mean(self) -> float:
        return self.sum / max(self.count, 1)

    def check(self, where: str, *, positives_suffice: bool = False) -> None:
        """Check that a model can learn something from the labels.

        ``positives_suffice``: True if the model needs no negative labels, because it draws negatives.

        Raises:
            DataError: the label is absent in every row, or equal in all of them.
        """
        if self.name and not self.count:
            raise DataError(
                f"no row has label '{self.name}'",
                where=where,
                remedy=f"check labels.{self.name}: its source is null, or its mask 0, in every row; or leave it out",
            )
        if self.low == self.high and not (positives_suffice and self.low == 1):
            of = f" '{self.name}'" if self.name else ""
            raise DataError(
                f"every one of its {self.count} labels{of} is {self.low:g}",
                where=where,
                remedy="check the label's column or rule; where every row is a positive use label: {negatives: ...}, "
                "or a model that has negatives of its own: bpr, item2vec, sasrec, two_tower with loss sampled_softmax",
            )
