"""Doc2vec against its equations word by word, and what it learns of documents of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks.papers.data.corpus import Words
from benchmarks.papers.rff.doc2vec import (
    Doc2vec,
    Doc2vecSettings,
    Text,
    begin,
    contexts_of,
    loss_of,
    text_of,
    train,
    words_of,
)

DOCUMENTS = [["a", "b", "a", "c"], ["c", "d"], ["e"]]
SMALL = Doc2vecSettings(dim=8, epochs=10, batch_size=64, learning_rate=0.2, sample=1.0)


def topics(count: int = 60) -> list[Words]:
    """Documents of thirty words, half of them of one of two topics, in turn."""
    draw = np.random.Generator(np.random.Philox(0))
    return [[f"{'xy'[at % 2] if draw.random() < 0.5 else 'z'}{draw.integers(6)}" for _ in range(30)]
            for at in range(count)]  # fmt: skip


def drawn(num_documents: int, *, seed: int = 0) -> Doc2vec:
    torch.manual_seed(seed)
    model = Doc2vec(num_documents, {word: row for row, word in enumerate("abcde")}, torch.ones(5).long(), 4).double()
    torch.nn.init.normal_(model.outputs.weight)
    return model


@pytest.mark.parametrize("num_documents", [3, 0])
def test_loss_and_gradient_are_those_of_the_equation(num_documents: int) -> None:
    """Word by word in plain numbers; gradients by differences, of every row."""
    model = drawn(num_documents)
    documents, words = torch.tensor([2, 0]), torch.tensor([[1, 4, 1], [0, 2, 3]])
    contexts = torch.tensor([[0, 3, 5, 5], [2, 5, 2, 1]])

    @torch.no_grad()
    def plain() -> float:
        total = 0.0
        for row in range(2):
            inputs = [model.words.weight[at] for at in contexts[row].tolist() if at != 5]
            inputs += [model.documents.weight[documents[row]]] if num_documents else []
            h = [sum(float(one[k]) for one in inputs) / len(inputs) for k in range(4)]
            for place, word in enumerate(words[row].tolist()):
                if place and word == int(words[row, 0]):
                    continue
                score = sum(float(model.outputs.weight[word, k]) * h[k] for k in range(4))
                total += math.log(1 + math.exp(-score if place == 0 else score))
        return total

    loss = loss_of(model(documents, contexts, words), words)
    assert float(loss.detach()) == pytest.approx(plain(), rel=1e-12)
    loss.backward()
    step = 1e-6
    for weight in model.parameters():
        for place in np.ndindex(*weight.shape):
            with torch.no_grad():
                weight[place] += step
                above = plain()
                weight[place] -= 2 * step
                below = plain()
                weight[place] += step
            expected = (above - below) / (2 * step)
            if weight is model.words.weight and place[0] == 5:
                expected = 0.0  # padding
            assert float(weight.grad[place]) == pytest.approx(expected, abs=1e-8)


def test_words_around_are_those_of_the_document_within_a_window() -> None:
    rows = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    text = text_of(DOCUMENTS, rows)
    assert text.words.tolist() == [0, 1, 0, 2, 2, 3, 4]
    assert text.documents.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert contexts_of(text, 1, 5, torch.Generator()).tolist() == [
        [5, 1], [0, 0], [1, 2], [0, 5], [5, 3], [2, 5], [5, 5],
    ]  # fmt: skip
    many = Text(torch.arange(3000), torch.zeros(3000).long())
    around = contexts_of(many, 3, 9999, torch.Generator().manual_seed(0))[100:-100]
    # A word at distance 1, 2, 3 is read with probability 1, 2/3, 1/3.
    read = (around != 9999).double().mean(0).tolist()
    assert read == pytest.approx([1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3], abs=0.03)


def test_rare_words_are_left_out() -> None:
    assert words_of(DOCUMENTS, 2) == {"a": 0, "c": 1}
    assert list(words_of(DOCUMENTS, 1)) == ["a", "c", "b", "d", "e"]
    assert text_of(DOCUMENTS, words_of(DOCUMENTS, 2)).words.tolist() == [0, 0, 1, 1]


def trained(documents: Sequence[Words], seed: int) -> tuple[Doc2vec, list[float]]:
    model, text = begin(documents, SMALL, seed)
    return model, list(train(model, text, SMALL, seed))


def test_a_seed_gives_the_same_bits_and_another_one_others() -> None:
    (first, losses), (again, _), (other, _) = (trained(topics(20), seed) for seed in (1, 1, 2))
    assert losses[-1] < losses[0]
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.documents.weight, other.documents.weight)


def test_documents_of_a_topic_are_alike() -> None:
    model, _ = trained(topics(), 0)
    rows = torch.nn.functional.normalize(model.documents.weight.detach())
    products = rows @ rows.T
    same = torch.arange(60) % 2 == torch.arange(60).unsqueeze(1) % 2
    assert products[same].mean() > products[~same].mean() + 0.5


def test_without_documents_it_is_word2vec() -> None:
    model, text = begin(topics(), SMALL, 0, with_documents=False)
    list(train(model, text, SMALL, 0))
    assert model.documents.weight.shape == (0, SMALL.dim)
    rows = torch.nn.functional.normalize(model.words.weight.detach()[:-1])
    products = rows @ rows.T
    x, y = (torch.tensor([word[0] == side for word in model.rows]) for side in "xy")
    assert products[x][:, x].mean() > products[x][:, y].mean() + 0.5


def test_frequent_words_are_passed_over() -> None:
    """Half of the text is one word: at a small ``sample`` its document learns little of it, and an epoch is short."""
    model, text = begin([["a", "b"] * 50], SMALL, 0)
    often = Doc2vecSettings(**{**vars(SMALL), "epochs": 1, "sample": 1e-9})
    before = model.documents.weight.detach().clone()
    assert list(train(model, text, often, 0)) == [0.0]
    assert torch.equal(before, model.documents.weight)
