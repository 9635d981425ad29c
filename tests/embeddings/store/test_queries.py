"""Items for features and histories by the version's query tower, and towers without what was erased."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.store import Collection, IdsErased, open_store
from embeddings.store.item_scores import ScoreIndex
from embeddings.store.queries import NoTower, QueryError, RuntimeMissing
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import ItemVectors
from embeddings.vectors.query_tower import QueryTower
from embeddings.vectors.user_vectors import SeenLists, UserVectors
from tests.support.query_towers import HISTORY_LENGTH, tower_of

D, ITEMS = 5, 30
KEYS = np.arange(100, 100 + ITEMS)


def drawn(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


USERS, COUNTRIES, HISTORY = drawn(4, 1), drawn(2, 2), drawn(ITEMS, 3)
OF_FEATURES = tower_of({"user": (["a", "b", "c", "é"], USERS), "country": ([3, 7], COUNTRIES)})
OF_HISTORIES = tower_of({"item": ([int(key) for key in KEYS], HISTORY)}, history=True)


def write(
    collection: Collection,
    tower: QueryTower | None,
    ids: Any = ("a", "b"),
    seed: int = 0,
    columns: ItemColumns | None = None,
) -> str:
    rows = drawn(ITEMS, seed)
    norms = np.linalg.norm(rows, axis=1)
    seen = SeenLists(KEYS, np.empty(0, np.int64), np.zeros(len(ids) + 1, np.int64))
    users = UserVectors(list(ids), USERS[: len(ids)], seen, tower=tower, columns=columns)
    return collection.write(ItemVectors(KEYS, rows / norms[:, None], norms=norms), users=users)


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return open_store(tmp_path).collection("items")


def published(collection: Collection, tower: QueryTower | None, **options: Any) -> Collection:
    collection.publish(write(collection, tower, **options), collection.current())
    return collection


def best(vector: np.ndarray, k: int, without: Any = ()) -> list[int]:
    return [int(KEYS[row]) for row in np.argsort(-(vector @ drawn(ITEMS, 0).T)) if KEYS[row] not in without][:k]


def test_features_are_answered(collection: Collection) -> None:
    recommender = published(collection, OF_FEATURES).recommender()
    queries = [{"user": "é", "country": 7}, {"country": 3}, {"user": "nobody"}, {"user": None, "country": 9}, {}]
    found = recommender.top(features=queries, k=4, exclude=[101])
    assert found.found.tolist() == [True, True, False, False, False]
    expected = [USERS[3] + COUNTRIES[1], COUNTRIES[0]]
    assert found.items == [*(best(vector, 4, [101]) for vector in expected), [], [], []]
    scores = np.sort(np.delete(expected[0] @ drawn(ITEMS, 0).T, 1))[::-1][:4] + 1
    np.testing.assert_allclose(found.scores[0], scores, rtol=1e-5)
    assert recommender.top(features=[], k=4).items == []


def test_histories_are_answered_by_their_last_items(collection: Collection) -> None:
    recommender = published(collection, OF_HISTORIES).recommender()
    histories = [[100, 105, 111, 120, 107, 102], [], [999], [129]]
    found = recommender.top(histories=histories, k=ITEMS, exclude_seen=True)
    assert found.found.tolist() == [True, False, False, True]
    read = [key - 100 for key in histories[0][-HISTORY_LENGTH:]]
    assert found.items[0] == best(HISTORY[read].sum(0), ITEMS, histories[0])
    assert found.items[3] == best(HISTORY[29], ITEMS, [129])
    assert len(recommender.top(histories=histories, k=ITEMS).items[0]) == ITEMS


def test_histories_with_unknown_items_are_answered_alike_by_an_index(collection: Collection, tmp_path: Path) -> None:
    recommender = published(collection, OF_HISTORIES).recommender()
    recommender.build_index(tmp_path / "scores.json")
    index, histories = ScoreIndex(recommender.items, tmp_path / "scores.json"), [[100, 105], [999, 102], [998, 129]]
    found = recommender.top(histories=histories, k=ITEMS, exclude_seen=True, index=index)
    assert not found.exact
    assert found.items == recommender.top(histories=histories, k=ITEMS, exclude_seen=True).items


def test_many_queries_are_answered_in_blocks(collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    recommender = published(collection, OF_HISTORIES).recommender()
    histories = [[100 + number % ITEMS] for number in range(70)]
    whole = recommender.top(histories=histories, k=3)
    monkeypatch.setattr("embeddings.store.queries._AT_ONCE", 16)
    monkeypatch.setattr("embeddings.store.users._SCORES_AT_ONCE", 64)
    assert recommender.top(histories=histories, k=3).items == whole.items


def test_queries_that_cannot_be_read_are_named(collection: Collection) -> None:
    recommender = published(collection, OF_FEATURES).recommender()
    for query, field, message in (
        ({"colour": 1}, "features.1.colour", "reads no such feature: it reads country, user"),
        ({"user": 1}, "features.1.user", "1 is no string"),
        ({"country": True}, "features.1.country", "True is no int64"),
        ({"country": 2**63}, "features.1.country", "is no int64"),
        ({"country": [3]}, "features.1.country", "is no int64"),
    ):
        with pytest.raises(QueryError, match=message) as refused:
            recommender.top(features=[{}, query])
        assert refused.value.field == field
    with pytest.raises(QueryError, match="features do not say what a user had: leave it out"):
        recommender.top(features=[{"country": 3}], exclude_seen=True)
    with pytest.raises(NoTower, match="reads features, not histories"):
        recommender.top(histories=[[100]])
    with pytest.raises(ValueError, match="give one of users, features and histories"):
        recommender.top(["a"], features=[{}])
    recommender = published(collection, OF_HISTORIES, seed=1).recommender()
    for wrong, message in (([["x"]], r"histories\.0: 'x' is no int64"), ([100], r"histories\.0: is one id")):
        with pytest.raises(QueryError, match=message):
            recommender.top(histories=wrong)
    recommender = published(collection, None, seed=2).recommender()
    with pytest.raises(NoTower, match="v000003 has no query tower: ask for ids of users"):
        recommender.top(features=[{}])


def test_without_onnxruntime_users_are_still_answered(collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    recommender = published(collection, OF_FEATURES).recommender()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert recommender.top(["a"], 2).items[0] == best(USERS[0], 2)
    with pytest.raises(RuntimeMissing, match="pip install onnxruntime"):
        recommender.top(features=[{"user": "a"}])


def test_items_are_filtered_by_columns(collection: Collection) -> None:
    """Of a table in another order, with an item more, and without the last five of the version."""
    listed = np.append(np.random.default_rng(0).permutation(KEYS[:-5]), 999)
    brand = pa.array(listed % 3, mask=listed == 104)
    kinds = pa.array(
        [[f"k{key % 4}", f"k{key % 5}"] if key != 103 else [] for key in listed], pa.large_list(pa.large_string())
    )
    columns = ItemColumns(listed, {"brand": brand, "kinds": kinds})
    recommender = published(collection, None, columns=columns).recommender()
    assert collection.manifest()["users"]["columns"] == {
        "brand": {"ids": "int64", "list": False}, "kinds": {"ids": "string", "list": True},
    }  # fmt: skip
    (collection.directory / "versions" / recommender.version / "users.arrow").unlink()  # columns are read without it
    read = collection.item_columns()
    assert read is not None
    assert {name: column.to_pylist() for name, column in read.columns.items()} == {
        name: column.to_pylist() for name, column in columns.aligned(KEYS).columns.items()
    }
    assert collection.item_columns(write(collection, None)) is None
    known = [int(key) for key in KEYS[:-5]]
    of_brand = {key for key in known if key % 3 in (0, 2) and key != 104}
    of_kind = {key for key in known if (key % 4 == 1 or key % 5 == 1) and key != 103}
    for filter, staying in (
        ({"brand": [0, 2, 77]}, of_brand),
        ({"kinds": ["k1"]}, of_kind),
        ({"brand": [0, 2], "kinds": ["k1", "none"]}, of_brand & of_kind),
        ({"brand": []}, set()),
    ):
        found = recommender.top(["a"], ITEMS, filter=filter).items[0]
        assert found == best(USERS[0], ITEMS, {*KEYS.tolist()} - staying), filter
    collection.erase([105, 102], "withdrawn")
    found = collection.recommender().top(["a"], ITEMS, filter={"brand": [0]}).items[0]
    staying = {key for key in known if key % 3 == 0 and key not in (105, 102)}
    assert found == best(USERS[0], ITEMS, {*KEYS.tolist()} - staying)
    for filter, message in (
        ({"colour": ["red"]}, r"filter\.colour: version v000001 has no such column: it has brand, kinds"),
        ({"brand": ["red"]}, r"filter\.brand: 'red' is no int64"),
    ):
        with pytest.raises(QueryError, match=message):
            recommender.top(["a"], filter=filter)


def files_with(folder: Path, row: np.ndarray) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and row.tobytes() in path.read_bytes()]


def test_an_erased_user_is_in_no_tower(collection: Collection, tmp_path: Path) -> None:
    """Also one whom the version does not have: the tower has its row."""
    published(collection, OF_FEATURES)
    before = collection.recommender()
    assert files_with(tmp_path, USERS[2])
    for user, row in (("b", USERS[1]), ("c", USERS[2])):
        collection.erase([user], "asked", part="users")
        assert files_with(tmp_path, row) == []
        assert collection.recommender().top(features=[{"user": user}], k=2).found.tolist() == [False]
    assert [one.name for one in (tmp_path / "collections/items/versions/v000001").glob("tower*")] == ["tower-0002.onnx"]
    found = collection.recommender().top(features=[{"user": "é", "country": 7}], k=3)
    assert found.items == [best(USERS[3] + COUNTRIES[1], 3)]
    assert before.top(features=[{"user": "c"}], k=1).found.tolist() == [True]  # an open reader may finish
    with pytest.raises(IdsErased, match="1 of the users were erased"):
        write(collection, OF_FEATURES.without("users", lambda keys: keys == b"b"), ids=("a",), seed=1)


def test_an_erased_item_is_in_no_tower(collection: Collection, tmp_path: Path) -> None:
    published(collection, OF_HISTORIES)
    assert files_with(tmp_path, HISTORY[7])
    collection.erase([107], "withdrawn")
    assert files_with(tmp_path, HISTORY[7]) == []
    found = collection.recommender().top(histories=[[107, 112], [107]], k=3)
    assert (found.items, found.found.tolist()) == ([best(HISTORY[12], 3, [107]), []], [True, False])
    assert OF_HISTORIES.without("users", lambda keys: np.ones(len(keys), bool)) is OF_HISTORIES
