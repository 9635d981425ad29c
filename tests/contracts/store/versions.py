"""Names, versions and their states: what is written, published, held, promoted, expired."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.store import (
    Collection,
    GateHeld,
    StaleParent,
    Store,
    StoreError,
    UnknownCollection,
    UnknownVersion,
    UnknownView,
)
from embeddings.vectors.item_vectors import FOUND, MISSING
from tests.contracts.store.base import Base, Reopen, items, publish


class Versions(Base):
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
        assert collection.settings("limits") == {}
        collection.save_settings("limits", "bpr", {"limits": {"cosine_mean": 0.9}})
        collection.save_settings("limits", "two_tower", {"limits": {}})
        collection.save_settings("canary", "bpr", {"other": 1})
        collection.save_settings("limits", "bpr", {"limits": {"cosine_mean": 0.95}})
        found = again().collection("items")
        kept = {"bpr": {"limits": {"cosine_mean": 0.95}}, "two_tower": {"limits": {}}}
        assert found.settings("limits") == kept
        found.save_settings("limits", "two_tower", None)
        assert set(collection.settings("limits")) == {"bpr"}
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
