"""Texts for the small form of recipes: each word depends on the one before it; sentences that praise or blame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.recipes.parquet_file import write_table

NUM_WORDS, NUM_DOCUMENTS, NUM_SENTENCES, LENGTH = 50, 8, 12, 9


def write_quick_texts(folder: Path) -> None:
    """Write ``brown.parquet`` (document, tokens), once."""
    path = folder / "brown.parquet"
    if path.exists():
        return
    draw = np.random.Generator(np.random.Philox(0))
    documents = np.repeat([f"d{one}" for one in range(NUM_DOCUMENTS)], NUM_SENTENCES).tolist()
    write_table(pa.table({"document": documents, "tokens": [_sentence(draw) for _ in documents]}), path)


def _sentence(draw: np.random.Generator, start: int | None = None) -> list[str]:
    """Return words, three of four the successor of the one before."""
    words = [int(draw.integers(NUM_WORDS)) if start is None else start]
    while len(words) < LENGTH:
        follows = draw.random() < 0.75
        words.append((words[-1] + 1) % NUM_WORDS if follows else int(draw.integers(NUM_WORDS)))
    return [f"w{word}" for word in words]


def write_quick_sentences(folder: Path) -> None:
    """Write ``sentence_polarity.parquet`` (positive, tokens), once: one word in three is of its sentence's side."""
    path = folder / "sentence_polarity.parquet"
    if path.exists():
        return
    draw = np.random.Generator(np.random.Philox(1))
    positive = draw.integers(2, size=400, dtype=np.int8)
    sides = np.where(draw.random((400, LENGTH)) < 1 / 3, positive[:, None], 2)
    words = [[f"{'bgn'[side]}{draw.integers(30)}" for side in row] for row in sides]
    write_table(pa.table({"positive": positive, "tokens": words}), path)
