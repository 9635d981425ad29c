"""The model's own probabilities, for a job that asks for no calibration or whose rows allow none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trainer.metrics.classification import sigmoid
from trainer.output_calibration.base import Calibrator, Float64s


@dataclass(frozen=True)
class Uncalibrated(Calibrator):
    """p = sigmoid(z).

    Attributes:
        reason: why there is no other map, of a job that asks for one.
    """

    reason: str = ""

    @classmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        return cls()

    def probabilities(self, logits: npt.NDArray[np.floating]) -> Float64s:
        return sigmoid(logits)

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Self:
        return cls(**settings)
