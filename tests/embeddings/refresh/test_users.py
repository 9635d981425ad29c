"""Users of a refresh: turned with the items, so that scores stay those of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from embeddings.refresh.publish import Gate, MovingAverage, RefreshRequest, Settings, publish_candidate
from embeddings.store import Collection, Store
from embeddings.vectors.item_vectors import ItemVectors
from embeddings.vectors.user_vectors import SeenLists, UserVectors
from tests.embeddings.refresh.refreshes import D, N, basis, retrained

USERS = 30
PLAIN = Settings(ema=None, gate=Gate("report"))


def users_of(seed: int) -> UserVectors:
    vectors = np.random.default_rng(50 + seed).standard_normal((USERS, D)) @ basis(seed)
    nothing = SeenLists(np.arange(N), np.empty(0, np.int64), np.zeros(USERS + 1, np.int64))
    return UserVectors(np.arange(USERS), vectors.astype(np.float32), nothing)


def biases_of(seed: int, num_items: int = N) -> np.ndarray:
    return np.random.default_rng(80 + seed).standard_normal(num_items).astype(np.float32)


def publish(store: Store, seed: int, settings: Any = PLAIN, items: slice = slice(None)) -> None:
    candidate = ItemVectors(np.arange(N)[items], retrained(seed)[items], biases=biases_of(seed)[items])
    parent = store.collection("items").current()
    request = RefreshRequest(candidate, settings, parent_version=parent, users=users_of(seed))
    assert publish_candidate(store, "items", request).status == "published"


def scores_of(seed: int) -> np.ndarray:
    return np.asarray(users_of(seed).vectors @ retrained(seed).T + biases_of(seed))


def served_scores(collection: Collection) -> np.ndarray:
    found = collection.recommender().top(np.arange(USERS), N)
    scores = np.full((USERS, N), np.nan)
    for user, (items, values) in enumerate(zip(found.items, found.scores, strict=True)):
        scores[user, items] = values
    return scores


def test_scores_of_turned_versions_are_the_models_own(store: Store, collection: Collection) -> None:
    for seed in range(3):
        publish(store, seed)
        np.testing.assert_allclose(served_scores(collection), scores_of(seed), atol=2e-4)
    assert collection.manifest()["alignment"]["kind"] == "procrustes"
    served, own = collection.recommender().users.vectors, users_of(2).vectors
    np.testing.assert_allclose(served, own @ collection.rotation(), atol=1e-5)
    assert np.abs(served - own).max() > 1


def test_the_average_of_items_moves_no_score(store: Store, collection: Collection) -> None:
    averaged = dataclasses.replace(PLAIN, ema=MovingAverage())
    publish(store, 0, averaged)
    assert not [file for file in collection.manifest()["files"] if file["name"].startswith("scored")]
    for seed in (1, 2):
        publish(store, seed, averaged)
        np.testing.assert_allclose(served_scores(collection), scores_of(seed), atol=2e-4)
    reader, users = collection.open(), collection.recommender().users
    assert users.scored is not None
    # What consumers fetch is averaged.
    assert np.einsum("nd,nd->n", reader.vectors, users.scored).mean() < 0.999
    before = np.array(users.scored)
    publish(store, 3, averaged, items=slice(0, N - 20))
    after = collection.recommender().users.scored
    assert after is not None
    np.testing.assert_array_equal(after[N - 20 :], before[N - 20 :])
    collection.erase([5], "withdrawn")
    erased = collection.recommender().users.scored
    assert erased is not None
    np.testing.assert_array_equal(erased, np.delete(after, 5, 0))
    found = collection.recommender().top([0], 3).items[0]
    assert 5 not in found


def test_carried_items_keep_their_norms_and_biases(store: Store, collection: Collection) -> None:
    publish(store, 0)
    before = collection.open()
    publish(store, 1, items=slice(0, N - 20))
    after = collection.open()
    carried = slice(N - 20, N)
    assert after.items().biases is not None
    np.testing.assert_array_equal(after.items().biases[carried], biases_of(0)[carried])
    expected = collection.recommender().users.vectors @ (before.vectors[carried] * before.norms[carried][:, None]).T
    np.testing.assert_allclose(served_scores(collection)[:, carried], expected + biases_of(0)[carried], atol=1e-4)


def test_an_erased_user_is_left_out_of_a_refresh(store: Store, collection: Collection) -> None:
    publish(store, 0)
    collection.erase([3], "asked", part="users")
    publish(store, 1)
    assert collection.recommender().top([3, 4], 1).found.tolist() == [False, True]
    np.testing.assert_allclose(np.delete(served_scores(collection), 3, 0), np.delete(scores_of(1), 3, 0), atol=2e-4)


def test_a_job_without_users_publishes_items_alone(store: Store, collection: Collection) -> None:
    publish(store, 0)
    candidate = ItemVectors(np.arange(N), retrained(1))
    publish_candidate(store, "items", RefreshRequest(candidate, PLAIN, parent_version=collection.current()))
    assert "users" not in collection.manifest()
    assert collection.open().items().biases is None
    assert not [file for file in collection.manifest()["files"] if file["name"].startswith("users")]
