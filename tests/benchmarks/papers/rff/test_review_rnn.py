"""The bidirectional RNN over words of reviews: what it reads, what it keeps, and what it learns of texts of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers.data.corpus import NUM_RESERVED
from benchmarks.papers.data.quick_texts import write_quick_reviews
from benchmarks.papers.rff import review_rnn
from benchmarks.papers.rff.doc2vec import Doc2vecSettings, word_vectors
from benchmarks.papers.rff.review_rnn import ReviewRnn, ReviewRnnSettings, rows_read, train
from benchmarks.papers.sse.sentiment import padded

WORD2VEC = Doc2vecSettings(dim=8, epochs=2, batch_size=64)
SMALL = ReviewRnnSettings(reads="own", num_words=18, hidden=6, batch_size=8, epochs=8, learning_rate=0.03)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    write_quick_reviews(tmp_path)
    return tmp_path / "movie_reviews.parquet"


def test_it_is_two_lstms_a_dense_layer_and_a_logit_and_padding_is_not_read() -> None:
    torch.manual_seed(0)
    model = ReviewRnn(torch.randn(9, 5), 3, frozen=True)
    texts = [torch.tensor([4, 2, 8]), torch.tensor([1, 3, 5, 6, 7]), torch.tensor([2])]
    model.requires_grad_(False)
    together = model(padded(texts, model.padding))
    for text, logit in zip(texts, together, strict=True):
        states, _ = model.rnn(model.words(text).unsqueeze(0))
        last = torch.cat(
            [states[0, -1, :3], states[0, 0, 3:]]
        )  # forwards after the last word, backwards after the first
        expected = model.output(torch.relu(model.dense(last)))
        assert float(logit) == pytest.approx(float(expected), abs=1e-6)


def test_rows_are_trained_where_they_are_its_own() -> None:
    rows = torch.randn(9, 5)
    assert ReviewRnn(rows, 3, frozen=False).words.weight.requires_grad
    assert not ReviewRnn(rows, 3, frozen=True).words.weight.requires_grad


@pytest.mark.parametrize("reads", ["h", "phi"])
def test_what_is_read_is_standardised_and_of_as_many_numbers(reads: str) -> None:
    vectors = 3 + torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    rows = rows_read(vectors, reads)
    assert rows.shape == (NUM_RESERVED + 50, 8)
    assert not rows[:NUM_RESERVED].any()
    assert torch.allclose(rows[NUM_RESERVED:].mean(0), torch.zeros(8), atol=1e-5)
    assert torch.allclose(rows[NUM_RESERVED:].std(0), torch.ones(8), atol=1e-5)
    # Lengths of vectors do not matter.
    assert torch.allclose(rows, rows_read(vectors * torch.linspace(1, 2, 50).unsqueeze(1), reads), atol=1e-4)


def test_it_learns_praise_and_the_same_seed_the_same(reviews: Path) -> None:
    figures = list(train(SMALL, WORD2VEC, reviews, 0))
    assert [one["split"] for one in figures[:3]] == ["train", "validation", "test"]
    assert figures[-3]["accuracy"] > 0.9
    assert figures[-3]["loss"] < figures[0]["loss"]
    kept = [one.pop("vectors") for one in figures if "vectors" in one]
    assert {rows.shape for rows in kept} == {(70, SMALL.hidden)}
    word_vectors.cache_clear()
    again = list(train(SMALL, WORD2VEC, reviews, 0))
    assert all(np.array_equal(one.pop("vectors"), rows) for one, rows in zip(again[::3], kept, strict=True))
    assert figures == again


@pytest.mark.parametrize("reads", ["h", "phi"])
def test_word_vectors_that_are_read_do_not_change_and_others_of_a_seed_are_the_same(
    reviews: Path, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(review_rnn, "evaluate", lambda model, texts: seen.append(model) or {"accuracy": 0.5})
    settings = ReviewRnnSettings(**{**vars(SMALL), "reads": reads, "epochs": 2})
    figures = list(train(settings, WORD2VEC, reviews, 0))
    assert not any("vectors" in one for one in figures)
    known, vectors = word_vectors(reviews, WORD2VEC, 0)
    assert len(known) == len(vectors)
    assert torch.equal(seen[0].words.weight[:-1], rows_read(vectors, reads))


def test_it_ends_when_validation_does_not_rise(reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.5, 0.6, 0.6, 0.5, 0.7, 0.7, 0.7, 0.7])
    validation = [next(accuracies) for _ in range(8)]
    called = iter(range(100))
    monkeypatch.setattr(
        review_rnn, "evaluate", lambda *_: {"accuracy": validation[next(called) // 3]}
    )  # fmt: skip
    settings = ReviewRnnSettings(**{**vars(SMALL), "reads": "h", "patience": 3})
    assert max(one["epoch"] for one in train(settings, WORD2VEC, reviews, 0)) == 8
    called = iter(range(100))
    settings = ReviewRnnSettings(**{**vars(SMALL), "reads": "h", "patience": 2})
    assert max(one["epoch"] for one in train(settings, WORD2VEC, reviews, 0)) == 4


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reviews\.parquet is not there: a row for each text"):
        list(train(SMALL, WORD2VEC, tmp_path / "reviews.parquet", 0))
