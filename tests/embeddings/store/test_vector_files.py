"""Files of a version, read back with the libraries that they are for."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from embeddings.store import Collection, open_store
from embeddings.store.vector_files import Exported, export_vectors
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors

DIM, NUM_ITEMS = 6, 40


@pytest.fixture(params=["int64", "text"])
def collection(request: pytest.FixtureRequest, tmp_path) -> Collection:
    """Item 3 has no vector."""
    ids = [number * 10 for number in range(NUM_ITEMS)]
    vectors = np.random.default_rng(0).standard_normal((NUM_ITEMS, DIM)).astype(np.float32)
    statuses = np.full(NUM_ITEMS, FOUND, np.uint8)
    statuses[3] = MISSING
    vectors[3] = 0
    collection = open_store(tmp_path / "store").collection("items")
    named = ids if request.param == "int64" else [f"Käse {one}" for one in ids]
    collection.publish(collection.write(ItemVectors(named, vectors, statuses=statuses), parent=None), None)
    return collection


def test_parquet(collection, tmp_path):
    assert export_vectors(collection, tmp_path / "v.parquet") == Exported("v000001", NUM_ITEMS - 1)
    table = pq.read_table(tmp_path / "v.parquet")
    assert table.num_rows == NUM_ITEMS - 1
    assert set(table["status"].to_pylist()) == {"found"}
    _, vectors = collection.open().lookup(table["id"])
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), vectors)
    assert table.schema.metadata[b"version"] == b"v000001"


def test_safetensors(collection, tmp_path):
    export_vectors(collection, tmp_path / "v.safetensors")
    with safe_open(str(tmp_path / "v.safetensors"), "np") as file:
        assert file.metadata() == {"collection": "items", "version": "v000001", "view": ""}
        ids, vectors = file.get_tensor("ids"), file.get_tensor("vectors")
    ids = json.loads(ids.tobytes()) if ids.dtype == np.uint8 else ids
    np.testing.assert_array_equal(vectors, collection.open().lookup(ids)[1])
    assert len(vectors) == NUM_ITEMS - 1


@pytest.mark.parametrize("library", ["usearch", "faiss"])
def test_an_index_finds_each_item_by_its_own_vector(collection, tmp_path, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    path = tmp_path / f"v.{library}"
    export_vectors(collection, path)
    beside = pq.read_table(tmp_path / f"v.{library}.ids.parquet")
    vectors = collection.open().lookup(beside["id"])[1]
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    if library == "usearch":
        from usearch.index import Index

        index = Index.restore(str(path))
        keys = np.asarray(index.search(vectors, 1).keys)[:, 0]
    else:
        import faiss

        cosines, found = faiss.read_index(str(path)).search(vectors, 1)
        np.testing.assert_allclose(cosines[:, 0], 1.0, rtol=1e-5)
        keys = found[:, 0]
    np.testing.assert_array_equal(keys, beside["key"].to_numpy())


def test_what_cannot_be_written_is_refused(collection, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"use one of \.parquet, \.safetensors, \.usearch, \.faiss"):
        export_vectors(collection, tmp_path / "v.npz")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'evenkeel\[faiss\]'"):
        export_vectors(collection, tmp_path / "v.faiss")
    assert not list(tmp_path.glob("v.*"))


def test_a_file_with_ids_that_were_erased_meanwhile_is_not_kept(collection, tmp_path, monkeypatch):
    numbers = iter([0, 1])
    monkeypatch.setattr(type(collection), "num_erasures", lambda _: next(numbers))
    for ending in ("parquet", "usearch"):
        numbers = iter([0, 1])
        with pytest.raises(ValueError, match="export it again"):
            export_vectors(collection, tmp_path / f"v.{ending}")
    assert not list(tmp_path.glob("v.*"))
