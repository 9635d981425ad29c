"""Experiments on texts by name, for :class:`trainer.recipes.trials.trial.TextTrial`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.recipes.text import linear_margin, masked_language, sentiment, word_lstm
from trainer.recipes.text.masked_language import PretrainingSettings
from trainer.recipes.text.sentiment import FineTuningSettings
from trainer.recipes.text.word_lstm import LstmSettings

CORPUS = "brown.parquet"
Experiment = Callable[[Mapping[str, Any], Path, int], Iterator[dict[str, Any]]]
"""``experiment(settings, folder of data, seed)`` yields figures, each a dict with ``epoch`` and ``split``."""


def _word_lstm(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return word_lstm.train(LstmSettings(**settings), data / CORPUS, seed)


def _linear_margin(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return linear_margin.measure(data / "sentence_polarity.parquet", seed)


def _pretraining(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    yield from masked_language.pretrained(PretrainingSettings(**settings), data / CORPUS, seed).figures


def _fine_tuning(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    pretraining = PretrainingSettings(**settings["pretraining"])
    fine_tuning = FineTuningSettings(**settings["fine_tuning"])
    return sentiment.fine_tune(fine_tuning, pretraining, data / CORPUS, data / f"{settings['texts']}.parquet", seed)


EXPERIMENTS: dict[str, Experiment] = {
    "fine_tuning": _fine_tuning,
    "linear_margin": _linear_margin,
    "pretraining": _pretraining,
    "word_lstm": _word_lstm,
}
