"""Evaluation metrics in numpy, one kind of metric per file; each docstring gives the formula and the paper."""

from trainer.metrics.calibration import calibration_curve, ece
from trainer.metrics.classification import auc, gauc, logloss, normalized_entropy
from trainer.metrics.ranking import Ranking, rank_of
from trainer.metrics.regression import mae, rmse

__all__ = [
    "Ranking",
    "auc",
    "calibration_curve",
    "ece",
    "gauc",
    "logloss",
    "mae",
    "normalized_entropy",
    "rank_of",
    "rmse",
]
