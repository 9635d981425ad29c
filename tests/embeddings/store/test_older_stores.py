"""A store in the layout of the first code is read and refreshed; a collection of a newer format is refused whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.store import Collection, NewerStore, open_store
from embeddings.vectors.item_vectors import ItemVectors

VECTORS = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], np.float32)
U = np.array([[0.5, -0.25], [1.5, 2.0]], np.float32)
AT = "2026-11-20T03:00:00.000Z"
VIEW = {
    "anchor_generation": 1, "collection": "items", "created_at": AT, "dim": 4, "dim_in": 2, "frequencies": "orthogonal",
    "kind": "rff", "materialized": False, "name": "v", "seed": 0, "sigma": 0.4,
    "sha256": hashlib.sha256(U.astype("<f4").tobytes()).hexdigest(),
}  # fmt: skip
MANIFEST = {
    "alignment": {"kind": "none"}, "anchor_generation": 1, "anchor_version": "v000001", "carried": 0,
    "collection": "items", "created_at": AT, "dim": 2, "dtype": "float32", "gate": [], "id_type": "int64", "job": None,
    "missing": 0, "parent": None, "rows": 3, "version": "v000001", "views": [VIEW],
}  # fmt: skip
CURRENT = {
    "history": [{"at": AT, "kind": "publish", "override_gate": False, "reason": "published", "version": "v000001"}],
    "version": "v000001",
    "versions": ["v000001"],
}
"""Documents as the first code wrote them: without what came later, such as ``erasures`` of CURRENT."""


def write_document(path: Path, document: dict[str, Any]) -> None:
    body = json.dumps(document, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"checksum": hashlib.sha256(body.encode()).hexdigest(), "document": document}))


def write_arrow(path: Path, metadata: dict[str, str] | None = None, **columns: pa.Array) -> dict[str, Any]:
    """Writes a file and returns its entry of a manifest."""
    batch = pa.record_batch(columns).replace_schema_metadata(metadata)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = path.read_bytes()
    return {"name": path.name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def rows(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


@pytest.fixture
def first(tmp_path: Path) -> Collection:
    folder = tmp_path / "collections" / "items"
    version, view = folder / "versions" / "v000001", folder / "views" / "v"
    version.mkdir(parents=True)
    view.mkdir(parents=True)
    items = write_arrow(
        version / "items.arrow", key=pa.array([1, 2, 3]), status=pa.array([1, 1, 1], pa.uint8()),
        norm=pa.array([2.0, 3.0, 4.0], pa.float32()), count=pa.array([-1, -1, -1]), vector=rows(VECTORS),
    )  # fmt: skip
    digest = {"sha256": str(VIEW["sha256"])}
    frequencies = write_arrow(version / "frequencies-v.arrow", digest, u=rows(U))
    write_document(version / "manifest.json", MANIFEST | {"files": [items, frequencies]})
    write_document(view / "g0001.json", VIEW | {"file": write_arrow(view / "g0001.arrow", digest, u=rows(U))})
    write_document(folder / "CURRENT", CURRENT)
    return open_store(tmp_path).collection("items")


def test_a_store_of_the_first_code_is_read_and_refreshed(first: Collection) -> None:
    statuses, vectors = first.open().lookup([3, 1, 9])
    np.testing.assert_array_equal(vectors[:2], VECTORS[[2, 0]])
    assert statuses.tolist() == [1, 1, 0]
    projected = VECTORS @ U.T
    expected = np.concatenate([np.cos(projected), np.sin(projected)], axis=1) / np.sqrt(2)
    found = first.view_transform("v", VECTORS)
    np.testing.assert_allclose(np.sort(found, axis=1), np.sort(expected, axis=1), atol=1e-6)
    assert first.history()[0]["reason"] == "published"
    refreshed = first.write(ItemVectors(np.array([1, 2]), VECTORS[:2]), parent="v000001")
    first.publish(refreshed, "v000001")
    assert first.erase([3], reason="asked")["rows"] == 1
    assert first.open("v000001").lookup([3, 1])[0].tolist() == [0, 1]


def test_a_collection_of_a_newer_format_is_refused_and_left_as_it_is(first: Collection, tmp_path: Path) -> None:
    current = first.directory / "CURRENT"
    write_document(current, CURRENT | {"format": 2})
    before = current.read_bytes()
    again = open_store(tmp_path).collection("items")
    for call in (again.open, again.history, lambda: again.publish("v000001", "v000001"), lambda: again.retain(1)):
        with pytest.raises(NewerStore, match=r"CURRENT: .*does not know format: a newer one wrote .*: install that"):
            call()
    assert current.read_bytes() == before
