"""Exponential vectors: products with other items, whatever basis a training has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embeddings.refresh.kernel_alignment import nadaraya_watson
from embeddings.rff.exponential import exponential


def test_exponential_vectors_are_the_weights_of_the_estimator() -> None:
    draw = np.random.default_rng(8)
    vectors, classes = 3.0 * draw.normal(size=(60, 4)), draw.integers(4, size=60)
    found = exponential(vectors, vectors)
    h = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert found[7, 9] == pytest.approx(math.exp(float(h[7] @ h[9])))
    turn = np.linalg.qr(draw.normal(size=(4, 4)))[0]
    assert exponential(vectors @ turn, vectors @ turn) == pytest.approx(found)
    known = np.arange(60) < 40
    votes = found[~known][:, known] @ np.eye(4)[classes[known]]
    assert votes.argmax(axis=1).tolist() == nadaraya_watson(
        vectors[known], classes[known], vectors[~known], 4, (1.0,)
    ).tolist()  # fmt: skip
