"""Experiments on texts, keyed by name, for :class:`benchmarks.papers.trials.trial.TextTrial`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.data import corpus
from benchmarks.papers.dropout import word_lstm
from benchmarks.papers.dropout.word_lstm import LstmSettings
from benchmarks.papers.lecture import linear_margin
from benchmarks.papers.lecture import one_changed_example as changed
from benchmarks.papers.rff import doc2vec, review_rnn
from benchmarks.papers.rff.doc2vec import Doc2vecSettings
from benchmarks.papers.rff.review_rnn import ReviewRnnSettings
from benchmarks.papers.sse import masked_language, sentiment
from benchmarks.papers.sse.masked_language import PretrainingSettings
from benchmarks.papers.sse.sentiment import FineTuningSettings

CORPUS = "brown.parquet"
SENTENCES = "sentence_polarity.parquet"
MOVIES, REVIEWS = "ml1m_movies.parquet", "movie_reviews.parquet"
Experiment = Callable[[Mapping[str, Any], Path, int], Iterator[dict[str, Any]]]
"""``experiment(settings, folder of data, seed)`` yields figures: dicts with ``epoch`` and ``split``.

If a dict has ``vectors``, float32 [n, d] for one split, the trial stores them as an array [epochs, n, d].
"""


def _word_lstm(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return word_lstm.train(LstmSettings(**settings), data / CORPUS, seed)


def _linear_margin(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return linear_margin.measure(data / SENTENCES, seed)


def _one_changed_example(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    return changed.measure(changed.ChangedExampleSettings(**settings), data / SENTENCES, seed)


def _pretraining(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    yield from masked_language.pretrained(PretrainingSettings(**settings), data / CORPUS, seed).figures


def _fine_tuning(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    pretraining = PretrainingSettings(**settings["pretraining"])
    fine_tuning = FineTuningSettings(**settings["fine_tuning"])
    return sentiment.fine_tune(fine_tuning, pretraining, data / CORPUS, data / f"{settings['texts']}.parquet", seed)


def _doc2vec(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Every ``every`` epochs, yield the loss and the vectors of movies in the order of ``file``."""
    of = Doc2vecSettings(**settings["doc2vec"])
    model, text = doc2vec.begin(corpus.movies(data / settings["file"]), of, seed)
    for epoch, loss in enumerate(doc2vec.train(model, text, of, seed), 1):
        if epoch % settings["every"] == 0:
            vectors = model.documents.weight.detach().numpy().copy()
            yield {"epoch": epoch, "split": "train", "loss": loss, "vectors": vectors}


def _review_rnn(settings: Mapping[str, Any], data: Path, seed: int) -> Iterator[dict[str, Any]]:
    pretraining = Doc2vecSettings(**settings["word2vec"])
    return review_rnn.train(ReviewRnnSettings(**settings["rnn"]), pretraining, data / REVIEWS, seed)


EXPERIMENTS: dict[str, Experiment] = {
    "doc2vec": _doc2vec,
    "fine_tuning": _fine_tuning,
    "linear_margin": _linear_margin,
    "one_changed_example": _one_changed_example,
    "pretraining": _pretraining,
    "review_rnn": _review_rnn,
    "word_lstm": _word_lstm,
}
