"""Doc2vec and word2vec: rows of documents and words that predict a word from its neighbours, by negative sampling.

Le and Mikolov 2014, Distributed Representations of Sentences and Documents, section 2.2 (PV-DM); Mikolov et al. 2013,
Distributed Representations of Words and Phrases, equation 4. Let h be the mean of a document's row and of the rows of
the words within a window around a word w. Then

    loss = -log sigmoid(<u_w, h>) - sum over n negatives v of log sigmoid(-<u_v, h>)

Without rows of documents this is word2vec's CBOW.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.data.corpus import NUM_RESERVED, Words, tokens_of, vocabulary

NEGATIVE_POWER = 0.75
"""Negatives are drawn in proportion to the counts of words to this power."""
LAST_RATE = 0.004
"""Last learning rate as a share of the first: as in word2vec, .0001 / .025."""


@dataclass(frozen=True)
class Doc2vecSettings:
    """Training. ``window``: the most words on each side; the actual number is drawn for each word and epoch.

    ``min_count``: rarer words are left out. ``sample``: words with a larger share of the text are randomly skipped.
    """

    dim: int = 32
    window: int = 3
    negatives: int = 3
    epochs: int = 20
    batch_size: int = 1024
    learning_rate: float = 0.05
    min_count: int = 1
    sample: float = 1e-3


class Text(NamedTuple):
    """Words of all documents in order: ``words`` and ``documents`` int64 [t], rows of each word and its document."""

    words: Tensor
    documents: Tensor


class Doc2vec(nn.Module):
    """Rows of documents and words, and output rows of words.

    Args:
        num_documents: Number of document rows; 0 for word2vec.
        rows: The row of each word.
        counts: int64 [number of words], how often each occurs; decides how often it is drawn as a negative.
        dim: Dimension of a row.
    """

    def __init__(self, num_documents: int, rows: dict[str, int], counts: Tensor, dim: int) -> None:
        super().__init__()
        self.rows, self.counts, self.padding = rows, counts, len(rows)
        self.documents = nn.Embedding(num_documents, dim)
        self.words = nn.EmbeddingBag(len(rows) + 1, dim, mode="sum", padding_idx=self.padding)
        self.outputs = nn.Embedding(len(rows), dim)
        for weight in (self.documents.weight, self.words.weight):
            nn.init.uniform_(weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.outputs.weight)

    def forward(self, documents: Tensor, contexts: Tensor, words: Tensor) -> Tensor:
        """Return the logits of words in their contexts.

        Args:
            documents: int64 [b], the document of each context; not read if there are no rows of documents.
            contexts: int64 [b, k], the surrounding words, filled up with ``padding``.
            words: int64 [b, c], the words to score.

        Returns:
            float32 [b, c].
        """
        total, count = self.words(contexts), (contexts != self.padding).sum(1, keepdim=True)
        if self.documents.num_embeddings:
            total, count = total + self.documents(documents), count + 1
        # A word without neighbours has a context of zeros, from which nothing is learned.
        logits: Tensor = torch.einsum("bd,bcd->bc", total / count.clamp(min=1), self.outputs(words))
        return logits


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    """Return the sum of the loss over words.

    Args:
        logits: float32 [b, 1 + n].
        words: int64 [b, 1 + n], the word of the text and n negatives; negatives equal to that word do not count.

    Returns:
        A scalar.
    """
    labels, counted = torch.zeros_like(logits), torch.ones_like(logits)
    labels[:, 0] = 1.0
    counted[:, 1:] = (words[:, 1:] != words[:, :1]).to(logits.dtype)
    return binary_cross_entropy_with_logits(logits, labels, counted, reduction="sum")


def text_of(documents: Sequence[Words], rows: dict[str, int]) -> Text:
    """Return the known words of documents; unknown ones are left out."""
    pairs = [(rows[word], at) for at, words in enumerate(documents) for word in words if word in rows]
    known = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return Text(known[:, 0], known[:, 1])


def words_of(documents: Sequence[Words], min_count: int) -> dict[str, int]:
    """Return the row of each word that occurs at least ``min_count`` times; the most frequent one has row 0."""
    counts = Counter(word for words in documents for word in words)
    size = sum(count >= min_count for count in counts.values())
    return {word: row - NUM_RESERVED for word, row in vocabulary(documents, size + NUM_RESERVED).items()}


def contexts_of(text: Text, window: int, padding: int, draws: torch.Generator) -> Tensor:
    """Return the words around each word of a text, within its document.

    Args:
        text: A text of t words.
        window: The most words on each side; the number for each word is drawn from 1 to ``window``.
        padding: The row that fills up shorter contexts.
        draws: The generator of the window sizes.

    Returns:
        int64 [t, 2 window].
    """
    count = len(text.words)
    offsets = torch.tensor([offset for offset in range(-window, window + 1) if offset])
    places = torch.arange(count).unsqueeze(1) + offsets
    drawn = torch.randint(1, window + 1, (count, 1), generator=draws)
    there = (places >= 0) & (places < count) & (offsets.abs() <= drawn)
    places = places.clamp(0, max(count - 1, 0))
    there &= text.documents[places] == text.documents.unsqueeze(1)
    return torch.where(there, text.words[places], padding)


def train(model: Doc2vec, text: Text, settings: Doc2vecSettings, seed: int) -> Iterator[float]:
    """Train the model's parameters that have gradients by SGD with a linearly falling rate.

    Args:
        model: The model; it is changed in place.
        text: The training text.
        settings: Settings of the training.
        seed: Seed of all draws.

    Yields:
        The mean loss per word, for each epoch.
    """
    draws = torch.Generator().manual_seed(seed)
    counts = model.counts
    weights = counts.double().pow(NEGATIVE_POWER).cumsum(0)
    share = counts.double() / counts.sum()
    # The formula of word2vec.c: sqrt(sample / share) + sample / share.
    kept = ((settings.sample / share).sqrt() + settings.sample / share).clamp(max=1.0)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=settings.learning_rate)
    for epoch in range(settings.epochs):
        stays = torch.rand(len(text.words), generator=draws, dtype=torch.float64) < kept[text.words]
        read = Text(text.words[stays], text.documents[stays])
        contexts = contexts_of(read, settings.window, model.padding, draws)
        batches = torch.randperm(len(read.words), generator=draws).split(settings.batch_size)
        total = 0.0
        for number, batch in enumerate(batches):
            done = (epoch + number / len(batches)) / settings.epochs
            optimizer.param_groups[0]["lr"] = settings.learning_rate * max(1.0 - done, LAST_RATE)
            at = torch.rand(len(batch), settings.negatives, generator=draws, dtype=torch.float64) * weights[-1]
            negatives = torch.searchsorted(weights, at).clamp(max=len(counts) - 1)
            words = torch.cat([read.words[batch].unsqueeze(1), negatives], 1)
            loss = loss_of(model(read.documents[batch], contexts[batch], words), words)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach())
        yield total / max(len(read.words), 1)


def begin(
    documents: Sequence[Words], settings: Doc2vecSettings, seed: int, *, with_documents: bool = True
) -> tuple[Doc2vec, Text]:
    """Return a model of documents with its initial values, and its training text.

    Args:
        documents: The words of each document.
        settings: Settings of the training.
        seed: Seed of the initial values.
        with_documents: True if documents have rows, as in doc2vec; False for word2vec.

    Returns:
        The model and the text for :func:`train`.
    """
    rows = words_of(documents, settings.min_count)
    text = text_of(documents, rows)
    counts = torch.bincount(text.words, minlength=len(rows))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Doc2vec(len(documents) if with_documents else 0, rows, counts, settings.dim), text


@lru_cache(maxsize=1)
def word_vectors(path: Path, settings: Doc2vecSettings, seed: int) -> tuple[dict[str, int], Tensor]:
    """Return word2vec vectors of a file of texts; cached in the process, since several trials read them.

    Args:
        path: A Parquet file with ``tokens``.
        settings: Settings of the training.
        seed: Seed of initial values and draws.

    Returns:
        The row of each word, and rows float32 [num_words, dim].

    Raises:
        ValueError: the file does not exist.
    """
    model, text = begin(tokens_of(path), settings, seed, with_documents=False)
    for _ in train(model, text, settings, seed):
        pass
    return model.rows, model.words.weight.detach()[:-1]
