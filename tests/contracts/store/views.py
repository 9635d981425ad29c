"""Views of a collection: computed and materialized, their seeds, rotations and generations."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.store import Collection, Store, UnknownCollection, UnknownVersion, UnknownView, ViewExists
from embeddings.store.generation_maps import GenerationMap
from embeddings.vectors.item_vectors import MISSING, ItemIdError, ItemVectors, unit_rows
from tests.contracts.store.base import Base, Reopen, items, publish


class Views(Base):
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

    def test_a_version_keeps_its_rotation(self, collection: Collection, again: Reopen) -> None:
        rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
        first = publish(collection, items([1], dim=6))
        second = publish(collection, items([1], dim=6), rotation=rotation, alignment={"kind": "procrustes"})
        third = publish(collection, items([1], dim=6), alignment={"kind": "procrustes"})
        for where in (collection, again().collection("items")):
            np.testing.assert_array_equal(where.rotation(first), np.eye(6))
            np.testing.assert_array_equal(where.rotation(second), rotation)
            with pytest.raises(UnknownVersion, match="not kept"):
                where.rotation(third)

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

    def test_views_of_an_earlier_generation(self, store: Store, collection: Collection, again: Reopen) -> None:
        """The map of a generation's first version is used for later ones, by every process, and outlives erasures."""
        publish(collection, items([1, 2], dim=4))
        collection.create_view("items_rff", seed=3)
        frequencies = collection.frequencies("items_rff").astype(np.float64)
        matrix = np.random.default_rng(0).standard_normal((7, 4))
        held = GenerationMap(3, matrix, {}, ("it is wrong",))
        first = publish(
            collection, items([1, 2, 3], 2, dim=6), anchor_generation=5,
            maps=lambda written: [GenerationMap(1, matrix, {"r2": 0.5}), held],
        )  # fmt: skip
        publish(collection, items([1, 2, 3, 4], 3, dim=6), anchor_generation=5, anchor_version=first)
        assert collection.earlier_generations() == [1]

        def check(opened: Collection) -> None:
            assert [view["name"] for view in opened.views()] == ["items@g1", "items_rff@g1"]
            unit = unit_rows(opened.open().lookup([4, 1])[1])[0]
            mapped = unit_rows(unit @ matrix[:-1] + matrix[-1])[0]
            status, vectors = opened.view_lookup("items@g1", [4, 9, 1])
            assert status.tolist() == [1, MISSING, 1]
            np.testing.assert_allclose(vectors[[0, 2]], mapped, atol=1e-6)
            assert not vectors[1].any()
            assert opened.cached_view("items@g1") == opened.view("items@g1")
            angles = mapped @ frequencies.T
            expected = np.hstack([np.cos(angles), np.sin(angles)]) / 2
            np.testing.assert_allclose(opened.view_lookup("items_rff@g1", [4, 1])[1], expected, atol=1e-6)
            np.testing.assert_allclose(
                opened.view_transform("items_rff@g1", opened.open().lookup([4])[1]), expected[:1], atol=1e-6
            )
            with pytest.raises(UnknownView, match="is held: it is wrong"):
                opened.view("items@g3")

        check(collection)
        other = again()
        reading = other.view_collection("items_rff@g1")
        reading.open()
        assert reading.cached_view("items@g1") is None
        check(reading)
        collection.erase([2], "asked for")
        collection.retain(1)
        check(collection)
        check(again().view_collection("items@g1"))
        assert [view["name"] for view in collection.views("v000001")] == ["items_rff"]

    def test_exponential_views(self, store: Store, collection: Collection, again: Reopen) -> None:
        """Products with a version's own anchors: the most frequent items of the first version, in every later one."""
        ids = list(range(1, 9))
        counts = np.array([3, 9, 1, 7, 8, 2, 5, 4])
        first = items(ids, dim=4, counts=counts)
        publish(collection, first)
        view = collection.create_view("near", kind="exponential", dim=4)
        assert {name: view[name] for name in ("kind", "dim", "dim_in", "sigma", "seed", "sha256")} == {
            "kind": "exponential", "dim": 4, "dim_in": 4, "sigma": None, "seed": None, "sha256": None,
        }  # fmt: skip
        assert collection.create_view("near", kind="exponential") == view
        anchors = np.array([1, 4, 3, 6])  # rows of ids 2, 5, 4, 7

        def check(opened: Collection, vectors: np.ndarray, lost: int | None = None) -> None:
            unit = unit_rows(vectors)[0]
            expected = np.exp(unit @ unit[anchors].T)
            if lost is not None:
                expected[:, lost] = 1
            status, features = opened.view_lookup("near", [3, 99, 1])
            assert status.tolist() == [1, MISSING, 1]
            np.testing.assert_allclose(features[[0, 2]], expected[[2, 0]], rtol=1e-5)
            assert not features[1].any()
            assert opened.cached_view("near") == opened.view("near")
            np.testing.assert_allclose(opened.view_transform("near", vectors[[2]]), expected[[2]], rtol=1e-5)

        check(collection, first.vectors)
        # Another basis and other lengths change nothing, nor does another generation with a view of that name.
        turned = 2 * first.vectors @ np.linalg.qr(np.random.default_rng(1).standard_normal((4, 4)))[0].astype("f4")
        publish(collection, ItemVectors(ids, turned))
        check(collection, turned)
        np.testing.assert_allclose(
            collection.view_lookup("near", ids)[1], collection.view_lookup("near", ids, "v000001")[1], rtol=1e-5
        )
        wider = items(ids, 5, dim=6)
        collection.create_view("near", kind="exponential", dim_in=6, anchor_generation=2, items=wider)
        publish(collection, wider, anchor_generation=2)
        check(collection, wider.vectors)
        reading = again().view_collection("near")
        reading.open()
        assert reading.cached_view("near") is None
        check(reading, wider.vectors)
        # An erased anchor is in no list, and its coordinate tells nothing.
        collection.erase([5], "asked for")
        check(collection, wider.vectors, lost=1)
        check(again().collection("items"), wider.vectors, lost=1)
        assert collection.settings("anchors")["near"]["ids"] == [2, 4, 7]

        with pytest.raises(ViewExists, match="other dim"):
            collection.create_view("near", kind="exponential", dim=2)
        with pytest.raises(ValueError, match="set materialized to false"):
            collection.create_view("stored", kind="exponential", dim=2, materialized=True)
        with pytest.raises(ValueError, match="8 anchors of 7 items: take a smaller dim"):
            collection.create_view("many", kind="exponential", dim=8)
        assert collection.create_view("all", kind="exponential")["dim"] == 7
        collection.delete_view("near")
        assert "near" not in collection.settings("anchors")
