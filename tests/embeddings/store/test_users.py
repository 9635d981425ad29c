"""Users of a version: stored and switched with its items, scored as the model does, erased from every file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import Collection, CorruptStore, IdsErased, NoUsers, open_store
from embeddings.store.collection.reader import CACHED_READERS
from embeddings.vectors.item_vectors import ItemIdError, ItemVectors
from embeddings.vectors.user_vectors import SeenLists, UserVectors

D, ITEMS, USERS = 6, 50, 20


def model(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Raw rows of items, their biases, vectors of users, and their offsets."""
    random = np.random.default_rng(seed)
    shapes = ((ITEMS, D), (ITEMS,), (USERS, D), (USERS,))
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def scores_of(seed: int = 0) -> np.ndarray:
    rows, biases, users, offsets = model(seed)
    return users @ rows.T + biases + offsets[:, None]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def seen_of(user: int) -> list[int]:
    return sorted({1000 + user, 1000 + 2 * user, 1003})


def users_of(seed: int = 0, ids: Any = None, **options: Any) -> UserVectors:
    """Users with even ids, who have seen three items each."""
    _, _, vectors, offsets = model(seed)
    lists = [seen_of(user) for user in range(USERS)]
    items = np.arange(1000, 1000 + ITEMS)
    starts = np.append(0, np.cumsum([len(one) for one in lists]))
    seen = SeenLists(items, np.concatenate(lists) - 1000, starts)
    return UserVectors(2 * np.arange(USERS) if ids is None else ids, vectors, seen, offsets, **options)


def write(collection: Collection, seed: int = 0, **options: Any) -> str:
    rows, biases, _, _ = model(seed)
    norms = np.linalg.norm(rows, axis=1)
    items = ItemVectors(np.arange(1000, 1000 + ITEMS), unit(rows), norms=norms, biases=biases)
    return collection.write(items, users=users_of(seed), **options)


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    collection = open_store(tmp_path).collection("items")
    collection.publish(write(collection), None)
    return collection


def best(scores: np.ndarray, k: int, without: Any = ()) -> list[int]:
    return [1000 + int(item) for item in np.argsort(-scores) if 1000 + item not in without][:k]


def test_scores_are_the_models_own(collection: Collection) -> None:
    found = collection.recommender().top([6, 0, 7], 5)
    assert found.version == "v000001"
    assert found.found.tolist() == [True, True, False]
    for answer, user in ((0, 3), (1, 0)):
        expected = scores_of()[user]
        assert found.items[answer] == best(expected, 5)
        np.testing.assert_allclose(
            found.scores[answer], expected[np.array(found.items[answer]) - 1000], rtol=1e-5, atol=1e-5
        )
    assert (found.items[2], found.scores[2]) == ([], [])


def test_models_of_unit_vectors_are_scored_without_norms(tmp_path: Path) -> None:
    rows, _, users, offsets = model()
    collection = open_store(tmp_path).collection("items")
    items = ItemVectors(np.arange(1000, 1000 + ITEMS), unit(rows), norms=np.linalg.norm(rows, axis=1))
    collection.publish(collection.write(items, users=users_of(unit_items=True), dtype="float16"), None)
    found = collection.recommender().top([0], 3)
    scores = users @ unit(rows).T + offsets[:, None]
    assert found.items[0] == best(scores[0], 3)
    np.testing.assert_allclose(found.scores[0], np.sort(scores[0])[::-1][:3], atol=1e-2)  # half precision


def test_seen_and_named_items_are_left_out(collection: Collection) -> None:
    plain = collection.recommender().top([10], 3).items[0]
    without = {*seen_of(5), plain[0]}
    found = collection.recommender().top([10], ITEMS, exclude=[plain[0], 5], exclude_seen=True)
    assert found.items[0] == best(scores_of()[5], ITEMS, without)
    assert len(found.items[0]) == ITEMS - len(without)


