"""A bidirectional RNN that classifies reviews as positive or negative, over frozen word vectors or its own rows.

Xu et al., Some Practical Concerns and Solutions for Using Pretrained Representation, appendix F.1, table A.1 and figure
A.6: embedding, bidirectional LSTM, a dense layer with ReLU (the hidden representation of figure A.1), one logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.data.corpus import NUM_RESERVED
from benchmarks.papers.rff.doc2vec import Doc2vecSettings, word_vectors
from benchmarks.papers.rff.figures import Features, features_of, unit
from benchmarks.papers.sse.sentiment import SPLITS, batches, evaluate, padded, read_texts

EVALUATION_BATCH = 256
READS = ("h", "phi", "own")
"""Unit vectors of words, random Fourier features of the same dimension, or rows trained with the classifier."""


@dataclass(frozen=True)
class ReviewRnnSettings:
    """The classifier and its training. ``num_words``: number of first words of a review that are read.

    ``patience``: number of epochs without a higher validation accuracy after which training ends. ``hidden``: the width
    of each direction and of the dense layer.
    """

    reads: str = "h"
    num_words: int = 200
    hidden: int = 32
    batch_size: int = 32
    epochs: int = 20
    patience: int = 5
    learning_rate: float = 1e-3
    weight_decay: float = 1e-5


class ReviewRnn(nn.Module):
    """The classifier.

    Args:
        rows: float32 [number of words, dim], the input of each word; one more row is added for padding.
        hidden: Width of each direction's state and of the dense layer.
        frozen: True if the rows are not trained.
    """

    def __init__(self, rows: Tensor, hidden: int, *, frozen: bool) -> None:
        super().__init__()
        self.padding, dim = rows.shape
        table = torch.cat([rows, torch.zeros(1, dim)])
        self.words = nn.Embedding.from_pretrained(table, freeze=frozen, padding_idx=self.padding)
        self.rnn = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.dense = nn.Linear(2 * hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def represented(self, words: Tensor) -> Tensor:
        """Return the hidden representation before its ReLU, after which a row could be all zeros.

        Args:
            words: int64 [b, t], padded at the end.

        Returns:
            float32 [b, hidden].
        """
        lengths = (words != self.padding).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.rnn(packed)
        states: Tensor = self.dense(torch.cat([last[0], last[1]], 1))
        return states

    def forward(self, words: Tensor) -> Tensor:
        """Return logits [b] of words int64 [b, t]."""
        logits: Tensor = self.output(torch.relu(self.represented(words))).squeeze(-1)
        return logits


def rows_read(vectors: Tensor, reads: str) -> Tensor:
    """Return the rows that a classifier reads, made from word vectors.

    Args:
        vectors: float32 [n, d] of n words.
        reads: One of READS; with ``own`` the rows start as small random numbers.

    Returns:
        float32 [NUM_RESERVED + n, d], standardised over the words as in the recipe's other tasks; reserved rows are
        0.
    """
    dim = vectors.shape[1]
    if reads == "own":
        return 0.05 * torch.randn(NUM_RESERVED + len(vectors), dim)
    features: Features = {"h": unit, "phi": features_of(dim, dim, 1.0)}[reads]
    read = torch.from_numpy(np.ascontiguousarray(features(vectors.numpy()), dtype=np.float32))
    return torch.cat([torch.zeros(NUM_RESERVED, dim), (read - read.mean(0)) / (read.std(0) + 1e-9)])


def train(settings: ReviewRnnSettings, pretraining: Doc2vecSettings, path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Train on a file of reviews and word2vec vectors of its words.

    Args:
        settings: Settings of the classifier.
        pretraining: Settings of word2vec; with ``reads`` own only the dimension and the known words are used.
        path: A Parquet file with ``positive``, ``tokens`` and ``fold``.
        seed: Seed of word2vec and of the classifier, for initial values and draws.

    Yields:
        Accuracy and F1 of each epoch and split; for training also the mean loss and, with ``reads`` own, ``vectors``
        float32 [n, hidden], the hidden representation of its reviews.

    Raises:
        ValueError: the file does not exist.
    """
    known, vectors = word_vectors(path, pretraining, seed)
    texts = read_texts(path, {word: NUM_RESERVED + row for word, row in known.items()}, settings.num_words)
    torch.manual_seed(seed)
    model = ReviewRnn(rows_read(vectors, settings.reads), settings.hidden, frozen=settings.reads != "own")
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    training, draws = texts["train"], torch.Generator().manual_seed(seed)
    best, since = 0.0, 0
    for epoch in range(1, settings.epochs + 1):
        model.train()
        total = 0.0
        for batch in batches(training.words, settings.batch_size, draws):
            logits = model(padded([training.words[row] for row in batch], model.padding))
            loss = binary_cross_entropy_with_logits(logits, training.positive[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(batch)
        figures: dict[str, dict[str, Any]] = {split: evaluate(model, texts[split]) for split in SPLITS}
        figures["train"]["loss"] = total / len(training.words)
        if settings.reads == "own":
            figures["train"]["vectors"] = representations(model, training.words)
        for split, measured in figures.items():
            yield {"epoch": epoch, "split": split} | measured
        accuracy = figures["validation"]["accuracy"]
        since = 0 if accuracy > best else since + 1
        best = max(best, accuracy)
        if since == settings.patience:
            return


@torch.no_grad()
def representations(model: ReviewRnn, texts: list[Tensor]) -> Any:
    """Return the hidden representations of texts in order, an array float32 [n, hidden]."""
    model.eval()
    parts = [
        model.represented(padded(texts[at : at + EVALUATION_BATCH], model.padding))
        for at in range(0, len(texts), EVALUATION_BATCH)
    ]
    return torch.cat(parts).numpy()
