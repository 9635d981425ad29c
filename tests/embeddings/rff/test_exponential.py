"""Exponential vectors: products with other items, whatever basis a training has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embeddings.refresh.kernel_alignment import nadaraya_watson
from embeddings.rff.exponential import ExponentialVectors, exponential
from embeddings.rff.feature_map import MapParameters

NO_OTHERS = {"sigma": None, "seed": None, "frequencies": None}


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


def test_the_map_of_a_view() -> None:
    parameters = ExponentialVectors.define(4, dim=None, sigma=0.4, seed=3, frequencies="orthogonal")
    assert parameters == MapParameters(4, 256, None, None, None)
    draw = np.random.default_rng(0)
    h, anchors = draw.normal(size=(5, 4)), draw.normal(size=(6, 4))
    h[2], anchors[1] = 0, 0
    features = ExponentialVectors(ExponentialVectors.define(4, dim=6, **NO_OTHERS), anchors).transform(h)
    assert (features.shape, features.dtype) == ((5, 6), np.float32)
    assert not features[2].any()
    present = [0, 1, 3, 4]
    np.testing.assert_allclose(features[present], exponential(h, anchors)[present], rtol=1e-6)
    # The coordinate of an anchor without a vector is the same for every item.
    np.testing.assert_array_equal(features[present, 1], 1)
