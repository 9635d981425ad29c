"""Sentences of documents as rows of word ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

UNKNOWN, END = 0, 1
"""Rows of no word: a word outside the vocabulary, the end of a sentence."""
NUM_RESERVED = 2
Words = Sequence[str]


class Corpus(NamedTuple):
    """Sentences by split: each document lies in one of them."""

    training: list[Words]
    validation: list[Words]
    test: list[Words]


def brown(path: Path, num_training: int, num_held_out: int) -> Corpus:
    """Read these numbers of documents for training, validation and test (the last two ``num_held_out`` each).

    Documents are drawn once, the same for every seed of a training.

    Raises:
        ValueError: the file does not exist, or has fewer documents.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there: a row for each sentence, columns document and tokens (list of strings)")
    table = pq.read_table(path, columns=["document", "tokens"])
    of_document: dict[str, list[Words]] = {}
    for document, tokens in zip(table["document"].to_pylist(), table["tokens"].to_pylist(), strict=True):
        of_document.setdefault(document, []).append(tokens)
    wanted = num_training + 2 * num_held_out
    if len(of_document) < wanted:
        raise ValueError(f"{path} has {len(of_document)} documents, and {wanted} are asked for: ask for fewer")
    names = sorted(of_document)
    order = np.random.Generator(np.random.Philox(0)).permutation(len(names))
    chosen = [of_document[names[at]] for at in order[:wanted]]
    ends = (0, num_held_out, 2 * num_held_out, wanted)
    validation, test, training = (
        [sentence for document in chosen[start:end] for sentence in document] for start, end in pairwise(ends)
    )
    return Corpus(training, validation, test)


def tokens_of(path: Path) -> list[Words]:
    """Return the words of each text of a file.

    Raises:
        ValueError: the file does not exist.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there: a row for each text, column tokens (list of strings)")
    tokens: list[Words] = pq.read_table(path, columns=["tokens"])["tokens"].to_pylist()
    return tokens


def movies(path: Path) -> list[Words]:
    """Return the words of each movie's title, its year among them, and of its genres, lower case.

    Raises:
        ValueError: the file does not exist.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there: a row for each movie, columns title and genres (strings)")
    table = pq.read_table(path, columns=["title", "genres"])
    pairs = zip(table["title"].to_pylist(), table["genres"].to_pylist(), strict=True)
    return [re.findall(r"[\w']+", f"{title} {genres}".lower()) for title, genres in pairs]


def vocabulary(sentences: Iterable[Words], size: int) -> dict[str, int]:
    """Return rows of the most frequent words, ``size`` rows with the reserved rows; ties by the alphabet."""
    counts = Counter(word for sentence in sentences for word in sentence)
    most = sorted(counts, key=lambda word: (-counts[word], word))[: size - NUM_RESERVED]
    return {word: NUM_RESERVED + at for at, word in enumerate(most)}


def stream(sentences: Iterable[Words], rows: dict[str, int]) -> Tensor:
    """Return the sentences concatenated, each with its end, int64 [n]."""
    ids = [row for sentence in sentences for row in (*(rows.get(word, UNKNOWN) for word in sentence), END)]
    return torch.tensor(ids, dtype=torch.int64)
