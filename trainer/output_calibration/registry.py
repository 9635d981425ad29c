"""Output calibrators by the kind that jobs name; functions that fit them to rows, and convert them to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.output_calibration.base import Calibrator, Uncalibrated
from trainer.output_calibration.isotonic import Isotonic
from trainer.output_calibration.platt import Platt

CALIBRATORS: dict[str, type[Calibrator]] = {"none": Uncalibrated, "platt": Platt, "isotonic": Isotonic}


def fit(
    kind: str,
    logits: npt.NDArray[np.floating],
    labels: npt.NDArray[np.floating],
    weights: npt.NDArray[np.floating] | None = None,
) -> Calibrator:
    """Return a calibrator fitted to rows; :class:`Uncalibrated` with the reason if the rows do not allow a fit.

    ``kind``: a key of ``CALIBRATORS``. ``logits``: [n] scores. ``labels``: [n], 0 or 1. ``weights``: [n], at least 0;
    None: 1 each.
    """
    scores, values = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    counts = np.ones(len(scores)) if weights is None else np.asarray(weights, np.float64)
    counted = counts > 0
    scores, values, counts = scores[counted], values[counted], counts[counted]
    positives = int((values > 0.5).sum())
    if positives in (0, len(values)):
        which = "no row" if not len(values) else f"only labels of {'1' if positives else '0'}"
        return Uncalibrated(f"the validation rows have {which}: give them a larger share (evaluation.split.validation)")
    if not np.isfinite(scores).all():
        return Uncalibrated("scores of validation rows are not finite")
    return CALIBRATORS[kind].fit(scores, values, counts)


def as_json(calibrator: Calibrator) -> dict[str, Any]:
    """Return a calibrator as a JSON object: its ``kind`` and its fitted parameters."""
    kind = next(name for name, one in CALIBRATORS.items() if type(calibrator) is one)
    return {"kind": kind, **calibrator.settings()}


def of_json(document: Mapping[str, Any]) -> Calibrator:
    """Return the calibrator of an object that :func:`as_json` returned."""
    settings = dict(document)
    return CALIBRATORS[settings.pop("kind")].of_settings(settings)
