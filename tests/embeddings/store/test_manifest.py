"""Manifests: what is on disk is what is read and written again, and what is no manifest is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import CorruptStore, open_store
from embeddings.store.files import encode_document, read_document
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest
from embeddings.vectors.item_vectors import ItemVectors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The manifest of a version with a view, a rotation, and entries that the store does not know."""
    collection = open_store(tmp_path).collection("items")
    collection.create_view("v", dim_in=4, anchor_generation=1)
    version = collection.write(
        ItemVectors(np.arange(9), np.ones((9, 4))),
        gate=[{"metric": "cosine_mean", "verdict": "pass"}],
        alignment={"kind": "none"},
        extra={"model": "bpr", "lineage": None, "metrics": {"b": 1.0, "a": [2]}},
        rotation=np.eye(4),
    )
    return collection.directory / "versions" / version / MANIFEST_FILE


def document_at(path: Path) -> dict[str, Any]:
    document = read_document(path)
    assert document is not None
    return document


def test_what_is_read_is_written_again_byte_for_byte(path: Path) -> None:
    manifest = VersionManifest.from_json(document_at(path), path)
    assert encode_document(manifest.to_json()) == path.read_bytes()
    assert set(manifest.extra) == {"model", "lineage", "metrics"}
    assert [file.name for file in manifest.files] == ["items.arrow", "frequencies-v.arrow", "rotation.arrow"]
    assert manifest.items_file == manifest.files[0]
    assert manifest.file("nothing") is None


def test_the_names_are_in_the_order_of_the_document(path: Path) -> None:
    document = json.loads(path.read_bytes())["document"]
    again = VersionManifest.from_json(document, path).to_json()
    assert json.dumps(again) == json.dumps(document)


def test_an_erasure_is_an_entry_only_where_there_was_one(path: Path) -> None:
    manifest = VersionManifest.from_json(document_at(path), path)
    assert "erasures" not in manifest.to_json()
    erased = replace(manifest, erasures=({"at": "now", "rows": 1},)).to_json()
    assert erased["erasures"] == [{"at": "now", "rows": 1}]
    assert VersionManifest.from_json(erased, path).erasures == ({"at": "now", "rows": 1},)


def test_a_copy_changes_nothing(path: Path) -> None:
    manifest = VersionManifest.from_json(document_at(path), path)
    manifest.to_json()["metrics"]["a"].append(3)
    assert manifest.extra["metrics"]["a"] == [2]


@pytest.mark.parametrize("missing", ["files", "dim", "anchor_version"])
def test_a_document_without_what_every_manifest_has_is_damaged(path: Path, missing: str) -> None:
    document = document_at(path)
    del document[missing]
    path.write_bytes(encode_document(document))
    collection = open_store(path.parents[4]).collection("items")
    with pytest.raises(CorruptStore, match=f"is no manifest of a version .*{missing}.*restore it from a backup"):
        collection.open("v000001")
