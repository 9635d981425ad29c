"""Views in the embedded store: where materialized rows lie, damage to them, and changes by another process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embeddings.rff.feature_map import FeatureMap
from embeddings.rff.registry import FEATURE_MAPS
from embeddings.store import Collection, CorruptStore, UnknownView, ViewExists, open_store
from embeddings.store.files import encode_document, read_document, replace_document
from embeddings.store.view_entry import ViewEntry
from embeddings.store.views import ViewRegistry, define_view
from embeddings.vectors.item_vectors import ItemVectors
from embeddings.vectors.lazy_rows import Array


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return open_store(tmp_path / "store").collection("items")


def publish(collection: Collection, num_items: int = 20, dim: int = 4, seed: int = 0) -> str:
    vectors = np.random.default_rng(seed).standard_normal((num_items, dim)).astype(np.float32)
    parent = collection.current()
    version = collection.write(ItemVectors(np.arange(num_items), vectors), parent=parent)
    collection.publish(version, parent)
    return version


def rows_file(collection: Collection, version: str, name: str = "v") -> Path:
    return collection.directory / "versions" / version / f"view-{name}.arrow"


def test_rows_lie_beside_the_version_and_are_what_is_served(collection: Collection) -> None:
    before = publish(collection)
    collection.create_view("v", materialized=True)
    collection.create_view("raw", kind="identity", materialized=True)
    version = publish(collection)
    assert not rows_file(collection, before).exists()
    assert not rows_file(collection, version, "raw").exists()
    names = {file["name"] for file in collection.manifest(version)["files"]}
    assert {"view-v.arrow", "frequencies-v.arrow"} <= names
    np.testing.assert_array_equal(collection.view_lookup("raw", [3])[1], collection.open().lookup([3])[1])
    # Stored rows are read: the view's own map is asked for nothing.
    collection._registry.features = None  # type: ignore[assignment, method-assign]
    status, phi = collection.view_lookup("v", [3, 99])
    assert status.tolist() == [1, 0]
    assert phi.shape == (2, 8)
    assert phi[0].any()


def test_what_is_mapped_is_what_has_been_looked_up(tmp_path: Path, collection: Collection) -> None:
    """Nothing is left to open, to check or to read of a view, in this process."""
    publish(collection)
    collection.create_view("stored", materialized=True)
    collection.create_view("computed", seed=1)
    collection.create_view("raw", kind="identity")
    version = publish(collection)
    reading = open_store(tmp_path / "store").collection("items")
    views = ["stored", "computed", "raw"]
    assert [reading.cached_view(view) for view in (*views, "nothing")] == [None] * 4
    reading.open()
    assert [reading.cached_view(view) is not None for view in (*views, "nothing")] == [False, False, True, False]
    for number, view in enumerate(views):
        reading.view_lookup(view, [3])
        assert [reading.cached_view(other) is not None for other in views[: number + 1]] == [True] * (number + 1)
        assert reading.cached_view(view, version) == reading.cached_view(view)
        if view == "stored":
            assert reading.cached_view("computed") is None
    assert reading.cached_view("stored", "v000001") is None
    collection.erase([19], "asked for")
    assert [reading.cached_view(view) for view in views] == [None] * 3
    publish(collection, num_items=19, seed=4)
    assert [reading.cached_view(view) for view in views] == [None] * 3


class Shifted(FeatureMap):
    """A map without a matrix: its seed is all it has."""

    def transform(self, h: Array) -> Array:
        return np.asarray(h, dtype=np.float32) + np.float32(self.parameters.seed)


def test_a_map_without_a_matrix_that_is_made_anew_is_not_served_by_old_rows(
    collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FEATURE_MAPS, "shifted", SimpleNamespace(load=lambda: Shifted))
    publish(collection)
    for seed in (1, 2):
        collection.create_view("v", kind="shifted", seed=seed, materialized=True)
        vectors = collection.open().lookup([3])[1]
        np.testing.assert_array_equal(collection.view_lookup("v", [3])[1], vectors + np.float32(seed))
        version = publish(collection)
        assert rows_file(collection, version).exists()
        assert "frequencies-v.arrow" not in {file["name"] for file in collection.manifest(version)["files"]}
        collection.delete_view("v")


def test_expired_rows_are_removed(collection: Collection) -> None:
    publish(collection)
    collection.create_view("v", materialized=True)
    versions = [publish(collection, seed=seed) for seed in range(3)]
    assert collection.retain(1)
    assert [rows_file(collection, version).exists() for version in versions] == [False, False, True]


def test_rows_with_a_flipped_bit_are_not_served(collection: Collection, caplog: pytest.LogCaptureFixture) -> None:
    publish(collection)
    collection.create_view("v", materialized=True)
    version = publish(collection)
    file = rows_file(collection, version)
    whole = collection.view_lookup("v", [1, 2])[1].copy()
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.unlink()
    file.write_bytes(damaged)
    again = open_store(collection.directory.parent.parent).collection("items")
    for _ in range(2):
        np.testing.assert_allclose(again.view_lookup("v", [1, 2])[1], whole, atol=1e-6)
    alerts = [record.getMessage() for record in caplog.records]
    assert len(alerts) == 1
    assert str(file) in alerts[0]
    assert "computed from the version's vectors" in alerts[0]
    # Restored, with rows that can be told from computed ones: they are served without a restart.
    damaged[len(damaged) // 2] ^= 1
    file.unlink()
    file.write_bytes(damaged)
    again.view_lookup("v", [1, 2])
    assert again._registry._stored.keys() == {file}
    np.testing.assert_array_equal(again.view_lookup("v", [1, 2])[1], whole)


def test_rows_of_another_shape_are_not_served(collection: Collection, caplog: pytest.LogCaptureFixture) -> None:
    publish(collection)
    collection.create_view("v", materialized=True)
    version = publish(collection)
    reader = collection._reader
    reader._manifests[version] = replace(reader.manifest(version), rows=19)
    reader._readers.clear()
    assert collection.view_lookup("v", [1])[1].any()
    assert "holds rows of shape (20, 8)" in caplog.text


def test_erased_rows_are_in_no_materialized_view(collection: Collection) -> None:
    publish(collection)
    collection.create_view("v", materialized=True)
    version = publish(collection)
    other = open_store(collection.directory.parent.parent).collection("items")
    before = [one.view_lookup("v", [3, 4])[1].copy() for one in (collection, other)]
    collection.erase([3], "asked for")
    assert not rows_file(collection, version).exists()
    for one, rows in zip((collection, other), before, strict=True):
        status, phi = one.view_lookup("v", [3, 4])
        assert status.tolist() == [0, 1]
        assert not phi[0].any()
        np.testing.assert_allclose(phi[1], rows[1], atol=1e-6)
        assert not one._registry._stored
    assert collection.view_lookup("v", [4])[1].any()


def test_what_another_process_does_to_a_view_is_seen(collection: Collection) -> None:
    publish(collection)
    other = open_store(collection.directory.parent.parent).collection("items")
    collection.create_view("v")
    assert other.view("v")["materialized"] is False
    collection.create_view("v", materialized=True)
    assert other.view("v")["materialized"] is True
    collection.delete_view("v")
    with pytest.raises(UnknownView):
        other.view("v")
    collection.create_view("v", seed=3)
    assert other.view("v")["seed"] == 3


def test_a_small_view_is_created_in_silence(collection: Collection) -> None:
    """The warning that it loses directions is for its maker to read (embeddings.rff.advice), not for a server's log."""
    publish(collection)
    assert collection.create_view("small", dim=2)["dim"] == 2


