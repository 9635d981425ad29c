"""Views tried on a task: features find what the vectors alone can't say, and the advice is the cheapest that does."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.refresh.consumer_accuracy import Accuracy, TaskAdvice, advise

N, D = 1200, 4


def task(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Directions, and a label that is no linear function of them: whether two coordinates have the same sign."""
    vectors = np.random.default_rng(seed).standard_normal((N, D)).astype(np.float32)
    return vectors, np.where(vectors[:, 0] * vectors[:, 1] > 0, "same", "other")


def test_features_say_what_vectors_do_not() -> None:
    vectors, labels = task()
    found = advise(vectors, labels.tolist(), sigmas=(0.4, 2.0), dims=(8, 64))
    own, *features = found.tried
    assert (own.dim, own.sigma) == (D, None)
    assert [(one.dim, one.sigma) for one in features] == [(8, 0.4), (64, 0.4), (8, 2.0), (64, 2.0)]
    assert own.accuracy < 0.6 < 0.85 < found.best.accuracy
    assert 0.5 <= found.majority < 0.6
    assert found.num_items == N
    assert found == advise(vectors * 7, labels.tolist(), sigmas=(0.4, 2.0), dims=(8, 64)), "directions alone count"


def test_the_smallest_dim_that_is_as_good_is_the_advice() -> None:
    tried = (Accuracy(4, None, 0.99), Accuracy(8, 0.4, 0.70), Accuracy(16, 0.4, 0.795), Accuracy(32, 1.0, 0.80))
    advice = TaskAdvice(tried, 0.5, 400, 100)
    assert advice.standard_error == pytest.approx(0.00995, abs=1e-5)
    assert advice.best == tried[2]
    assert TaskAdvice((*tried, Accuracy(64, 1.0, 0.9)), 0.5, 400, 100).best.dim == 64


@pytest.mark.parametrize(
    ("labels", "says"), [([1] * N, "1 classes"), (["a", "b"], "one label for each"), (list(range(N)), f"{N} classes")]
)
def test_what_is_no_task(labels: list[object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        advise(task()[0], labels)


def test_too_few_items() -> None:
    with pytest.raises(ValueError, match="40 labelled items"):
        advise(task()[0][:40], ["a", "b"] * 20)
