"""What a version holds: lookups, neighbours, snapshots, half precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.store import Collection, StoreError, UnknownVersion
from embeddings.store.nearest_neighbors import NeighborSearch
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING, ItemIdError, ItemVectors
from embeddings.vectors.user_vectors import SeenLists, UserVectors
from tests.contracts.store.base import Base, Reopen, items, publish
from tests.support.query_towers import tower_of


class Contents(Base):
    @pytest.mark.parametrize("ids", [[30, 10, 20], ["c", "a", "b"], ["é", "z", "日本"]])
    def test_lookup_in_request_order(self, collection: Collection, ids: list[object]) -> None:
        content = items(ids, statuses=[FOUND, CARRIED, FOUND])
        publish(collection, content)
        reader = collection.open()
        unknown: object = 99 if isinstance(ids[0], int) else "nobody"
        asked = [ids[1], unknown, ids[0], ids[1], ids[2]]
        status, vectors = reader.lookup(asked)
        assert status.tolist() == [CARRIED, MISSING, FOUND, CARRIED, FOUND]
        by_id = dict(zip(content.arrow_ids().to_pylist(), content.vectors, strict=True))
        for wanted, vector in zip(asked, vectors, strict=True):
            np.testing.assert_array_equal(vector, by_id.get(wanted, np.zeros(4)))
        assert vectors.dtype == np.float32
        assert reader.ids.to_pylist() == sorted(ids, key=lambda value: str(value).encode())
        assert collection.manifest()["carried"] == 1

    def test_a_lookup_is_of_the_version_that_is_served(self, collection: Collection, again: Reopen) -> None:
        first = publish(collection, items([1, 2], 1))
        other = again().collection("items")
        for _ in range(2):
            version, status, vectors = other.lookup([2, 9, 1])
            assert (version, status.tolist()) == (first, [FOUND, MISSING, FOUND])
            np.testing.assert_array_equal(vectors, other.open().lookup([2, 9, 1])[1])
        second = publish(collection, items([1, 2], 2))
        for where in (other, collection):
            version, status, vectors = where.lookup([1])
            assert (version, status.tolist(), vectors[0, 0]) == (second, [FOUND], 2)
            version, status, vectors = where.lookup([1], first)
            assert (version, status.tolist(), vectors[0, 0]) == (first, [FOUND], 1)
        collection.promote(first, "rollback")
        assert other.lookup([1])[0] == first
        collection.erase([1], "they asked")
        assert other.lookup([1, 2])[1].tolist() == [MISSING, FOUND]
        with pytest.raises(UnknownVersion):
            other.lookup([1], "v000009")

    def test_what_is_read_in_one_go_sees_one_switch(self, collection: Collection, again: Reopen) -> None:
        first = publish(collection, items([1], 1))
        other = again().collection("items")
        with other.snapshot_read():
            assert other.open().version == first
            with other.snapshot_read():
                assert other.current() == first
        second = publish(collection, items([1], 2))
        with other.snapshot_read():
            assert other.open().lookup([1])[1][0, 0] == 2
        assert other.current() == second

    def test_no_ids_at_all(self, collection: Collection) -> None:
        publish(collection, items(["a"]))
        status, vectors = collection.open().lookup([])
        assert status.shape == (0,)
        assert vectors.shape == (0, 4)

    def test_ids_of_the_wrong_type(self, collection: Collection) -> None:
        publish(collection, items([1, 2]))
        with pytest.raises(ItemIdError, match="the ids here are integers"):
            collection.open().lookup(["1"])

    def test_what_cannot_be_written(self, collection: Collection) -> None:
        broken = items([1, 2])
        broken.vectors[1, 2] = np.nan
        with pytest.raises(ValueError, match="not finite"):
            collection.write(broken)
        with pytest.raises(ValueError, match="no item vector"):
            collection.write(ItemVectors([], np.empty((0, 4))))
        assert collection.versions() == []

    def test_neighbors_are_exact(self, collection: Collection) -> None:
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((500, 8)).astype(np.float32)
        publish(collection, ItemVectors(np.arange(500) * 2, vectors))
        reader = collection.open()
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        query = rng.standard_normal(8)
        expected = np.argsort(-(unit @ (query / np.linalg.norm(query))))[:7]
        search = NeighborSearch(reader.vectors, reader.statuses)
        rows, cosines = search.search(query, 7)
        assert reader.keys[rows].tolist() == (expected * 2).tolist()
        np.testing.assert_allclose(cosines, unit[expected] @ query / np.linalg.norm(query), atol=1e-6)
        rows, _ = search.search(reader.vectors[42], 3, leave_out=42)
        assert rows.tolist() == np.argsort(-(unit @ unit[42]))[1:4].tolist()
        assert len(search.search(reader.vectors[42], 10_000, leave_out=42)[0]) == 499
        assert len(search.search(query, 10_000)[0]) == 500
        for bad in (np.zeros(8), np.ones(7), np.full(8, np.nan)):
            with pytest.raises(ValueError, match="finite coordinates"):
                search.search(bad, 3)
        with pytest.raises(ValueError, match="at least 1"):
            search.search(query, 0)

    def test_neighbors_of_a_single_item(self, collection: Collection) -> None:
        publish(collection, items(["a"]))
        reader = collection.open()
        rows, _ = NeighborSearch(reader.vectors, reader.statuses).search(reader.vectors[0], 5, leave_out=0)
        assert not len(rows)

    @pytest.mark.parametrize("ids", [[3, 1, 2], ["c", "a", "b"]])
    def test_snapshot(self, collection: Collection, tmp_path: Path, ids: list[object]) -> None:
        content = items(ids, counts=[3, 1, 2], statuses=[CARRIED, FOUND, FOUND])
        version = publish(collection, content)
        path = collection.snapshot(tmp_path / "out.parquet")
        table = pq.read_table(path)
        assert table.column_names == ["id", "status", "norm", "count", "vector"]
        assert table["id"].to_pylist() == sorted(ids)  # type: ignore[type-var]
        assert table["status"].to_pylist() == ["found", "found", "carried"]
        assert table["count"].to_pylist() == [1, 2, 3]
        np.testing.assert_array_equal(np.stack(table["vector"].to_pylist()), content.vectors)
        assert table.schema.metadata[b"evenkeel.version"] == version.encode()
        assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".tmp")] == []

    @pytest.mark.parametrize("ids", [[3, 1, 2], ["c", "a", "b"]])
    def test_snapshot_of_nothing(
        self, collection: Collection, again: Reopen, tmp_path: Path, ids: list[object]
    ) -> None:
        publish(collection, items(ids))
        schema = pq.read_schema(collection.snapshot(tmp_path / "before.parquet"))
        collection.erase(ids, "they asked")
        for where in (collection, again().collection("items")):
            table = pq.read_table(where.snapshot(tmp_path / "after.parquet"))
            assert (len(table), table.schema) == (0, schema)

    # --- half precision --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("ids", [[30, -7, 20], ["c", "a", "longer"]])
    def test_half_precision(self, collection: Collection, again: Reopen, ids: list[object]) -> None:
        content = items(ids, dim=6)
        version = publish(collection, content, dtype="float16")
        expected = np.asarray(content.vectors).astype(np.float16).astype(np.float32)
        assert collection.manifest(version)["dtype"] == "float16"
        reader = again().collection("items").open()
        status, vectors = reader.lookup(content.arrow_ids())
        assert status.tolist() == [FOUND] * 3
        assert vectors.dtype == np.float32
        np.testing.assert_array_equal(vectors, expected)
        np.testing.assert_array_equal(np.asarray(reader.items().vectors), expected)
        np.testing.assert_array_equal(reader.norms, content.norms)

    def test_half_precision_that_overflows(self, collection: Collection) -> None:
        large = ItemVectors([1], np.full((1, 4), 1e5))
        with pytest.raises(ValueError, match="not finite"):
            collection.write(large, dtype="float16")
        with pytest.raises(ValueError, match="float32, float16"):
            collection.write(large, dtype="int8")  # type: ignore[arg-type]
        assert collection.versions() == []

    def test_users_are_a_part_of_the_version(self, collection: Collection, again: Reopen) -> None:
        """They are read elsewhere, scored against the vectors kept for it, and erased there too."""
        random = np.random.default_rng(0)
        served, scored, vectors = (random.standard_normal((n, 4)).astype(np.float32) for n in (6, 6, 5))
        biases, keys = random.standard_normal(6).astype(np.float32), np.arange(10, 16)
        seen = SeenLists(keys, np.array([0, 1, 1, 3]), np.array([0, 2, 3, 3, 4, 4]))
        tower = tower_of({"user": ([7, 8], vectors[:2])})
        users = UserVectors(np.arange(5), vectors, seen, scored=scored, tower=tower)
        content = ItemVectors(keys, served, norms=np.ones(6), biases=biases)
        publish(collection, content, users=users)
        scores = vectors @ scored.T + biases
        other = again().collection("items")
        for where in (collection, other):
            found = where.recommender().top([3, 0], 6, exclude_seen=True)
            assert found.items == [
                [int(key) for key in keys[np.argsort(-scores[user])] if key not in had]
                for user, had in ((3, [13]), (0, [10, 11]))
            ]
            answered = where.recommender().top(features=[{"user": 7}], k=6)
            assert answered.items[0] == keys[np.argsort(-scores[0])].tolist()
        collection.erase([1, 8], "they asked", part="users")
        collection.erase([11], "withdrawn")
        for where in (again().collection("items"), collection):
            found = where.recommender().top([0, 1], 6, exclude_seen=True)
            assert found.found.tolist() == [True, False]
            assert found.items[0] == [int(key) for key in keys[np.argsort(-scores[0])] if key not in (10, 11)]
            np.testing.assert_allclose(found.scores[0], np.sort(scores[0, 2:])[::-1], rtol=1e-5)
            answered = where.recommender().top(features=[{"user": 7}, {"user": 8}], k=6)
            assert answered.items == [[key for key in keys[np.argsort(-scores[0])].tolist() if key != 11], []]
        with pytest.raises(StoreError, match="1 of the users were erased"):
            again().collection("items").write(content.take(np.array([0])), users=users)
