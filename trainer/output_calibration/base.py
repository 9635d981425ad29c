"""The interface of output calibrators, and the model's own probabilities, where there is no other map."""

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
    """A map from log odds to the probability of a label of 1, with what was fitted as its fields.

    Jobs name it by its key in the registry.
    """

    @classmethod
    @abstractmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        """Fit the map to rows that the model was not trained on.

        Args:
            logits: [n], finite scores of the model.
            labels: [n], 0 or 1, both there.
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
        """Return the map of what :meth:`settings` returned."""
        return cls(**settings)


@dataclass(frozen=True)
class Uncalibrated(Calibrator):
    """p = sigmoid(z); ``reason``: why there is no other map, of a job that asks for one."""

    reason: str = ""

    @classmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        return cls()

    def probabilities(self, logits: npt.NDArray[np.floating]) -> Float64s:
        return sigmoid(logits)


def smoothed_targets(labels: Float64s, weights: Float64s) -> tuple[float, float]:
    """Return (of negatives, of positives): 1 / (N- + 2) and (N+ + 1) / (N+ + 2), N+ and N- being the classes' weights.

    Platt, Probabilistic Outputs for Support Vector Machines, 1999, section 2.2: what a uniform prior makes of a class
    of so many rows. No probability is 0 or 1, which an unlucky row would turn into an infinite loss.
    """
    positives = float(weights[labels > 0.5].sum())
    negatives = float(weights.sum()) - positives
    return 1.0 / (negatives + 2.0), (positives + 1.0) / (positives + 2.0)
