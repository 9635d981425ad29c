"""Fine-tuning of recipe ``masked_language``: splits, what it begins from, and what it learns of texts of its own."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.papers.data.quick_texts import write_quick_reviews, write_quick_sentences, write_quick_texts
from benchmarks.papers.sse import sentiment
from benchmarks.papers.sse.masked_language import MaskedEncoder, PretrainingSettings, pretrained, read_windows
from benchmarks.papers.sse.sentiment import (
    Classifier,
    FineTuningSettings,
    Texts,
    batches,
    classifier,
    evaluate,
    fine_tune,
    read_texts,
)

PRETRAINING = PretrainingSettings(
    num_training=5, num_held_out=1, num_words=52, dim=8, num_layers=1, num_heads=2, num_positions=12, length=8,
    batch_size=16, epochs=1,
)  # fmt: skip
FINE_TUNING = FineTuningSettings(num_words=9, epochs=2, learning_rate=0.02)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_quick_texts(tmp_path)
    write_quick_sentences(tmp_path)
    write_quick_reviews(tmp_path)
    return tmp_path


def rows_of(data: Path) -> dict[str, int]:
    return read_windows(PRETRAINING, data / "brown.parquet")[0]


def test_a_sentence_lies_in_one_split(data: Path) -> None:
    texts = read_texts(data / "sentence_polarity.parquet", rows_of(data), 9)
    assert {split: len(one.words) for split, one in texts.items()} == {"train": 280, "validation": 40, "test": 80}
    assert sorted(torch.cat([one.rows for one in texts.values()]).tolist()) == list(range(400))
    again = read_texts(data / "sentence_polarity.parquet", rows_of(data), 9)
    assert all(torch.equal(one.rows, again[split].rows) for split, one in texts.items())


def test_folds_of_a_file_are_its_splits_and_labels_go_with_their_words(data: Path) -> None:
    path, rows = data / "movie_reviews.parquet", rows_of(data)
    file = pq.read_table(path).to_pylist()
    texts = read_texts(path, rows, 5)
    folds = {split: {file[row]["fold"] for row in one.rows.tolist()} for split, one in texts.items()}
    assert folds == {"train": {0, 1, 2, 3, 4, 5, 6}, "validation": {7}, "test": {8, 9}}
    for one in texts.values():
        for words, positive, row in zip(one.words, one.positive.tolist(), one.rows.tolist(), strict=True):
            assert positive == file[row]["positive"]
            assert words.tolist() == [rows[word] for word in file[row]["tokens"][:5]]


def test_only_rows_of_training_train(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out texts that are all unknown words, and whose labels are turned, leave the same classifier behind."""
    seen = []
    monkeypatch.setattr(sentiment, "evaluate", lambda model, texts: seen.append(model) or {})
    texts = read_texts(data / "sentence_polarity.parquet", rows_of(data), 9)
    turned = {
        split: Texts([torch.zeros_like(words) for words in one.words], 1 - one.positive, one.rows)
        for split, one in texts.items()
    } | {"train": texts["train"]}
    for read in (texts, turned):
        monkeypatch.setattr(sentiment, "read_texts", lambda *_, read=read: read)
        list(fine_tune(FINE_TUNING, PRETRAINING, data / "brown.parquet", data / "sentence_polarity.parquet", 0))
    first, last = (one.state_dict() for one in (seen[0], seen[-1]))
    assert seen[0] is not seen[-1]
    assert all(torch.equal(value, last[name]) for name, value in first.items())


@pytest.mark.parametrize("swaps", [0.0, 0.1])
def test_fine_tuning_begins_from_the_pre_trained_rows(data: Path, swaps: float) -> None:
    path = data / "brown.parquet"
    state = pretrained(PRETRAINING, path, 0).state
    before = {name: value.clone() for name, value in state.items()}
    model = classifier(PRETRAINING, swaps, path, 0)
    assert all(torch.equal(value, state[name]) for name, value in model.encoder.state_dict().items())
    assert model.encoder.words.config.probability == swaps
    with torch.no_grad():
        model.encoder.words.weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in pretrained(PRETRAINING, path, 0).state.items())


def test_without_pre_training_it_begins_as_it_is_drawn(data: Path) -> None:
    none = PretrainingSettings(**{**vars(PRETRAINING), "epochs": 0})
    model = classifier(none, 0.0, data / "brown.parquet", 3)
    torch.manual_seed(3)
    assert torch.equal(model.encoder.words.weight, MaskedEncoder(none, 0.0, 3).words.weight)


def test_it_learns_praise_and_the_same_seed_the_same(data: Path) -> None:
    asked = FINE_TUNING, PRETRAINING, data / "brown.parquet", data / "sentence_polarity.parquet"
    figures = list(fine_tune(*asked, 0))
    assert [(one["epoch"], one["split"]) for one in figures] == [
        (epoch, split) for epoch in (1, 2) for split in ("train", "validation", "test")
    ]
    assert figures[-1]["accuracy"] > 0.8
    assert figures == list(fine_tune(*asked, 0))
    swaps = FineTuningSettings(**{**vars(FINE_TUNING), "swaps": 0.3})
    assert figures != list(fine_tune(swaps, *asked[1:], 0))


def test_accuracy_and_f1_are_those_of_the_confusion_matrix() -> None:
    encoder = MaskedEncoder(PRETRAINING, 0.0, 0)
    model = Classifier(encoder, 0.0)
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.fill_(1.0)  # all praise
    words = [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8, 9, 10])]
    figures = evaluate(model, Texts(words, torch.tensor([1.0, 0.0, 1.0]), torch.arange(3)))
    assert figures == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(0.8)}


def test_batches_have_each_text_once_and_texts_of_a_batch_are_alike() -> None:
    texts = [torch.zeros(1 + row % 40, dtype=torch.int64) for row in range(330)]
    found = list(batches(texts, 20, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(found).tolist()) == list(range(330))
    longest_less_shortest = [
        max(lengths) - min(lengths) for lengths in ([len(texts[row]) for row in one] for one in found)
    ]
    assert sorted(longest_less_shortest)[len(found) // 2] <= 4
    other = list(batches(texts, 20, torch.Generator().manual_seed(1)))
    assert any(one.tolist() != two.tolist() for one, two in zip(found, other, strict=True))


def test_files_and_lengths_that_do_not_fit_are_errors(data: Path) -> None:
    corpus = data / "brown.parquet"
    with pytest.raises(ValueError, match=r"away\.parquet is not there: a row for each text"):
        list(fine_tune(FINE_TUNING, PRETRAINING, corpus, data / "away.parquet", 0))
    long = FineTuningSettings(num_words=13)
    with pytest.raises(ValueError, match="num_words 13 is more than the encoder's 12 positions"):
        list(fine_tune(long, PRETRAINING, corpus, data / "sentence_polarity.parquet", 0))


def test_a_text_without_words_is_read_as_an_unknown_one(data: Path) -> None:
    pq.write_table(pa.table({"positive": [0] * 10, "tokens": [["w1"]] * 9 + [[]]}), data / "empty.parquet")
    texts = read_texts(data / "empty.parquet", rows_of(data), 9)
    assert sorted(words.tolist() for one in texts.values() for words in one.words)[0] == [0]
