"""The word-level LSTM of recipe ``language``, on texts of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.papers.data.corpus import END, NUM_RESERVED, UNKNOWN, brown, stream, vocabulary
from benchmarks.papers.data.quick_texts import write_quick_texts
from benchmarks.papers.dropout.word_lstm import LstmSettings, Streams, train_on, windows

SMALL = LstmSettings(num_words=12, dim=8, length=10, batch_size=4, epochs=2)


def cycle(count: int) -> torch.Tensor:
    """Words that follow each other without exception."""
    return torch.arange(count) % 12


def test_it_learns_words_that_follow_each_other():
    figures = list(train_on(SMALL, Streams(cycle(2400), cycle(300), cycle(300)), seed=0))
    assert [(one["epoch"], one["split"]) for one in figures] == [
        (epoch, split) for epoch in (1, 2) for split in ("train", "validation", "test")
    ]
    assert figures[-1]["perplexity"] < 4.0  # of 12, who knows nothing


@pytest.mark.parametrize("adaptive", [(), (4, 8)])
def test_a_seed_gives_the_same_figures(adaptive: tuple[int, ...]):
    method = {"masks": 0, "explicit": "output_hessian", "label_samples": 1, "noise": "approximate"}
    settings = LstmSettings(**{**vars(SMALL), "epochs": 1, "method": method, "adaptive": adaptive})
    streams = Streams(cycle(200), cycle(100), cycle(100))
    first, again, other = (list(train_on(settings, streams, seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_l2_holds_it_back():
    streams = Streams(cycle(2400), cycle(300), cycle(300))
    plain, held = (list(train_on(replace(SMALL, l2=l2), streams, seed=0))[-1]["perplexity"] for l2 in (0.0, 0.05))
    assert plain < 4.0 < held


def test_windows_are_continued_and_have_the_next_word_as_target():
    found = list(windows(torch.arange(21), 2, 4))
    assert [words.tolist() for words, _ in found] == [
        [[0, 1, 2, 3], [10, 11, 12, 13]], [[4, 5, 6, 7], [14, 15, 16, 17]], [[8, 9], [18, 19]],
    ]  # fmt: skip
    assert all(torch.equal(targets, words + 1) for words, targets in found)


def test_documents_lie_in_one_split_and_words_of_training_are_known(tmp_path: Path):
    write_quick_texts(tmp_path)
    corpus = brown(tmp_path / "brown.parquet", 5, 1)
    assert [len(part) for part in corpus] == [5 * 12, 12, 12]
    rows = vocabulary([["b", "a", "b"], ["c"]], 4)
    assert rows == {"b": NUM_RESERVED, "a": NUM_RESERVED + 1}
    assert stream([["a", "c"], ["b"]], rows).tolist() == [rows["a"], UNKNOWN, END, rows["b"], END]


def test_too_few_documents_are_an_error(tmp_path: Path):
    write_quick_texts(tmp_path)
    with pytest.raises(ValueError, match="8 documents, and 12 are asked for: ask for fewer"):
        brown(tmp_path / "brown.parquet", 10, 1)
