"""A linear classifier of sentences, made sparse by its margin (Mądry's lecture, section 7.1, equations 2 to 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.data.corpus import vocabulary

Floats = npt.NDArray[np.float64]
QUANTILES = (0.1, 0.25, 0.5, 0.75)
"""Quantiles of the margins of training rows; each quantile is used as a gamma."""
NUM_DRAWS = 50
HELD_OUT = 0.2
L2 = 1e-4
STEPS = 200


class Rows(NamedTuple):
    """Sentences as unit vectors x, with 1 / sqrt(k) at each of the sentence's k known words: word, row and value."""

    word: Tensor
    row: Tensor
    value: Tensor
    label: Tensor

    def products(self, weights: Tensor) -> Tensor:
        """Return c^T x of each row, [n]."""
        return torch.zeros_like(self.label).index_add(0, self.row, weights[self.word] * self.value)


def measure(path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the figures for each gamma, as ``epoch`` 1 to 4 of the split ``test``.

    ``margin``: gamma; ``words``: d; ``expected``: the mean number of coordinates left, ``bound``: 8 / gamma^2;
    ``kept``: the share of training rows beyond gamma whose sign stays; ``accuracy``: on held-out rows, ``whole``: the
    accuracy of the original classifier.

    Raises:
        ValueError: the file does not exist.
    """
    training, held_out, num_words = read_rows(path, seed)
    weights = trained(training, num_words)
    direction = weights / weights.norm()
    margins, before = training.products(direction), held_out.products(direction)
    whole = _accuracy(before, held_out.label)
    draw = np.random.default_rng(seed)
    for number, quantile in enumerate(QUANTILES, 1):
        gamma = float(margins.abs().quantile(quantile))
        beyond = margins.abs() > gamma
        kept, accuracy = [], []
        for _ in range(NUM_DRAWS):
            sparse = torch.from_numpy(sparsified(direction.numpy(), gamma, draw))
            kept.append(float((training.products(sparse) * margins > 0)[beyond].double().mean()))
            accuracy.append(_accuracy(held_out.products(sparse), held_out.label))
        yield {
            "epoch": number, "split": "test", "margin": gamma, "words": num_words,
            "expected": float(probabilities(direction.numpy(), gamma).sum()), "bound": 8 / gamma**2,
            "kept": float(np.mean(kept)), "accuracy": float(np.mean(accuracy)), "whole": whole,
        }  # fmt: skip


def probabilities(direction: Floats, gamma: float) -> Floats:
    """Return min(8 c_i^2 / gamma^2, 1), the probability that a coordinate of c [d] is kept."""
    result: Floats = np.minimum(8 * direction**2 / gamma**2, 1.0)
    return result


def sparsified(direction: Floats, gamma: float, draw: np.random.Generator) -> Floats:
    """Return c^ of equation 2 with the mean of equation 4: gamma^2 / (8 c_i) with that probability, else 0.

    A coordinate whose probability is 1 stays as it is.
    """
    left = probabilities(direction, gamma)
    result: Floats = np.where(draw.random(len(direction)) < left, direction / np.maximum(left, 1e-300), 0.0)
    return result


def trained(rows: Rows, num_words: int) -> Tensor:
    """Return the weights of logistic regression without an intercept, by L-BFGS on all rows, float64 [d]."""
    weights = torch.zeros(num_words, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(rows.products(weights), rows.label) + L2 * weights.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


def read_rows(path: Path, seed: int) -> tuple[Rows, Rows, int]:
    """Return training rows, held-out rows, and the number of distinct words of the training rows.

    Raises:
        ValueError: the file does not exist.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there: a row for each sentence, columns positive (0 or 1) and tokens")
    table = pq.read_table(path, columns=["positive", "tokens"])
    tokens, labels = table["tokens"].to_pylist(), table["positive"].to_numpy().astype(np.float64)
    order = np.random.default_rng(seed).permutation(len(tokens))
    held_out, training = np.split(order, [round(HELD_OUT * len(order))])
    words = vocabulary((tokens[at] for at in training), 2**31)
    sides = [_rows([tokens[at] for at in side], labels[side], words) for side in (training, held_out)]
    return sides[0], sides[1], len(words)


def _rows(sentences: Sequence[Sequence[str]], labels: Floats, words: dict[str, int]) -> Rows:
    known = [sorted({words[word] for word in sentence if word in words}) for sentence in sentences]
    first = min(words.values())
    word = torch.tensor([one - first for row in known for one in row])
    row = torch.tensor([number for number, row in enumerate(known) for _ in row])
    value = torch.tensor([len(row) ** -0.5 for row in known for _ in row], dtype=torch.float64)
    return Rows(word, row, value, torch.from_numpy(labels))


def _accuracy(products: Tensor, labels: Tensor) -> float:
    return float(((products > 0) == (labels > 0)).double().mean())
