"""An encoder fine-tuned to classify texts as positive or negative, with or without pre-training and SSE-SE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.data.corpus import UNKNOWN
from benchmarks.papers.sse.masked_language import (
    EVALUATION_BATCH,
    MaskedEncoder,
    PretrainingSettings,
    pretrained,
    read_windows,
)
from embeddings.kernels.swap import swap_classes

SPLITS = ("train", "validation", "test")
VALIDATION_FOLDS, TEST_FOLDS = (7,), (8, 9)
"""Folds, out of NUM_FOLDS, of texts that have ``fold``; for other texts shares of the same size are drawn."""
NUM_FOLDS = 10
BATCHES_OF_A_CHUNK = 16
"""Number of batches whose texts are sorted by length together."""


@dataclass(frozen=True)
class FineTuningSettings:
    """Settings of fine-tuning. ``num_words``: number of first words of a text that are read.

    ``swaps``: the probability of SSE-SE, for words that are read and for labels.
    """

    batch_size: int = 32
    num_words: int = 64
    epochs: int = 3
    learning_rate: float = 0.001
    swaps: float = 0.0


class Texts(NamedTuple):
    """Texts as rows of words, and labels float32 [n], 1 if positive; ``rows``: their row numbers in the file."""

    words: list[Tensor]
    positive: Tensor
    rows: Tensor


class TextClassifier(Protocol):
    """A model that maps padded words [b, t] to logits [b]. ``padding``: the word that fills up shorter texts."""

    padding: int

    def __call__(self, words: Tensor) -> Tensor: ...

    def eval(self) -> Any: ...


class Classifier(nn.Module):
    """One logit from the mean of an encoder's states over a text's words."""

    def __init__(self, encoder: MaskedEncoder, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.padding = encoder.padding
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(encoder.words.embedding_dim, 1)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits [b] of words [b, t]."""
        there = (words != self.encoder.padding).unsqueeze(-1)
        states = (self.encoder(words) * there).sum(1) / there.sum(1)
        logits: Tensor = self.output(self.dropout(states)).squeeze(-1)
        return logits


def read_texts(path: Path, rows_of: dict[str, int], num_words: int) -> dict[str, Texts]:
    """Return the texts of each split: by the file's column ``fold`` if any, else drawn once, equal for every seed.

    Raises:
        ValueError: the file does not exist.
    """
    if not path.exists():
        raise ValueError(
            f"{path} is not there: a row for each text, columns positive (0 or 1), tokens, if need be fold"
        )
    table = pq.read_table(path)
    folds = torch.from_numpy(_folds(table))
    positive = torch.from_numpy(table["positive"].to_numpy().astype(np.float32))
    texts = [
        torch.tensor([rows_of.get(word, UNKNOWN) for word in tokens[:num_words]] or [UNKNOWN])
        for tokens in table["tokens"].to_pylist()
    ]
    held_out = torch.tensor(VALIDATION_FOLDS), torch.tensor(TEST_FOLDS)
    validation, test = (torch.isin(folds, of) for of in held_out)
    sides = dict(zip(SPLITS, (~(validation | test), validation, test), strict=True))
    # Shuffled, since training metrics are computed on the first texts only.
    order = torch.from_numpy(np.random.Generator(np.random.Philox(1)).permutation(len(texts)))
    chosen = {split: order[side[order]] for split, side in sides.items()}
    return {split: Texts([texts[row] for row in rows], positive[rows], rows) for split, rows in chosen.items()}


def _folds(table: pa.Table) -> Any:
    """Return the fold of each text, int64 [n]."""
    if "fold" in table.column_names:
        return table["fold"].to_numpy().astype(np.int64)
    return np.random.Generator(np.random.Philox(0)).permutation(len(table)) % NUM_FOLDS


def classifier(pretraining: PretrainingSettings, swaps: float, path: Path, seed: int) -> Classifier:
    """Return a classifier whose encoder is pre-trained by these settings; with 0 epochs it has its initial values.

    Raises:
        ValueError: the corpus does not exist, or has too few documents.
    """
    state = pretrained(pretraining, path, seed).state if pretraining.epochs else None
    torch.manual_seed(seed)
    encoder = MaskedEncoder(pretraining, swaps, seed)
    if state is not None:
        encoder.load_state_dict(state)
    return Classifier(encoder, pretraining.dropout)


def fine_tune(
    settings: FineTuningSettings, pretraining: PretrainingSettings, corpus: Path, path: Path, seed: int
) -> Iterator[dict[str, Any]]:
    """Fine-tune; yield accuracy and F1 of each epoch and split.

    Metrics of the training split are over its first texts, as many as the validation split has.

    Raises:
        ValueError: a file does not exist, or texts are longer than the encoder has positions for.
    """
    if settings.num_words > pretraining.num_positions:
        raise ValueError(
            f"num_words {settings.num_words} is more than the encoder's {pretraining.num_positions} positions: read "
            "fewer words, or give it more"
        )
    texts = read_texts(path, read_windows(pretraining, corpus)[0], settings.num_words)
    model = classifier(pretraining, settings.swaps, corpus, seed)
    shown = texts | {"train": _first(texts["train"], len(texts["validation"].words))}
    training, draws, step = texts["train"], torch.Generator().manual_seed(seed), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    for epoch in range(1, settings.epochs + 1):
        model.train()
        for batch in batches(training.words, settings.batch_size, draws):
            step += 1
            labels = swap_classes(training.positive[batch], settings.swaps, seed=seed, step=step)
            logits = model(padded([training.words[row] for row in batch], model.padding))
            loss = binary_cross_entropy_with_logits(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for split in SPLITS:
            yield {"epoch": epoch, "split": split} | evaluate(model, shown[split])


def batches(texts: Sequence[Tensor], size: int, draws: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of all texts in random order; the texts of a batch have similar lengths, to save padding."""
    lengths = torch.tensor([len(text) for text in texts])
    for chunk in torch.randperm(len(texts), generator=draws).split(BATCHES_OF_A_CHUNK * size):
        by_length = chunk[lengths[chunk].argsort(stable=True)].split(size)
        for number in torch.randperm(len(by_length), generator=draws).tolist():
            yield by_length[number]


@torch.no_grad()
def evaluate(model: TextClassifier, texts: Texts) -> dict[str, float]:
    """Return accuracy and F1 of texts."""
    model.eval()
    order = torch.tensor([len(text) for text in texts.words]).argsort(stable=True)
    logits = torch.cat(
        [model(padded([texts.words[row] for row in batch], model.padding)) for batch in order.split(EVALUATION_BATCH)]
    )
    said, is_so = logits > 0, texts.positive[order] > 0
    hits = int((said & is_so).sum())
    f1 = 2 * hits / max(int(said.sum()) + int(is_so.sum()), 1)
    return {"accuracy": float((said == is_so).double().mean()), "f1": f1}


def _first(texts: Texts, count: int) -> Texts:
    return Texts(texts.words[:count], texts.positive[:count], texts.rows[:count])


def padded(texts: Sequence[Tensor], padding: int) -> Tensor:
    """Return texts as one tensor, padded to [b, length of the longest]."""
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=padding)
