"""Calibration of a job's outputs, fitted on validation rows, and the figures of held-out rows before and after it.

The rows that a curve was fitted to cannot judge it. So validation rows are cut into two folds, and each is calibrated
by the curve fitted on the other. Test rows are calibrated by the curve fitted on all validation rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.metrics.calibration import ece
from trainer.metrics.classification import NAN, logloss, sigmoid
from trainer.output_calibration.base import Calibrator, Uncalibrated
from trainer.output_calibration.registry import as_json, fit
from trainer.spec.evaluation import CALIBRATED

SPLITS = ("validation", "test")
_LEAST = 2.0**-53
"""Least distance of a calibrated probability from 0 and 1 in the logloss, which is then finite."""


class Sample(NamedTuple):
    """Held-out rows of one label: logits, labels (0 or 1) and weights (None: 1 each), each [n]."""

    logits: npt.NDArray[np.floating]
    labels: npt.NDArray[np.floating]
    weights: npt.NDArray[np.floating] | None = None

    def where(self, mask: npt.NDArray[np.bool_]) -> Sample:
        return Sample(*(None if part is None else part[mask] for part in self))  # type: ignore[arg-type]


class OutputCalibration:
    """The calibrators of a model as it was when its validation rows were last evaluated, by label, on rank 0."""

    def __init__(self, kind: str):
        self.kind = kind
        self.fitted: dict[str, Calibrator] = {}

    def is_of(self, split: str) -> bool:
        """Return True if calibration is fitted or measured on a split."""
        return self.kind != "none" and split in SPLITS

    def measured(self, split: str, label: str, rows: Sample) -> dict[str, float]:
        """Return logloss and ECE of rows before and after calibration; if they are validation rows, fit it first.

        The fit uses the rows' weights; in the metrics each row counts once, as in other metrics.
        """
        if split == "validation":
            self.fitted[label] = fit(self.kind, *rows)
            after = _cross_fitted(self.kind, rows)
        else:
            after = self.fitted[label].probabilities(rows.logits) if label in self.fitted else None
        figures = {"logloss": logloss(rows.logits, rows.labels), "ece": ece(sigmoid(rows.logits), rows.labels)}
        calibrated = (NAN, NAN) if after is None else (logloss(_logits(after), rows.labels), ece(after, rows.labels))
        return figures | {f"{name}{CALIBRATED}": value for name, value in zip(figures, calibrated, strict=True)}

    def as_json(self) -> dict[str, Any] | None:
        """Return the calibrators as JSON objects by label; None if there are none."""
        return {label: as_json(one) for label, one in self.fitted.items()} or None

    def problems(self) -> Iterator[str]:
        """Yield the reasons why outputs are not calibrated, though the job asks for it."""
        for label, one in self.fitted.items():
            if isinstance(one, Uncalibrated):
                yield f"probabilities{f' of {label}' if label else ''} are not calibrated: {one.reason}"


def _cross_fitted(kind: str, rows: Sample) -> npt.NDArray[np.float64] | None:
    """Return the calibrated probability of each row [n], by a calibrator fitted on every second row without it.

    None if either half of the rows does not allow a fit.
    """
    is_even = np.arange(len(rows.logits)) % 2 == 0
    after = np.empty(len(rows.logits))
    for fold in (is_even, ~is_even):
        calibrator = fit(kind, *rows.where(~fold))
        if isinstance(calibrator, Uncalibrated):
            return None
        after[fold] = calibrator.probabilities(rows.logits[fold])
    return after


def _logits(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(probabilities, _LEAST, 1.0 - _LEAST)
    return np.log(inside) - np.log1p(-inside)
