"""The masked language model of recipe ``masked_language``: masks, swaps, and what it learns of a text of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.papers.data.corpus import END, NUM_RESERVED, UNKNOWN
from benchmarks.papers.data.quick_texts import write_quick_texts
from benchmarks.papers.sse.masked_language import (
    MaskedEncoder,
    PretrainingSettings,
    masked,
    pretrain,
    pretrained,
    read_windows,
    swapped_targets,
)

NUM_WORDS = 100
SMALL = PretrainingSettings(
    num_training=5, num_held_out=1, num_words=40, dim=8, num_layers=1, num_heads=2, num_positions=16, length=8,
    batch_size=16, epochs=1,
)  # fmt: skip


def test_fifteen_of_a_hundred_known_words_are_to_be_told_and_four_of_five_of_them_are_masked() -> None:
    words = torch.randint(0, NUM_WORDS, (400, 500), generator=torch.Generator().manual_seed(1))
    read, told = masked(words, NUM_WORDS, torch.Generator().manual_seed(2))
    known = words >= NUM_RESERVED
    assert not told[~known].any()
    assert torch.equal(read[~told], words[~told])
    assert told[known].double().mean() == pytest.approx(0.15, abs=0.005)
    of_told = read[told]
    assert (of_told == NUM_WORDS).double().mean() == pytest.approx(0.8, abs=0.01)
    assert (of_told == words[told]).double().mean() == pytest.approx(0.1 + 0.1 / (NUM_WORDS - NUM_RESERVED), abs=0.01)
    assert not ((of_told == UNKNOWN) | (of_told == END)).any()


def test_words_that_are_told_are_swapped_at_the_rate_for_words_alone() -> None:
    targets = torch.full((20_000,), 7)
    swapped = swapped_targets(targets, NUM_WORDS, 0.1, seed=1, step=1)
    changed = swapped[swapped != 7]
    assert len(changed) / len(targets) == pytest.approx(0.1, abs=0.01)
    assert len(changed.unique()) == NUM_WORDS - NUM_RESERVED - 1
    assert changed.min() >= NUM_RESERVED
    assert not torch.equal(swapped, swapped_targets(targets, NUM_WORDS, 0.1, seed=1, step=2))
    assert torch.equal(targets, swapped_targets(targets, NUM_WORDS, 0.0, seed=1, step=1))


def test_words_that_are_read_are_swapped_at_the_rate_in_training_and_padding_never() -> None:
    encoder = MaskedEncoder(SMALL, 0.1, seed=1)
    words = torch.full((2000, 8), 7)
    words[:, 6:] = encoder.padding
    rows = encoder.words(words)
    other = (rows != encoder.words.weight[words]).any(-1)
    assert other[:, :6].double().mean() == pytest.approx(0.1, abs=0.01)
    assert not other[:, 6:].any()
    rows = encoder.eval().words(words)
    assert torch.equal(rows, encoder.words.weight[words])


def test_padding_does_not_change_the_states_of_words() -> None:
    encoder = MaskedEncoder(SMALL, 0.0, seed=1).eval()
    words = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
    more = torch.nn.functional.pad(words, (0, 4), value=encoder.padding)
    assert torch.allclose(encoder(words), encoder(more)[:, :5], atol=1e-6)  # other sums of float32


def test_it_learns_words_that_follow_each_other() -> None:
    settings = PretrainingSettings(
        **{**vars(SMALL), "num_words": 12, "epochs": 4, "learning_rate": 0.02, "dropout": 0.0}
    )
    words = NUM_RESERVED + torch.arange(8 * 400) % 10
    windows = dict.fromkeys(("training", "validation", "test"), words.view(-1, 8))
    torch.manual_seed(0)
    figures = list(pretrain(MaskedEncoder(settings, 0.0, 0), settings, windows, seed=0))
    assert [(one["epoch"], one["split"]) for one in figures] == [
        (epoch, split) for epoch in (1, 2, 3, 4) for split in ("validation", "test")
    ]
    assert float(figures[-1]["perplexity"]) < 6.0  # of 10, who knows nothing


def test_a_seed_gives_the_same_rows_and_swaps_give_others(tmp_path: Path) -> None:
    write_quick_texts(tmp_path)
    swaps = PretrainingSettings(**{**vars(SMALL), "swaps": 0.2})
    first, other, swapped = (
        pretrained(settings, tmp_path / "brown.parquet", seed)
        for settings, seed in ((SMALL, 0), (SMALL, 1), (swaps, 0))
    )
    pretrained.cache_clear()
    again = pretrained(SMALL, tmp_path / "brown.parquet", 0)
    assert again.figures == first.figures
    assert all(torch.equal(value, first.state[name]) for name, value in again.state.items())
    for one in (other, swapped):
        assert not torch.equal(one.state["words.weight"], first.state["words.weight"])


def test_windows_are_of_the_documents_of_their_split(tmp_path: Path) -> None:
    write_quick_texts(tmp_path)
    rows, windows = read_windows(SMALL, tmp_path / "brown.parquet")
    assert len(rows) == SMALL.num_words - NUM_RESERVED
    # Twelve sentences of nine words and an end to a document.
    assert {split: len(one) for split, one in windows.items()} == {"training": 75, "validation": 15, "test": 15}
