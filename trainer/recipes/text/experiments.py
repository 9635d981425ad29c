"""Experiments on texts by name, for :class:`trainer.recipes.trials.trial.TextTrial`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.recipes.text import linear_margin, word_lstm
from trainer.recipes.text.word_lstm import LstmSettings

Experiment = Callable[[Mapping[str, Any], Path, int], Iterator[dict[str, Any]]]
"""``experiment(settings, folder of data, seed)`` yields figures, each a dict with ``epoch`` and ``split``."""


def _word_lstm(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return word_lstm.train(LstmSettings(**settings), data / "brown.parquet", seed)


def _linear_margin(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return linear_margin.measure(data / "sentence_polarity.parquet", seed)


EXPERIMENTS: dict[str, Experiment] = {"linear_margin": _linear_margin, "word_lstm": _word_lstm}
