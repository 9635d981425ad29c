"""Interface of output calibrators, and the calibrator that keeps the model's own probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trainer.metrics.classification import sigmoid

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibrator(ABC):
    """Base of maps from a model's log odds to the calibrated probability that the label is 1.

    Fields of a subclass are the fitted parameters. Jobs name it by its key in the registry.
    """

    @classmethod
    @abstractmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        """Fit the map to rows that the model was not trained on.

        Args:
            logits: [n], finite scores of the model.
            labels: [n], 0 or 1, both present.
            weights: [n], above 0: a row of weight 2 counts as two.
        """

    @abstractmethod
    def probabilities(self, logits: npt.NDArray[np.floating]) -> Float64s:
        """Return the calibrated probability of each of [n] log odds."""

    def settings(self) -> dict[str, Any]:
        """Return the fitted parameters, as JSON."""
        return asdict(self)

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Return the calibrator with the parameters that :meth:`settings` returned."""
        return cls(**settings)


@dataclass(frozen=True)
class Uncalibrated(Calibrator):
    """The model's own probabilities, p = sigmoid(z).

    ``reason``: why outputs are not calibrated, if the job asks for calibration; else "".
    """

    reason: str = ""

    @classmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        return cls()

    def probabilities(self, logits: npt.NDArray[np.floating]) -> Float64s:
        return sigmoid(logits)


def smoothed_targets(labels: Float64s, weights: Float64s) -> tuple[float, float]:
    """Return Platt's targets (of negatives, of positives): (1 / (N- + 2), (N+ + 1) / (N+ + 2)).

    N+ and N- are the summed weights of positive and negative rows. Platt, Probabilistic Outputs for Support Vector
    Machines, 1999, section 2.2: these are the classes' probabilities under a uniform prior. A target of 0 or 1 would
    allow probabilities of 0 and 1, with which a single unlucky row has an infinite loss.
    """
    positives = float(weights[labels > 0.5].sum())
    negatives = float(weights.sum()) - positives
    return 1.0 / (negatives + 2.0), (positives + 1.0) / (positives + 2.0)
