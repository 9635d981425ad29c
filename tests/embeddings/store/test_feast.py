"""What Feast serves of an exported version is what the store serves."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.store import open_store
from embeddings.store.feast import export_feast
from embeddings.vectors.item_vectors import CARRIED, FOUND, ItemVectors

DIM = 6


def publish(store, name, ids, seed=0, dtype="float32"):
    generator = np.random.default_rng(seed)
    vectors = generator.standard_normal((len(ids), DIM), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    statuses = np.where(np.arange(len(ids)) % 3 == 0, CARRIED, FOUND).astype(np.uint8)
    collection = store.collection(name)
    items = ItemVectors(ids, vectors.astype(dtype).astype(np.float32), statuses=statuses)
    parent = collection.current()
    collection.publish(collection.write(items, parent=parent, dtype=dtype), parent)
    return collection


def test_source_holds_the_version(tmp_path):
    collection = publish(open_store(tmp_path / "store"), "items", [f"i{number}" for number in range(50)])
    assert export_feast(collection, tmp_path / "repo", entity="item_id") == "v000001"
    table = pq.read_table(tmp_path / "repo" / "data" / "items.parquet")
    status, vectors = collection.open().lookup(table["item_id"])
    assert len(table) == 50
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), vectors)
    assert table["status"].to_pylist() == [("missing", "found", "carried")[one] for one in status]
    settings = tmp_path / "repo" / "feature_store.yaml"
    settings.write_text(settings.read_text().replace("sqlite", "redis"))
    publish(open_store(tmp_path / "store"), "items", ["i1"], seed=1)
    assert export_feast(collection, tmp_path / "repo", entity="item_id") == "v000002"
    assert len(pq.read_table(tmp_path / "repo" / "data" / "items.parquet")) == 1
    assert "redis" in settings.read_text(), "what a user set must stay"
    assert sorted(path.name for path in (tmp_path / "repo").rglob("*")) == [
        "data", "feature_store.yaml", "features.py", "items.parquet",
    ]  # fmt: skip


def test_source_of_a_view_holds_its_features(tmp_path):
    collection = publish(open_store(tmp_path / "store"), "items", range(50))
    collection.create_view("items_rff", dim=8)
    export_feast(collection, tmp_path / "repo", view="items_rff")
    table = pq.read_table(tmp_path / "repo" / "data" / "items.parquet")
    features = collection.view_lookup("items_rff", table["item"])[1]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), features)


@pytest.mark.parametrize("view", [None, "items_rff"])
@pytest.mark.parametrize("ids", [[1, 2], ["a", "b"]])
def test_source_of_a_version_whose_rows_were_all_erased_has_none(tmp_path, ids, view):
    collection = publish(open_store(tmp_path / "store"), "items", ids)
    collection.create_view("items_rff", dim=8)
    export_feast(collection, tmp_path / "repo", view=view)
    before = pq.read_schema(tmp_path / "repo" / "data" / "items.parquet")
    collection.erase(ids, "they asked")
    export_feast(collection, tmp_path / "repo", view=view)
    table = pq.read_table(tmp_path / "repo" / "data" / "items.parquet")
    assert (len(table), table.schema) == (0, before)


def test_what_cannot_be_exported_is_refused(tmp_path):
    collection = publish(open_store(tmp_path), "items", [1, 2])
    for wrong in (*({"entity": name} for name in ("my item", "items", "vector", "class")), {"ttl_seconds": -1}):
        with pytest.raises(ValueError, match=r"take|expected"):
            export_feast(collection, tmp_path / "repo", **wrong)
    assert not (tmp_path / "repo").exists()


def test_names_that_python_keeps_for_itself_make_definitions_that_it_reads(tmp_path):
    export_feast(publish(open_store(tmp_path), "class", [1, 2]), tmp_path / "repo")
    ast.parse((tmp_path / "repo" / "features.py").read_text())


@pytest.fixture(scope="session")
def feast_python():
    """The interpreter of an environment with Feast, which has no place in ours: EVENKEEL_FEAST_PYTHON."""
    known = os.environ.get("EVENKEEL_FEAST_PYTHON")
    if not known:
        pytest.skip("no environment with Feast: docs/guides/store.md says how to make one")
    return Path(known)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_feast_serves_what_the_store_serves(tmp_path, feast_python):
    store = open_store(tmp_path / "store")
    publish(store, "my-items", range(0, 600, 2), dtype="float16")
    collection = publish(store, "my-items", range(0, 500, 2), seed=1, dtype="float16")
    repository = tmp_path / "repository"
    export_feast(collection, repository, ttl_seconds=86_400)
    applied = subprocess.run(
        [feast_python.parent / "feast", "apply"],
        cwd=repository,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert applied.returncode == 0, applied.stderr
    ids = [4, 0, 498, 4]
    reader = Path(__file__).with_name("feast_reader.py")
    read = subprocess.run(
        [feast_python, reader, repository, "my_items", "item", json.dumps([*ids, 499])],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    served = json.loads(read.stdout.splitlines()[-1])
    answer = served["answer"]
    status, vectors = collection.open().lookup(ids)
    np.testing.assert_array_equal(np.array(answer["vector"][:-1], dtype=np.float32), vectors)
    assert answer["status"] == [*(("missing", "found", "carried")[one] for one in status), None]
    assert answer["vector"][-1] is None
    assert served["ttl_seconds"] == 86_400
    assert served["tags"]["evenkeel_version"] == "v000002"
    assert served["tags"]["evenkeel_collection"] == "my-items"
