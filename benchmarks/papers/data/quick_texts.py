"""Texts for the small form of recipes: each word depends on the word before it; positive and negative sentences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer.generalization.label_randomization import write_table

NUM_WORDS, NUM_DOCUMENTS, NUM_SENTENCES, LENGTH = 50, 8, 12, 9
SIDES = (0, 15, 30, NUM_WORDS)
"""First numbers of negative, positive and neutral words, and the end of all."""


def write_quick_texts(folder: Path) -> None:
    """Write ``brown.parquet`` (document, tokens), unless it exists."""
    path = folder / "brown.parquet"
    if path.exists():
        return
    draw = np.random.Generator(np.random.Philox(0))
    documents = np.repeat([f"d{one}" for one in range(NUM_DOCUMENTS)], NUM_SENTENCES).tolist()
    write_table(pa.table({"document": documents, "tokens": [_sentence(draw) for _ in documents]}), path)


def _sentence(draw: np.random.Generator, start: int | None = None) -> list[str]:
    """Return words; three of four are the successor of the word before."""
    words = [int(draw.integers(NUM_WORDS)) if start is None else start]
    while len(words) < LENGTH:
        follows = draw.random() < 0.75
        words.append((words[-1] + 1) % NUM_WORDS if follows else int(draw.integers(NUM_WORDS)))
    return [f"w{word}" for word in words]


def write_quick_sentences(folder: Path) -> None:
    """Write ``sentence_polarity.parquet`` (positive, tokens), if new: one word in three has its sentence's polarity."""
    path = folder / "sentence_polarity.parquet"
    if not path.exists():
        write_table(pa.table(_opinions(400, LENGTH, 1)), path)


def write_quick_reviews(folder: Path) -> None:
    """Write ``movie_reviews.parquet`` (fold, positive, tokens), if new: like the sentences, but twice as long."""
    path = folder / "movie_reviews.parquet"
    if not path.exists():
        folds = pa.array(np.arange(100) % 10)
        write_table(pa.table({"fold": folds} | _opinions(100, 2 * LENGTH, 2)), path)


def write_quick_movies(folder: Path, genres: Mapping[int, str]) -> None:
    """Write ``ml1m_movies.parquet`` (item, title, genres), if new; one of a title's four words belongs to its class."""
    path = folder / "ml1m_movies.parquet"
    if path.exists():
        return
    draw = np.random.Generator(np.random.Philox(3))
    titles = [f"{genre.split()[-1]}{draw.integers(3)} w{' w'.join(map(str, draw.integers(NUM_WORDS, size=3)))}"
              for genre in genres.values()]  # fmt: skip
    write_table(pa.table({"item": list(genres), "title": titles, "genres": list(genres.values())}), path)


def _opinions(count: int, length: int, seed: int) -> dict[str, Any]:
    """Return ``positive`` and ``tokens``: of the corpus's words 15 are negative, 15 positive and 20 neutral."""
    draw = np.random.Generator(np.random.Philox(seed))
    positive = draw.integers(2, size=count, dtype=np.int8)
    sides = np.where(draw.random((count, length)) < 1 / 3, positive[:, None], 2)
    words = [[f"w{SIDES[side] + draw.integers(SIDES[side + 1] - SIDES[side])}" for side in row] for row in sides]
    return {"positive": positive, "tokens": words}
