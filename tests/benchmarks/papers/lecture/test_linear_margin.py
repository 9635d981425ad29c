"""A classifier made sparse by its margin: the lecture's equations, and its promise on sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.data.quick_texts import write_quick_sentences
from benchmarks.papers.lecture.linear_margin import L2, measure, probabilities, read_rows, sparsified, trained


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    write_quick_sentences(tmp_path)
    return tmp_path / "sentence_polarity.parquet"


@pytest.mark.slow
def test_the_sparse_one_has_the_mean_variance_and_support_of_the_lecture() -> None:
    draw = np.random.default_rng(0)
    direction = draw.standard_t(3, 300)
    direction /= np.linalg.norm(direction)
    gamma, x = 0.3, draw.normal(size=300)
    x /= np.linalg.norm(x)
    drawn = np.stack([sparsified(direction, gamma, draw) for _ in range(20_000)])
    large = 8 * direction**2 > gamma**2
    assert 0 < large.sum() < 300
    assert (drawn[:, large] == direction[large]).all()
    small = drawn[:, ~large]
    expected = np.broadcast_to(gamma**2 / (8 * direction[~large]), small.shape)
    assert small[small != 0] == pytest.approx(expected[small != 0])
    products = drawn @ x
    assert products.mean() == pytest.approx(direction @ x, abs=4 * products.std() / 20_000**0.5)
    assert products.var() <= gamma**2 / 8
    support = (drawn != 0).sum(axis=1).mean()
    assert support == pytest.approx(probabilities(direction, gamma).sum(), rel=0.01)
    assert support <= 8 / gamma**2


def test_rows_have_length_one_and_the_classifier_is_a_minimum(sentences: Path) -> None:
    training, held_out, num_words = read_rows(sentences, 0)
    lengths = torch.zeros(len(training.label), dtype=torch.float64).index_add(0, training.row, training.value**2)
    assert lengths == pytest.approx(1.0)
    assert len(held_out.label) == round(0.2 * (len(training.label) + len(held_out.label)))
    weights = trained(training, num_words).requires_grad_()
    loss = binary_cross_entropy_with_logits(training.products(weights), training.label) + L2 * weights.square().sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient.abs().max() < 1e-5


def test_rows_beyond_the_margin_keep_their_side(sentences: Path) -> None:
    found = list(measure(sentences, 0))
    assert [one["epoch"] for one in found] == [1, 2, 3, 4]
    for one in found:
        assert one["expected"] <= min(one["bound"], one["words"])
        assert one["kept"] >= 7 / 8
        assert one["whole"] > 0.8
    assert found[-1]["expected"] < found[0]["expected"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sentence_polarity\.parquet is not there: a row for each sentence"):
        list(measure(tmp_path / "sentence_polarity.parquet", 0))
