"""Collections over HTTP: manifests, promote and rollback, snapshot, neighbours."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.store.collection import directory
from embeddings.store.files import read_document, replace_document, writer_lock
from service.core.settings import Settings
from service.features import indexes, snapshots
from tests.service import published
from tests.service.service_kit import until

pytestmark = pytest.mark.anyio


async def test_empty_store_has_no_collections(client):
    assert (await client.get("/v1/collections")).json() == {"items": [], "next_cursor": None}
    answer = await client.get("/v1/collections/items")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:evenkeel:collection-not-found"
    assert answer.json()["errors"][0]["remedy"]


async def test_a_name_that_no_collection_can_have_is_refused(client):
    assert (await client.get("/v1/collections/..%2f..%2fetc")).status_code == 404
    refused = await client.get("/v1/collections/UPPER")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "collection")
    assert "a name is 1 to 63 of a-z" in refused.json()["detail"]


async def test_collections_say_what_is_current_and_what_was_held(client, settings: Settings):
    version, _ = published.publish(settings, num_items=50, carried=(1,), missing=3, job="job_1")
    held = published.hold(settings)
    (item,) = (await client.get("/v1/collections")).json()["items"]
    assert item["name"] == "items"
    assert item["current"] == version
    assert (item["rows"], item["carried"], item["missing"], item["dim"]) == (50, 1, 3, 8)
    assert item["default_view"] == "items_rff"
    assert item["views"] == ["items_rff"]
    assert item["latest"]["version"] == held
    assert item["latest"]["state"] == "held"
    one = (await client.get("/v1/collections/items")).json()
    assert one["history"][0]["version"] == version


async def test_the_default_view_of_a_long_name_is_served(client, settings: Settings):
    """Names of views have 63 characters, and so may the collection's: the default view's is cut."""
    name = "i" * 62
    version, _ = published.publish(settings, name)
    one = (await client.get(f"/v1/collections/{name}")).json()
    assert one["default_view"] == one["views"][0] == f"{name}_"
    answer = await client.post(f"/v1/collections/{name}/vectors", json={"ids": [10]})
    assert (answer.status_code, answer.headers["evenkeel-version"]) == (200, version)
    assert (await client.delete(f"/v1/views/{one['default_view']}")).status_code == 409


async def test_pages_of_collections_and_versions(client, settings: Settings):
    for name in ("a", "b", "c"):
        published.publish(settings, name)
    first = (await client.get("/v1/collections", params={"limit": 2})).json()
    rest = (await client.get("/v1/collections", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [item["name"] for item in first["items"] + rest["items"]] == ["a", "b", "c"]
    assert rest["next_cursor"] is None
    versions = [published.publish(settings, "a", seed=seed)[0] for seed in range(3)]
    first = (await client.get("/v1/collections/a/versions", params={"limit": 3})).json()
    rest = (await client.get("/v1/collections/a/versions", params={"cursor": first["next_cursor"]})).json()
    assert [item["version"] for item in first["items"] + rest["items"]] == [*versions[::-1], "v000001"]
    assert (await client.get("/v1/collections/a/versions", params={"cursor": "A"})).status_code == 422


async def test_manifests(client, settings: Settings):
    first, _ = published.publish(settings, seed=1)
    second, _ = published.publish(settings, seed=2)
    held = published.hold(settings)
    for version, state in ((first, "superseded"), (second, "published"), (held, "held")):
        manifest = (await client.get(f"/v1/collections/items/versions/{version}")).json()
        assert (manifest["version"], manifest["state"]) == (version, state)
    current = (await client.get("/v1/collections/items/versions/current")).json()
    assert current["version"] == second
    assert current["parent"] == first
    assert {file["name"] for file in current["files"]} >= {"items.arrow"}
    assert current["views"][0]["sha256"]
    held_only = (await client.get("/v1/collections/items/versions", params={"state": "held"})).json()["items"]
    assert [(one["version"], one["reasons"]) for one in held_only] == [(held, ["mean_cosine 0.10 is below 0.85"])]
    missing = await client.get("/v1/collections/items/versions/v000099")
    assert missing.status_code == 404
    assert missing.json()["type"] == "urn:evenkeel:version-not-found"


async def promote(client, version: str, **body: Any) -> Any:
    return await client.post(
        f"/v1/collections/items/versions/{version}/promote", json={"reason": "in the test", **body}
    )


async def test_rollback_to_an_older_version(client, settings: Settings):
    first, _ = published.publish(settings, seed=1)
    second, _ = published.publish(settings, seed=2)
    answer = await promote(client, first, if_current=second)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["version"], answer.json()["state"]) == (first, "published")
    switch = (await client.get("/v1/collections/items")).json()["history"][0]
    assert (switch["version"], switch["kind"], switch["reason"]) == (first, "promote", "in the test")


async def test_a_stale_if_current_is_409_and_changes_nothing(client, settings: Settings):
    first, _ = published.publish(settings, seed=1)
    second, _ = published.publish(settings, seed=2)
    answer = await promote(client, first, if_current=first)
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:evenkeel:stale-version"
    assert (await client.get("/v1/collections/items")).json()["current"] == second


async def test_a_writer_that_is_stuck_is_503(client, settings: Settings, monkeypatch):
    version, _ = published.publish(settings)
    second, _ = published.publish(settings, seed=1)
    monkeypatch.setattr(directory, "writer_lock", partial(writer_lock, timeout_seconds=0.05))
    lock = published.store_at(settings).collection("items").directory / "LOCK"
    with writer_lock(lock):
        answer = await promote(client, version)
    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:evenkeel:store-busy"
    assert answer.json()["errors"][0]["remedy"]
    assert (await client.get("/v1/collections/items")).json()["current"] == second
    assert (await promote(client, version)).status_code == 200


async def test_a_held_version_needs_override_gate(client, settings: Settings):
    version, _ = published.publish(settings)
    held = published.hold(settings)
    answer = await promote(client, held)
    assert answer.status_code == 409
    assert "mean_cosine 0.10 is below 0.85" in answer.json()["detail"]
    assert "override_gate" in answer.json()["errors"][0]["remedy"]
    assert (await client.get("/v1/collections/items")).json()["current"] == version
    assert (await promote(client, held, override_gate=True)).status_code == 200
    assert (await client.get("/v1/collections/items")).json()["current"] == held


async def test_promote_refuses_what_is_no_version_and_no_reason(client, settings: Settings):
    version, _ = published.publish(settings)
    assert (await promote(client, "current")).status_code == 422
    assert (await promote(client, "v000009")).status_code == 404
    assert (await promote(client, version, reason=" ")).status_code == 422
    assert (await promote(client, version, if_curent="v000001")).status_code == 422
    assert (await client.get("/v1/collections/items")).json()["current"] == version


async def test_promote_needs_features_write(stranger, settings: Settings, key_with: Any):
    version, _ = published.publish(settings)
    key = await key_with("features:read")
    url = f"/v1/collections/items/versions/{version}/promote"
    answer = await stranger.post(url, json={"reason": "no"}, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 403
    assert "features:write" in answer.json()["detail"]


async def test_snapshot_is_the_whole_version_and_leaves_no_file(client, settings: Settings):
    version, vectors = published.publish(settings, carried=(3,))
    answer = await client.get("/v1/collections/items/versions/current/snapshot")
    assert answer.status_code == 200
    assert answer.headers["evenkeel-version"] == version
    assert "content-length" not in answer.headers, "it is sent as it is made"
    table = pq.read_table(pa.BufferReader(answer.content))
    assert table.column("id").to_pylist() == list(range(10, 510, 10))
    assert table.column("status").to_pylist()[2:5] == ["found", "carried", "found"]
    np.testing.assert_array_equal(np.array(table.column("vector").to_pylist(), dtype=np.float32), vectors)
    assert table.schema.metadata[b"evenkeel.version"] == version.encode()
    again = await client.get(
        f"/v1/collections/items/versions/{version}/snapshot", headers={"If-None-Match": answer.headers["etag"]}
    )
    assert again.status_code == 304


async def test_neighbours_of_an_id_and_of_a_vector(client, settings: Settings):
    version, vectors = published.publish(settings)
    cosines = vectors @ vectors[4]
    best = np.argsort(-cosines)
    by_id = (await client.post("/v1/collections/items/neighbors", json={"id": 50, "k": 3})).json()
    assert by_id["version"] == version
    assert [item["id"] for item in by_id["items"]] == [int(10 * (row + 1)) for row in best[1:4]]
    np.testing.assert_allclose([item["cosine"] for item in by_id["items"]], cosines[best[1:4]], atol=1e-6)
    by_text = (await client.post("/v1/collections/items/neighbors", json={"id": "50", "k": 3})).json()
    assert by_text == by_id
    by_vector = await client.post("/v1/collections/items/neighbors", json={"vector": vectors[4].tolist(), "k": 1})
    assert [item["id"] for item in by_vector.json()["items"]] == [50]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"id": 10, "vector": [1.0] * 8}, 422),
        ({"id": 11}, 404),
        ({"id": "x"}, 422),
        ({"vector": [1.0] * 7}, 422),
        ({"vector": [0.0] * 8}, 422),
        ({"id": 10, "k": 0}, 422),
        ({"id": 10, "version": "v000007"}, 404),
    ],
)
@pytest.mark.usefixtures("items")
async def test_neighbours_refused(reading, body: dict[str, Any], status: int):
    answer = await reading.post("/v1/collections/items/neighbors", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"]


async def test_a_damaged_version_says_so(client, settings: Settings):
    version, _ = published.publish(settings)
    (file,) = (settings.home / "store").rglob("items.arrow")
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-8])
    answer = await client.get(f"/v1/collections/items/versions/{version}/snapshot")
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:evenkeel:store-corrupt"
    assert "promote another version" in answer.json()["errors"][0]["remedy"]


async def test_a_collection_of_a_newer_version_says_so(client, settings: Settings):
    published.publish(settings)
    (current,) = (settings.home / "store").rglob("CURRENT")
    replace_document(current, {**read_document(current), "format": 2})
    answer = await client.post("/v1/collections/items/vectors", json={"ids": [10]})
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:evenkeel:store-newer"
    assert "install the version that wrote it" in answer.json()["errors"][0]["remedy"]


async def test_vectors_role_serves_features_alone(settings: Settings):
    import dataclasses

    from service.app import create_app

    app = create_app(dataclasses.replace(settings, role="vectors"))
    paths = set(app.openapi()["paths"])
    assert "/v1/collections/{collection}/vectors" in paths
    assert "/v1/keys" not in paths


async def test_snapshot_comes_in_row_groups(client, settings: Settings, monkeypatch):
    monkeypatch.setattr(snapshots, "GROUP_VALUES", 8 * 20)
    _, vectors = published.publish(settings, ids=[f"id{number:03}" for number in range(50)])
    answer = await client.get("/v1/collections/items/versions/current/snapshot")
    file = pq.ParquetFile(pa.BufferReader(answer.content))
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [20, 20, 10]
    table = file.read()
    assert table.column("id").to_pylist() == [f"id{number:03}" for number in range(50)]
    np.testing.assert_array_equal(np.array(table.column("vector").to_pylist(), dtype=np.float32), vectors)


async def neighbors_until(client, body: dict[str, Any], exact: bool) -> dict[str, Any]:
    async def look() -> Any:
        answer = await client.post("/v1/collections/items/neighbors", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.json()["exact"] is exact else None

    return dict(await until(look))


def large_from_100(app, settings: Settings) -> None:
    """As after a restart, with an index for anything above 100 rows."""
    app.state.indexes.close()
    app.state.indexes = indexes.Indexes(settings.store_url, settings.home / "neighbors", exact_rows=100)


@pytest.mark.process
async def test_a_large_version_is_searched_exactly_until_its_index_is_there(app, client, settings: Settings, caplog):
    _, vectors = published.publish(settings, num_items=300)
    directory = settings.home / "neighbors" / "default" / "items"
    directory.mkdir(parents=True)
    for number in range(5):
        os.utime(_touched(directory / f"old{number}.usearch"), (number, number))
    large_from_100(app, settings)
    body = {"vector": vectors[7].tolist(), "k": 3}
    exact = (await client.post("/v1/collections/items/neighbors", json=body)).json()
    assert exact["exact"] is True
    found = await neighbors_until(client, body, exact=False)
    assert found["items"] == exact["items"]

    async def reaped() -> bool:
        await client.post("/v1/collections/items/neighbors", json=body)
        return not app.state.indexes._builders

    await until(reaped)
    (file,) = set(directory.glob("v*.usearch"))
    # Of the indexes of old versions the latest stay.
    assert {one.name for one in directory.iterdir()} == {file.name, "old3.usearch", "old4.usearch"}
    # Another worker, or the next start, takes the file; one that is damaged is built again.
    large_from_100(app, settings)
    assert (await client.post("/v1/collections/items/neighbors", json=body)).json() == found
    file.write_bytes(b"damaged")
    large_from_100(app, settings)
    assert (await client.post("/v1/collections/items/neighbors", json=body)).json() == exact
    assert "built again" in caplog.text
    # What was built before ids were erased from the version goes with the first search, all with the erasure itself.
    before = _touched(directory / f"{exact['version']}-0123.usearch")
    large_from_100(app, settings)
    await client.post("/v1/collections/items/neighbors", json=body)
    assert not before.exists()
    app.state.indexes.forget("items")
    assert not directory.exists()


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.process
async def test_a_builder_that_fails_leaves_the_exact_search(app, client, settings: Settings):
    _, vectors = published.publish(settings, num_items=300)
    (settings.home / "neighbors").write_text("no directory")
    large_from_100(app, settings)
    for _ in range(2):
        answer = await client.post("/v1/collections/items/neighbors", json={"vector": vectors[7].tolist()})
        assert answer.json()["exact"] is True
        for builder, _ in app.state.indexes._builders.values():
            assert builder.wait(300) == 1
    assert len(app.state.indexes._builders) == 1
