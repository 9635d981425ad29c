"""What every feature store promises, one suite run over each implementation: embedded, Redis, object storage."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.store import (
    Collection,
    GateHeld,
    StaleParent,
    Store,
    StoreError,
    UnknownCollection,
    UnknownVersion,
    UnknownView,
    ViewExists,
    open_store,
)
from embeddings.store.backends import redis_packed
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING, ItemIdError, ItemVectors
from tests.contracts import store_servers

Reopen = Callable[[], Store]


def items(ids: object, fill: float = 1.0, dim: int = 4, **columns: object) -> ItemVectors:
    num_ids = len(ids)  # type: ignore[arg-type]
    vectors = np.random.default_rng(int(fill)).standard_normal((num_ids, dim)).astype(np.float32)
    vectors[:, 0] = fill
    return ItemVectors(ids, vectors, **columns)  # type: ignore[arg-type]


def publish(collection: Collection, content: ItemVectors, **fields: object) -> str:
    parent = collection.current()
    version = collection.write(content, parent=parent, **fields)  # type: ignore[arg-type]
    collection.publish(version, parent)
    return version


class StoreContract:
    """Inherited by each implementation, which provides ``store``: a fresh, empty one."""

    num_switches = 20

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def again(self, store: Store) -> Reopen:
        """Opens the same store as another process would, with nothing of what this one has at hand."""
        return lambda: open_store(store.root)

    @pytest.fixture
    def collection(self, store: Store) -> Collection:
        return store.collection("items")

    # --- stores within the store -----------------------------------------------------------------------------------

    def test_a_namespace_is_a_store_of_its_own(self, store: Store, again: Reopen) -> None:
        for number, place in enumerate((store, store.namespace("ads"), store.namespace("search"))):
            publish(place.collection("items"), items([number]))
            place.collection("items").create_view("raw", kind="identity")
        publish(store.namespace("ads").collection("only"), items([7]))
        assert [place.collections() for place in (store, store.namespace("ads"))] == [["items"], ["items", "only"]]
        other = again()
        for number, place in enumerate((other, other.namespace("ads"), other.namespace("search"))):
            reader = place.view_collection("raw").open()
            assert reader.keys.tolist() == [number]
        with pytest.raises(UnknownView):
            other.view_collection("only_rff")
        with pytest.raises(UnknownCollection):
            other.namespace("search").collection("only").open()
        with pytest.raises(ValueError, match="namespace"):
            store.namespace("../ads")

    # --- what is not there -----------------------------------------------------------------------------------------

    def test_an_empty_store_says_so(self, store: Store, collection: Collection) -> None:
        assert store.collections() == []
        assert not collection.exists()
        assert collection.current() is None
        assert collection.versions() == []
        assert collection.views() == []
        with pytest.raises(UnknownCollection, match="no published version yet"):
            collection.open()
        with pytest.raises(UnknownCollection, match="there is no collection 'items'"):
            collection.manifest("v000001")
        with pytest.raises(UnknownView):
            store.view_collection("items_rff")
        assert store.collections() == []

    @pytest.mark.parametrize("name", ["", "..", "a/b", "Items", "-a", "a" * 64, "a b", "a\n"])
    def test_names_that_cannot_be(self, store: Store, name: str) -> None:
        with pytest.raises(ValueError, match="collection name"):
            store.collection(name)

    def test_unknown_versions(self, collection: Collection) -> None:
        publish(collection, items([1]))
        for version in ("v000002", "v1", "../v000001", "latest"):
            with pytest.raises(UnknownVersion):
                collection.open(version)

    # --- versions and states ---------------------------------------------------------------------------------------

    def test_a_candidate_is_not_served(self, store: Store, collection: Collection) -> None:
        version = collection.write(items([1, 2]), job="j", missing=3)
        assert version == "v000001"
        assert collection.current() is None
        with pytest.raises(UnknownVersion, match="no published version yet"):
            collection.open()
        assert store.collections() == ["items"]
        manifest = collection.manifest(version)
        assert manifest["state"] == "candidate"
        assert manifest["published_at"] is None
        for field, value in {
            "collection": "items", "version": version, "parent": None, "anchor_generation": 1, "job": "j", "rows": 2,
            "carried": 0, "missing": 3, "dim": 4, "dtype": "float32", "alignment": {}, "gate": [], "views": [],
        }.items():  # fmt: skip
            assert manifest[field] == value, field
        assert {"name", "sha256", "bytes"} == set(manifest["files"][0])

    def test_states_follow_the_switches(self, collection: Collection) -> None:
        first = publish(collection, items([1], 1))
        second = publish(collection, items([1], 2))
        third = collection.write(items([1], 3), parent=second)
        collection.hold(third, ["cosine_mean is 0.1, below 0.85: look"])
        states = {manifest["version"]: manifest["state"] for manifest in collection.versions()}
        assert states == {first: "superseded", second: "published", third: "held"}
        assert collection.manifest(third)["reasons"] == ["cosine_mean is 0.1, below 0.85: look"]
        assert collection.manifest()["version"] == second
        assert collection.open().vectors[0, 0] == 2
        assert collection.open(third).vectors[0, 0] == 3

    def test_versions_stay_as_they_were(self, collection: Collection) -> None:
        first = publish(collection, items([1, 2], 1))
        reader = collection.open()
        before = reader.vectors.copy()
        publish(collection, items([1, 2, 3], 2))
        assert reader.version == first
        np.testing.assert_array_equal(reader.vectors, before)
        np.testing.assert_array_equal(collection.open(first).vectors, before)

    def test_publishing_is_fenced(self, collection: Collection) -> None:
        first = publish(collection, items([1], 1))
        ours = collection.write(items([1], 2), parent=first)
        theirs = collection.write(items([1], 3), parent=first)
        collection.publish(theirs, first)
        with pytest.raises(StaleParent, match=f"version {theirs} of 'items' is current, not {first}"):
            collection.publish(ours, first)
        with pytest.raises(StaleParent):
            collection.publish(ours, None)
        assert collection.current() == theirs
        # Publishing again what is current already is not an error: a retried run does it.
        collection.publish(theirs, first)

    def test_only_candidates_are_published_or_held(self, collection: Collection) -> None:
        first = publish(collection, items([1], 1))
        second = publish(collection, items([1], 2))
        with pytest.raises(StoreError, match="superseded"):
            collection.publish(first, second)
        for version in (first, second):
            with pytest.raises(StoreError, match="only a candidate can be held"):
                collection.hold(version, ["no"])

    def test_rollback(self, collection: Collection) -> None:
        first = publish(collection, items([1], 1))
        second = publish(collection, items([1], 2))
        with pytest.raises(StaleParent):
            collection.promote(first, "bad day", if_current=first)
        collection.promote(first, "bad day", if_current=second)
        assert collection.current() == first
        assert collection.manifest(second)["state"] == "superseded"
        assert collection.history()[-1]["reason"] == "bad day"
        assert collection.history()[-1]["kind"] == "promote"
        assert [switch["version"] for switch in collection.history()] == [first, second, first]
        collection.promote(second, "it was fine")
        assert collection.current() == second

    def test_a_stale_promotion_of_what_is_current_is_refused_unless_it_was_this_one(
        self, collection: Collection
    ) -> None:
        first = publish(collection, items([1], 1))
        second = publish(collection, items([1], 2))
        third = publish(collection, items([1], 3))
        collection.promote(first, "bad day", if_current=third, key="ours")
        # The answer was lost: asked again.
        collection.promote(first, "bad day", if_current=third, key="ours")
        for stale in (
            {"if_current": second, "reason": "bad day", "key": "ours"},
            {"if_current": third, "reason": "another reason", "key": "ours"},
            {"if_current": third, "reason": "bad day", "key": "another's"},
        ):
            with pytest.raises(StaleParent):
                collection.promote(first, **stale)
        collection.promote(first, "it is there", if_current=first)
        assert [switch["version"] for switch in collection.history()] == [first, second, third, first]

    def test_promotion_of_what_the_gate_held(self, collection: Collection) -> None:
        first = publish(collection, items([1], 1))
        held = collection.write(items([1], 2), parent=first)
        collection.hold(held, ["too far"])
        with pytest.raises(GateHeld, match="too far"):
            collection.promote(held, "I know")
        with pytest.raises(ValueError, match="say why"):
            collection.promote(held, " ", override_gate=True)
        assert collection.current() == first
        collection.promote(held, "I know", override_gate=True)
        assert collection.manifest(held)["state"] == "published"
        assert collection.history()[-1]["override_gate"] is True
        publish(collection, items([1], 3))
        assert collection.manifest(held)["state"] == "superseded"

    def test_an_override_of_the_gate_stays_with_its_version(self, collection: Collection, again: Reopen) -> None:
        first = publish(collection, items([1], 1))
        held = collection.write(items([1], 2), parent=first)
        collection.hold(held, ["it moved"])
        assert collection.manifest(held)["override"] is None
        collection.promote(held, "a new catalogue", override_gate=True, key="key_7")
        for version in (publish(collection, items([1], 3)), publish(collection, items([1], 4))):
            assert collection.manifest(version)["override"] is None
        collection.retain(1)
        found = again().collection("items")
        assert found.manifest(held)["state"] == "expired"
        override = found.manifest(held)["override"]
        assert (override["reason"], override["key"]) == ("a new catalogue", "key_7")
        assert override["at"] == found.history()[1]["at"]
        assert [switch["key"] for switch in found.history()] == [None, "key_7", None, None]

    def test_settings_are_kept_and_replaced(self, collection: Collection, again: Reopen) -> None:
        publish(collection, items([1], 1))
        assert collection.settings("calibration") == {}
        collection.save_settings("calibration", "bpr", {"limits": {"cosine_mean": 0.9}})
        collection.save_settings("calibration", "two_tower", {"limits": {}})
        collection.save_settings("canary", "bpr", {"other": 1})
        collection.save_settings("calibration", "bpr", {"limits": {"cosine_mean": 0.95}})
        found = again().collection("items")
        kept = {"bpr": {"limits": {"cosine_mean": 0.95}}, "two_tower": {"limits": {}}}
        assert found.settings("calibration") == kept
        found.save_settings("calibration", "two_tower", None)
        assert set(collection.settings("calibration")) == {"bpr"}
        assert collection.settings("canary") == {"bpr": {"other": 1}}
        with pytest.raises(ValueError, match=r"canary name '\.\./x'"):
            collection.save_settings("canary", "../x", {})

    def test_changes_name_their_version(self, collection: Collection) -> None:
        """'current' as a target would be written into the pointer as it is, and nothing could be served any more."""
        first = publish(collection, items([1], 1))
        second = publish(collection, items([1], 2))
        for change in (
            lambda: collection.promote("current", "again"),
            lambda: collection.publish("current", second),
            lambda: collection.hold("current", ["no"]),
        ):
            with pytest.raises(UnknownVersion, match="no name of a version"):
                change()
        assert collection.open().version == second
        assert [switch["version"] for switch in collection.history()] == [first, second]

    def test_promotion_of_a_candidate_that_failed_its_gate(self, collection: Collection) -> None:
        failed = {"metric": "finite", "value": 0.5, "threshold": 1.0, "verdict": "fail"}
        version = collection.write(items([1]), gate=[failed])
        with pytest.raises(GateHeld, match="finite"):
            collection.promote(version, "why not")

    def test_what_expired_elsewhere_is_not_served_by_name(self, collection: Collection, again: Reopen) -> None:
        first, second, third = (publish(collection, items([1], number)) for number in (1, 2, 3))
        other = again().collection("items")
        for version in (first, second, third):
            assert other.open(version).version == version
        assert collection.retain(2) == [first]
        for opened in (other, collection):
            with pytest.raises(UnknownVersion, match="expired"):
                opened.open(first)
            assert opened.open(second).lookup([1])[0].tolist() == [FOUND]
            assert opened.open().version == third

    def test_what_was_erased_elsewhere_is_not_served_by_name(self, collection: Collection, again: Reopen) -> None:
        versions = [publish(collection, items([1, 2], number)) for number in (1, 2)]
        other = again().collection("items")
        for version in versions:
            assert other.open(version).lookup([1, 2])[0].tolist() == [FOUND, FOUND]
        assert (collection.num_erasures(), other.num_erasures()) == (0, 0)
        collection.erase([1], "they asked")
        assert (collection.num_erasures(), other.num_erasures()) == (1, 1)
        for version in versions:
            assert other.open(version).lookup([1, 2])[0].tolist() == [MISSING, FOUND]

    def test_erasures_are_counted_across_switches(self, collection: Collection, again: Reopen) -> None:
        first = publish(collection, items([1, 2, 3], 1))
        other = again().collection("items")
        collection.erase([1], "they asked")
        assert other.open(first).lookup([1, 2, 3])[0].tolist() == [MISSING, FOUND, FOUND]
        publish(collection, items([2, 3], 2))
        collection.erase([2], "they asked")
        assert (collection.num_erasures(), other.num_erasures()) == (2, 2)
        assert other.open(first).lookup([1, 2, 3])[0].tolist() == [MISSING, MISSING, FOUND]

    def test_retention(self, collection: Collection, again: Reopen) -> None:
        versions = [publish(collection, items([1], fill), anchor_version="v000001") for fill in range(1, 7)]
        collection.promote(versions[3], "rollback")
        held = collection.write(items([1], 9), parent=versions[3])
        collection.hold(held, ["no"])
        reader = collection.open(versions[1])
        expired = collection.retain(2)
        # Kept: the last two served (the fourth, current by rollback, and the sixth), what is newer than the older of
        # them, and the anchor that the averages go back to.
        assert expired == versions[1:3]
        states = [manifest["state"] for manifest in collection.versions()]
        assert states == ["superseded", "expired", "expired", "published", "superseded", "superseded", "held"]
        assert reader.lookup([1])[1][0, 0] == 2
        collection_again = again().collection("items")
        for call in (lambda: collection_again.open(versions[1]), lambda: collection_again.promote(versions[1], "back")):
            with pytest.raises(UnknownVersion, match="expired"):
                call()
        assert collection_again.open(versions[0]).vectors[0, 0] == 1
        assert collection_again.manifest(versions[1])["rows"] == 1
        assert collection.retain(2) == []
        # Numbers are not used again.
        assert publish(collection, items([1])) == "v000008"

    # --- contents --------------------------------------------------------------------------------------------------

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
        found = reader.neighbors(query, 7)
        assert [item for item, _ in found] == (expected * 2).tolist()
        np.testing.assert_allclose(
            [cosine for _, cosine in found], unit[expected] @ query / np.linalg.norm(query), atol=1e-6
        )
        own = reader.neighbors(84, 3)
        assert 84 not in [item for item, _ in own]
        assert [item for item, _ in own] == (np.argsort(-(unit @ unit[42]))[1:4] * 2).tolist()
        assert len(reader.neighbors(84, 10_000)) == 499
        assert len(reader.neighbors(query, 10_000)) == 500
        with pytest.raises(StoreError, match="no item 85"):
            reader.neighbors(85)
        for bad in (np.zeros(8), np.ones(7), np.full(8, np.nan)):
            with pytest.raises(ValueError, match="finite coordinates"):
                reader.neighbors(bad)
        with pytest.raises(ValueError, match="at least 1"):
            reader.neighbors(84, 0)

    def test_neighbors_of_a_single_item(self, collection: Collection) -> None:
        publish(collection, items(["a"]))
        assert collection.open().neighbors("a", 5) == []

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

    # --- views -----------------------------------------------------------------------------------------------------

    def test_views(self, store: Store, collection: Collection) -> None:
        with pytest.raises(UnknownCollection):
            collection.create_view("items_rff")
        publish(collection, items([1, 2], dim=6))
        view = collection.create_view("items_rff")
        assert {name: view[name] for name in ("name", "collection", "kind", "dim", "sigma", "seed", "frequencies")} == {
            "name": "items_rff", "collection": "items", "kind": "rff", "dim": 12, "sigma": 0.4, "seed": 0,
            "frequencies": "orthogonal",
        }  # fmt: skip
        assert view["anchor_generation"] == 1
        assert view["materialized"] is False
        assert collection.create_view("items_rff") == view
        with pytest.raises(ViewExists, match="sigma"):
            collection.create_view("items_rff", sigma=0.5)
        other = store.collection("others")
        publish(other, items([1]))
        with pytest.raises(ViewExists, match="exists in collection 'items'"):
            other.create_view("items_rff")
        assert store.view_collection("items_rff") is collection
        collection.create_view("plain", kind="identity")
        assert [entry["name"] for entry in collection.views()] == ["items_rff", "plain"]
        assert collection.view("plain")["dim"] == 6

        status, vectors = collection.open().lookup([2, 5, 1])
        phi = collection.view_transform("items_rff", vectors)
        u = collection.frequencies("items_rff").astype(np.float64)
        unit = vectors[[0, 2]] / np.linalg.norm(vectors[[0, 2]], axis=1, keepdims=True)
        expected = np.hstack([np.cos(unit @ u.T), np.sin(unit @ u.T)]) / np.sqrt(6)
        np.testing.assert_allclose(phi[[0, 2]], expected, atol=1e-6)
        assert status[1] == MISSING
        assert not phi[1].any()
        np.testing.assert_array_equal(collection.view_transform("plain", vectors), vectors)

        version = publish(collection, items([1, 2], 2, dim=6))
        manifest = collection.manifest(version)
        assert {entry["name"]: entry["sha256"] for entry in manifest["views"]} == {
            "items_rff": view["sha256"],
            "plain": None,
        }
        assert "frequencies-items_rff.arrow" in {entry["name"] for entry in manifest["files"]}

        collection.delete_view("items_rff")
        with pytest.raises(UnknownView, match=r"no view 'items_rff' \(there are: plain\)"):
            collection.view("items_rff")
        with pytest.raises(UnknownView):
            collection.delete_view("items_rff")
        assert collection.create_view("items_rff", sigma=0.5)["sigma"] == 0.5

    def test_a_materialized_view_serves_what_a_computed_one_does(self, collection: Collection) -> None:
        parameters = {"dim": 24, "sigma": 0.9, "seed": 5}
        for name, materialized in (("stored", True), ("computed", False)):
            view = collection.create_view(
                name,
                **parameters,
                materialized=materialized,
                dim_in=6,
                anchor_generation=1,  # type: ignore[arg-type]
            )
            assert view["materialized"] is materialized
        first = publish(collection, items(range(10, 40), 1, dim=6))
        second = publish(collection, items(range(20, 50), 2, dim=6))
        asked = [25, 12, 99, 45, 25, 39]
        for version in (first, second, "current"):
            status, stored = collection.view_lookup("stored", asked, version)
            same, computed = collection.view_lookup("computed", asked, version)
            np.testing.assert_array_equal(status, same)
            np.testing.assert_array_equal(status, collection.open(version).lookup(asked)[0])
            # float32 products of another number of rows may round in another order.
            np.testing.assert_allclose(stored, computed, atol=1e-6)
            assert not stored[2].any()
            np.testing.assert_allclose(np.linalg.norm(stored[status != MISSING], axis=1), 1, atol=1e-6)
        assert [status.tolist() for status, _ in (collection.view_lookup("stored", [], second),)] == [[]]
        with pytest.raises(ItemIdError):
            collection.view_lookup("stored", ["a"])

    def test_materializing_changes_no_value_and_needs_no_other_name(self, collection: Collection) -> None:
        publish(collection, items([1, 2], 1, dim=6))
        view = collection.create_view("v")
        before = collection.view_lookup("v", [1, 2])[1]
        again = collection.create_view("v", materialized=True)
        assert again == {**view, "materialized": True}
        np.testing.assert_array_equal(collection.view_lookup("v", [1, 2])[1], before)
        publish(collection, items([1, 2], 1, dim=6))
        np.testing.assert_allclose(collection.view_lookup("v", [1, 2])[1], before, atol=1e-6)
        assert collection.create_view("v", materialized=False) == view
        np.testing.assert_allclose(collection.view_lookup("v", [1, 2])[1], before, atol=1e-6)

    def test_a_view_of_another_seed_by_the_same_name_is_not_served_old_rows(self, collection: Collection) -> None:
        publish(collection, items([1, 2], 1, dim=6))
        collection.create_view("v", materialized=True)
        publish(collection, items([1, 2], 1, dim=6))
        collection.view_lookup("v", [1])
        collection.delete_view("v")
        collection.create_view("v", materialized=True, seed=9)
        vectors = collection.open().lookup([1])[1]
        np.testing.assert_allclose(
            collection.view_lookup("v", [1])[1], collection.view_transform("v", vectors), atol=1e-6
        )

    def test_a_version_keeps_its_rotation(self, collection: Collection) -> None:
        rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
        first = publish(collection, items([1], dim=6))
        second = publish(collection, items([1], dim=6), rotation=rotation, alignment={"kind": "procrustes"})
        third = publish(collection, items([1], dim=6), alignment={"kind": "procrustes"})
        np.testing.assert_array_equal(collection.rotation(first), np.eye(6))
        np.testing.assert_array_equal(collection.rotation(second), rotation)
        with pytest.raises(UnknownVersion, match="not kept"):
            collection.rotation(third)

    def test_the_collection_of_a_view_is_found_again(self, store: Store, collection: Collection) -> None:
        other = store.collection("others")
        for one in (collection, other):
            publish(one, items([1]))
        collection.create_view("v")
        for _ in range(2):
            assert store.view_collection("v") is collection
        collection.delete_view("v")
        with pytest.raises(UnknownView):
            store.view_collection("v")
        other.create_view("v")
        assert store.view_collection("v") is other

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"name": "../x"}, "view name"),
            ({"kind": "svd"}, "rff, identity"),
            ({"dim": 5}, "even"),
            ({"sigma": -1.0}, "positive"),
            ({"frequencies": "halton"}, "orthogonal, gaussian, structured"),
            ({"kind": "identity", "dim": 9}, "identity view"),
        ],
    )
    def test_views_that_cannot_be(self, collection: Collection, arguments: dict[str, object], message: str) -> None:
        publish(collection, items([1]))
        with pytest.raises(ValueError, match=message):
            collection.create_view(**{"name": "v", **arguments})  # type: ignore[arg-type]
        assert collection.views() == []

    def test_a_view_belongs_to_an_anchor_generation(self, collection: Collection) -> None:
        first = publish(collection, items([1], dim=4))
        old = collection.create_view("v")
        second = publish(collection, items([1], dim=6), anchor_generation=2)
        with pytest.raises(UnknownView, match="not defined for anchor generation 2"):
            collection.view("v")
        assert collection.views() == []
        new = collection.create_view("v")
        assert (new["dim"], new["anchor_generation"]) == (12, 2)
        assert collection.view("v", second) == new
        assert collection.view("v", first) == old
        assert collection.frequencies("v", first).shape == (4, 4)
        assert collection.frequencies("v").shape == (6, 6)

    # --- several processes -----------------------------------------------------------------------------------------

    def test_others_follow(self, collection: Collection, again: Reopen) -> None:
        first = publish(collection, items([1, 2], 1))
        collection.create_view("v")
        other = again().collection("items")
        assert other.open().version == first
        assert other.view("v") == collection.view("v")
        second = publish(collection, items([1, 2], 2))
        assert other.current() == second
        assert other.open().lookup([2])[1][0, 0] == 2
        other.promote(first, "back")
        assert collection.current() == first
        assert collection.history()[-1]["reason"] == "back"
        third = collection.write(items([1], 3), parent=first)
        other.hold(third, ["no"])
        assert collection.manifest(third)["reasons"] == ["no"]
        other.save_settings("canary", "genre", {"threshold": 0.5})
        assert collection.settings("canary") == {"genre": {"threshold": 0.5}}
        other.delete_view("v")
        assert collection.views() == []
        assert again().collections() == ["items"]

    def test_writers_take_turns(self, collection: Collection, again: Reopen) -> None:
        """Numbers are given once, and of several who publish on one parent one does."""
        parent = publish(collection, items([1], 1))
        ends: list[object] = []

        def refresh(number: int) -> None:
            own = again().collection("items")
            version = own.write(items([1], number), parent=parent)
            try:
                own.publish(version, parent)
                ends.append(version)
            except StaleParent:
                ends.append(None)

        threads = [threading.Thread(target=refresh, args=(number,)) for number in (2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (served,) = [end for end in ends if end is not None]
        assert len(ends) == 3
        assert collection.current() == served
        assert [manifest["version"] for manifest in collection.versions()] == [f"v{n:06d}" for n in range(1, 5)]
        assert collection.open().vectors.shape == (1, 4)

    def test_nothing_is_torn(self, collection: Collection, again: Reopen) -> None:
        """Every vector of version N is N everywhere, and readers see no version but whole ones, and none before."""
        ids = np.arange(300)
        stop = threading.Event()
        problems: list[str] = []
        num_reads = [0, 0]
        publish(collection, ItemVectors(ids, np.full((300, 4), 1.0)))

        def read(number: int) -> None:
            own = again().collection("items")
            latest = 0
            while not stop.is_set() or num_reads[number] < 3:
                try:
                    time.sleep(0.001)
                    reader = own.open()
                    status, vectors = reader.lookup(ids)
                except UnknownVersion as error:
                    problems.append(f"gone within its grace: {error}")
                    return
                served = int(reader.version[1:])
                if not (status == FOUND).all() or not (vectors == served).all() or served < latest:
                    problems.append(f"{reader.version} after {latest} holds {np.unique(vectors)}")
                    return
                latest = served
                num_reads[number] += 1

        threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(2, self.num_switches + 2):
                publish(collection, ItemVectors(ids, np.full((300, 4), float(number))))
                collection.retain(2)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert problems == []
        assert min(num_reads) >= 3

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

    # --- erasure ---------------------------------------------------------------------------------------------------

    def test_erased_ids_leave_every_version_and_stay_out(self, collection: Collection, again: Reopen) -> None:
        versions = [publish(collection, items([1, 2, 3, 4], fill=number)) for number in (1, 2, 3)]
        publish(collection, items([1, 3, 4], fill=4))
        kept = {version: collection.open(version).lookup([1, 3, 4])[1].copy() for version in versions}
        done = collection.erase([2, 9], "they asked")
        assert done["rows"] == 3
        assert set(versions) <= set(done["versions"])
        for where in (collection, again().collection("items")):
            for version in versions:
                status, vectors = where.open(version).lookup([1, 2, 3, 4])
                assert status.tolist() == [FOUND, MISSING, FOUND, FOUND]
                np.testing.assert_array_equal(vectors[[0, 2, 3]], kept[version])
                assert where.manifest(version)["rows"] == 3
            assert where.open().lookup([1, 2])[0].tolist() == [FOUND, MISSING]
            with pytest.raises(StoreError, match="were erased"):
                where.write(items([2, 5]))
        assert collection.readmit([2, 3], "they came back") == 1
        publish(collection, items([1, 2, 3], fill=5))
        assert again().collection("items").open().lookup([1, 2])[0].tolist() == [FOUND, FOUND]
        assert [note["kind"] for note in again().collection("items").erasures()] == ["erase", "readmit"]


class TestEmbeddedStore(StoreContract):
    @pytest.fixture(params=["path", "url"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
        root = tmp_path / "a store"
        return open_store(root if request.param == "path" else "file://" + str(root).replace(" ", "%20"))

    @given(stored=st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), data=st.data())
    def test_lookup_is_a_dictionary(
        self, tmp_path_factory: pytest.TempPathFactory, stored: set[int], data: st.DataObject
    ) -> None:
        collection = open_store(tmp_path_factory.mktemp("store")).collection("items")
        ids = list(stored)
        content = items(ids, dim=3)
        publish(collection, content)
        asked = data.draw(st.lists(st.sampled_from(ids) | st.integers(-(2**63), 2**63 - 1), max_size=20))
        status, vectors = collection.open().lookup(np.array(asked, dtype=np.int64))
        by_id = dict(zip(content.keys.tolist(), content.vectors, strict=True))
        assert status.tolist() == [FOUND if wanted in by_id else MISSING for wanted in asked]
        for wanted, vector in zip(asked, vectors, strict=True):
            np.testing.assert_array_equal(vector, by_id.get(wanted, np.zeros(3)))


class TestRedisStore(StoreContract):
    @pytest.fixture
    def url(self, redis_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
        with store_servers.redis_prefix(redis_url, request.node.name) as url:
            yield url

    @pytest.fixture
    def store(self, url: str, tmp_path: Path) -> Store:
        return open_store(f"{url}&cache={tmp_path / 'cache'}")

    @pytest.fixture
    def again(self, url: str, tmp_path: Path) -> Reopen:
        numbers = itertools.count()
        return lambda: open_store(f"{url}&cache={tmp_path / f'other{next(numbers)}'}")


class TestPackedRedisStore(TestRedisStore):
    """Rows in blocks, two or three to a block."""

    @pytest.fixture
    def url(self, redis_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        monkeypatch.setattr(redis_packed, "BLOCK_BYTES", 48)
        with store_servers.redis_prefix(redis_url, request.node.name) as url:
            yield f"{url}&rows=packed"


class TestObjectStore(StoreContract):
    # Each takes some hundred requests.
    num_switches = 3

    @pytest.fixture
    def url(self, s3_address: str, tmp_path: Path) -> str:
        return f"s3://vectors/{tmp_path.name}?endpoint_override={s3_address}&scheme=http&follow_seconds=0"

    @pytest.fixture
    def store(self, url: str, tmp_path: Path) -> Store:
        return open_store(f"{url}&cache={tmp_path / 'cache'}")

    @pytest.fixture
    def again(self, url: str, tmp_path: Path) -> Reopen:
        numbers = itertools.count()
        return lambda: open_store(f"{url}&cache={tmp_path / f'other{next(numbers)}'}")


@pytest.mark.process
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "use a path"),
        ("file://elsewhere/x", "use a path"),
        ("redis://127.0.0.1/0?prefx=a", "no option prefx"),
        ("redis://127.0.0.1/0?follow_seconds=soon", "follow_seconds is 'soon'"),
        ("redis://127.0.0.1/0?lease_seconds=0", "lease_seconds is '0'"),
        ("redis://127.0.0.1/0?grace_seconds=x", "grace_seconds"),
        ("s3:///prefix", "s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/prefix", "credentials into the environment"),
    ],
)
def test_urls_that_cannot_be(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