def test_pieces_of_items_and_blocks_of_users_change_nothing(
    collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = 2 * np.arange(USERS)
    options: dict[str, Any] = {"exclude": [1001, 1049], "exclude_seen": True}
    whole = collection.recommender().top(everybody, 7, **options)
    monkeypatch.setattr("embeddings.store.users._PIECE_ITEMS", 8)
    monkeypatch.setattr("embeddings.store.users._SCORES_AT_ONCE", 24)
    parts = collection.recommender().top(everybody, 7, **options)
    assert parts.items == whole.items


def test_users_and_items_are_switched_together(collection: Collection) -> None:
    open_before = collection.recommender()
    second = write(collection, seed=1)
    collection.publish(second, "v000001")
    for version, seed in (("current", 1), ("v000001", 0)):
        assert collection.recommender(version).top([0], 4).items[0] == best(scores_of(seed)[0], 4)
    assert open_before.top([0], 4).items[0] == best(scores_of(0)[0], 4)
    collection.promote("v000001", "rollback")
    assert collection.recommender().top([0], 4).version == "v000001"


def test_a_version_of_items_alone_recommends_nothing(collection: Collection) -> None:
    rows = unit(model()[0])
    collection.publish(collection.write(ItemVectors(np.arange(1000, 1000 + ITEMS), rows)), "v000001")
    assert "users" not in collection.manifest()
    with pytest.raises(NoUsers, match=r"v000002 of 'items' has no users: publish one by a job with publish\.users"):
        collection.recommender()
    assert collection.recommender("v000001").version == "v000001"


def test_a_version_with_damaged_users_is_not_switched_to(collection: Collection, tmp_path: Path) -> None:
    second = write(collection, seed=1)
    path = tmp_path / f"collections/items/versions/{second}/users.arrow"
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(CorruptStore, match=r"users\.arrow"):
        open_store(tmp_path).collection("items").publish(second, "v000001")
    assert collection.current() == "v000001"


def test_an_erased_user_is_in_no_file(collection: Collection, tmp_path: Path) -> None:
    collection.publish(write(collection, seed=1), "v000001")
    item_before = collection.open().lookup([1004])[1]
    vectors = [model(seed)[2][2].tobytes() for seed in (0, 1)]
    # The item with the same id as the user stays.
    assert collection.erase([4], "asked", part="users") == {"versions": ["v000001", "v000002"], "rows": 2}
    for version, seed in (("current", 1), ("v000001", 0)):
        recommender = collection.recommender(version)
        assert recommender.top([4, 6], 2).found.tolist() == [False, True]
        assert recommender.top([6], ITEMS, exclude_seen=True).items[0] == best(scores_of(seed)[3], ITEMS, seen_of(3))
    assert collection.manifest()["users"]["rows"] == USERS - 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() for one in vectors if one in path.read_bytes()]
    np.testing.assert_array_equal(collection.open().lookup([1004])[1], item_before)
    with pytest.raises(IdsErased, match="1 of the users were erased"):
        write(collection, seed=2)
    (note,) = collection.erasures()
    assert (note["part"], note["ids"], note["rows"]) == ("users", 1, 2)
    assert collection.readmit([4], "came back", part="users") == 1
    write(collection, seed=2)


def test_an_erased_item_leaves_the_lists_of_users(collection: Collection) -> None:
    collection.erase([1003, 1007], "withdrawn")
    found = collection.recommender().top([10], ITEMS, exclude_seen=True)
    assert found.items[0] == best(scores_of()[5], ITEMS, {*seen_of(5), 1003, 1007})
    lists = collection.recommender().users.seen
    assert lists.positions.max() < ITEMS - 2
    assert len(lists.positions) == sum(len(set(seen_of(user)) - {1003, 1007}) for user in range(USERS))


def test_users_to_erase_need_the_users_id_type(collection: Collection, tmp_path: Path) -> None:
    with pytest.raises(ItemIdError, match="of users of collection 'items' are int64, those given are string"):
        collection.erase(["4"], "asked", part="users")
    other = open_store(tmp_path).collection("other")
    other.publish(other.write(ItemVectors([1], np.eye(1, dtype=np.float32))), None)
    with pytest.raises(NoUsers, match="no version of collection 'other' has users"):
        other.erase([4], "asked", part="users")


def test_users_with_text_ids(tmp_path: Path) -> None:
    collection = open_store(tmp_path).collection("items")
    rows, biases, _, _ = model()
    items = ItemVectors(np.arange(1000, 1000 + ITEMS), unit(rows), norms=np.linalg.norm(rows, axis=1), biases=biases)
    names = [f"u{number:02d}é" for number in range(USERS)]
    collection.publish(collection.write(items, users=users_of(ids=names)), None)
    found = collection.recommender().top(["u03é", "a much longer name", ""], 2)
    assert (found.found.tolist(), found.items[0]) == ([True, False, False], best(scores_of()[3], 2))
    with pytest.raises(ItemIdError, match="strings"):
        collection.recommender().top([3], 2)
    collection.erase(names, "all of them", part="users")
    assert collection.recommender().top(["u03é"], 2).found.tolist() == [False]


def test_recommenders_of_few_versions_stay_open(collection: Collection) -> None:
    for seed in range(1, CACHED_READERS + 3):
        collection.publish(write(collection, seed=seed), collection.current())
        assert collection.recommender().top([0], 1).items[0] == best(scores_of(seed)[0], 1)
    assert len(collection._reader._recommenders) == CACHED_READERS