def test_an_identity_view_has_no_parameters() -> None:
    assert define_view("raw", 4, kind="identity").sigma is None


def test_what_a_killed_deletion_left_is_removed(collection: Collection) -> None:
    """The view is gone with the first step, and its files with the next writer."""
    publish(collection)
    collection.create_view("v")
    views = collection.directory / "views"
    (views / "v").rename(views / ".gone-killed")
    assert collection.view_names() == []
    publish(collection, seed=2)
    assert list(views.iterdir()) == []


def test_an_entry_keeps_the_bytes_of_its_file_and_what_another_release_wrote(collection: Collection) -> None:
    publish(collection)
    for kind in ("rff", "identity"):
        collection.create_view(kind, kind=kind)
        path = collection.directory / "views" / kind / "g0001.json"
        document = read_document(path)
        assert document is not None
        assert encode_document(ViewEntry.from_json(document, path).to_json()) == path.read_bytes()
        document["pooled"] = {"by": "week"}
        replace_document(path, document)
        assert collection.view(kind)["pooled"] == {"by": "week"}
        collection.create_view(kind, kind=kind, materialized=True)
        assert read_document(path) == {**document, "materialized": True}
    version = publish(collection)
    manifest = read_document(collection.directory / "versions" / version / "manifest.json")
    assert manifest is not None
    assert manifest["views"] == collection.views()


@pytest.mark.parametrize("field", ["kind", "materialized"])
def test_an_entry_that_lacks_a_field_is_named(collection: Collection, field: str) -> None:
    publish(collection)
    collection.create_view("v")
    path = collection.directory / "views" / "v" / "g0001.json"
    document = read_document(path)
    assert document is not None
    del document[field]
    replace_document(path, document)
    with pytest.raises(CorruptStore, match=rf"g0001.json: is no entry of a view \(.*{field}.*restore it from a backup"):
        collection.view("v")


def test_two_collections_that_make_one_name_at_once_do_not_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    films, songs = store.collection("films"), store.collection("songs")
    publish(films), publish(songs)
    create = ViewRegistry.create

    def late(self: ViewRegistry, *arguments: Any, **settings: Any) -> Any:
        monkeypatch.setattr(ViewRegistry, "create", create)
        songs.create_view("team")
        return create(self, *arguments, **settings)

    monkeypatch.setattr(ViewRegistry, "create", late)
    with pytest.raises(ViewExists, match="'songs'"):
        films.create_view("team")
    assert (films.view_names(), songs.view_names()) == ([], ["team"])
