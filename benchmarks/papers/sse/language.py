"""``masked_language``: SSE-SE in pre-training and in fine-tuning of a small masked language model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.data.quick_texts import write_quick_reviews, write_quick_sentences, write_quick_texts
from benchmarks.papers.pages import published
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, TextTrial

CORPUS = "brown.parquet"
PRETRAINING_SWAPS, FINE_TUNING_SWAPS = 0.015, 0.01
"""The paper's swap probabilities of words and of labels (section 4.4)."""
PLAIN, SSE = "Pre-training", "(SSE-SE + Pre-training)"
NEITHER, BOTH = f"{PLAIN} + Fine-tuning", f"{SSE} + (SSE-SE + Fine-tuning)"
PRETRAINING: dict[str, dict[str, Any]] = {PLAIN: {}, SSE: {"swaps": PRETRAINING_SWAPS}}
FINE_TUNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    NEITHER: ({}, {}),
    f"{PLAIN} + (SSE-SE + Fine-tuning)": ({}, {"swaps": FINE_TUNING_SWAPS}),
    f"{SSE} + Fine-tuning": (PRETRAINING[SSE], {}),
    BOTH: (PRETRAINING[SSE], {"swaps": FINE_TUNING_SWAPS}),
    "Fine-tuning": ({"epochs": 0}, {}),
}
"""Settings for pre-training and fine-tuning, by row of the table."""
TASKS: dict[str, dict[str, Any]] = {"sentence_polarity": {"epochs": 3}, "movie_reviews": {"epochs": 4}}
"""The settings of fine-tuning by file; there are fewer reviews, hence more epochs."""
QUICK_PRETRAINING: dict[str, Any] = {
    "num_training": 4, "num_held_out": 1, "num_words": 60, "dim": 8, "num_heads": 2, "num_positions": 20, "length": 10,
    "batch_size": 8, "epochs": 1,
}  # fmt: skip
QUICK_FINE_TUNING: dict[str, Any] = {"num_words": 16, "epochs": 3, "learning_rate": 0.02}


def recipe(data: Path, seeds: int = 3, quick: bool = False) -> Recipe:
    """Return encoders pre-trained on the Brown corpus and fine-tuned; ``quick``: on small generated texts."""
    first, second = TASKS
    trials = (
        *(
            trial
            for seed in range(seeds)
            for trial in (*_pretrainings(data, seed, quick), *_fine_tunings(first, data, seed, quick))
        ),
        *(trial for seed in range(seeds) for trial in _fine_tunings(second, data, seed, quick)),
    )
    pretraining = Table(
        "pretraining",
        f"{'own text, small' if quick else 'Brown corpus'}: perplexity of masked words after pre-training",
        (
            Column("validation", "encoder", "perplexity", "validation"),
            Column("test", "encoder", "perplexity"),
        ),
        "last",
        "perplexity",
        lower=True,
        digits=2,
    )
    tables = tuple(_table(task, quick) for task in TASKS)
    claims = tuple(
        Claim(f"{task}: {text}", task, "encoder", (left, "best"), (NEITHER, "best"), 0.0)
        for task in TASKS
        for left, text in (
            (f"{SSE} + Fine-tuning", "SSE-SE in pre-training raises accuracy"),
            (f"{PLAIN} + (SSE-SE + Fine-tuning)", "SSE-SE in fine-tuning raises accuracy"),
            (BOTH, "SSE-SE in both raises accuracy"),
        )
    )
    prepare = partial(_write, data) if quick else None
    # There are no claims about the small texts.
    return Recipe(
        "masked_language", _TITLE, _SOURCE, _PROTOCOL, trials, (pretraining, *tables), () if quick else claims, prepare
    )


def _pretrainings(data: Path, seed: int, quick: bool) -> Iterator[TextTrial]:
    for row, before in PRETRAINING.items():
        settings = (QUICK_PRETRAINING if quick else {}) | before
        yield TextTrial("pretraining", "encoder", row, "pretraining", data, (CORPUS,), settings, seed)


def _fine_tunings(task: str, data: Path, seed: int, quick: bool) -> Iterator[TextTrial]:
    of_pretraining, of_fine_tuning = (QUICK_PRETRAINING, QUICK_FINE_TUNING) if quick else ({}, {})
    for row, (before, after) in FINE_TUNING.items():
        settings = {
            "texts": task,
            "pretraining": of_pretraining | before,
            "fine_tuning": TASKS[task] | of_fine_tuning | after,
        }
        yield TextTrial(task, "encoder", row, "fine_tuning", data, (CORPUS, f"{task}.parquet"), settings, seed)


def _table(task: str, quick: bool) -> Table:
    figures = {} if quick else published.SSE_SENTIMENT[task]
    return Table(
        task,
        f"{task.replace('_', ' ')}: accuracy after the epoch that is best on validation",
        (
            Column("test accuracy", "encoder", "accuracy"),
            Column("test F1", "encoder", "f1"),
            Column("validation accuracy", "encoder", "accuracy", "validation"),
            Column("training accuracy", "encoder", "accuracy", "train"),
        ),
        "best",
        "accuracy",
        published=figures,
        published_is="BERT-Base, " + ("IMDB" if task == "movie_reviews" else "SST-2") if figures else "",
        comparable=False,
    )


def _write(data: Path) -> None:
    write_quick_texts(data)
    write_quick_sentences(data)
    write_quick_reviews(data)


_TITLE = "A masked language model in small: SSE in pre-training and in fine-tuning"
_SOURCE = "Wu et al., Stochastic Shared Embeddings (NeurIPS 2019), tables 6 and 7"
_PROTOCOL = """\
Pre-training: the Brown corpus, 60 documents train (146,000 words), 15 validate, 15 test, drawn once; the 3000 most
frequent words of training are known, and the output shares the embedding's rows. Transformer of 2 layers of 64, 4
heads, dropout .1, windows of 32 words, batches of 64, 3 epochs of Adam, rate .003 falling to 0. 15 % of the known words
are predicted, masked anew in each epoch: 80 % of them are read as the mask, 10 % as any word, 10 % unchanged.
Fine-tuning: the mean of the states and one logit, Adam with rate .001, batches of 32, the first 64 words of a text;
sentences: 70 % train, 10 % validate, 20 % test, drawn once, 3 epochs; reviews: folds 0 to 6 train, 7 validates, 8 and 9
test, 4 epochs. A seed draws initial values, masks, order and swaps. SSE-SE swaps words read and predicted words with
p .015 in pre-training, words and labels with p .01 in fine-tuning. Nothing is tuned for SSE. The paper uses BERT-Base
and a million reviews."""
