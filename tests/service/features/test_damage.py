"""A damaged version in the feature store: not served, the one before it is, and everybody can see it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from service.core.settings import Settings
from tests.service import published

pytestmark = pytest.mark.anyio


async def test_a_damaged_current_version_is_not_served_and_told(client, settings: Settings):
    first, _ = published.publish(settings)
    second, _ = published.publish(settings)
    (file,) = (settings.home / "store").rglob(f"{second}/items.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.chmod(0o600)
    file.write_bytes(content)
    answer = await client.post("/v1/collections/items/vectors", json={"ids": [1]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["evenkeel-version"] == first
    listed = (await client.get("/v1/collections/items/versions")).json()["items"]
    flags = {version["version"]: version["damaged"] for version in listed}
    assert flags[first] is None
    assert "sha256" in flags[second]
    metrics = (await client.get("/metrics")).text
    assert 'evenkeel_store_damaged_versions{collection="items"} 1.0' in metrics
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert ready.json()["checks"]["vectors"].startswith("1 versions are damaged")


async def test_a_store_that_was_restored_answers_with_what_a_name_means_now(
    client, settings: Settings, tmp_path: Path
) -> None:
    published.publish(settings, seed=1)
    store, backup = settings.home / "store", tmp_path / "backup"
    shutil.copytree(store, backup)
    version, before = published.publish(settings, seed=2)
    asked = {"ids": [10, 20, 30]}
    first = await client.post("/v1/collections/items/vectors", json=asked)
    near = await client.post("/v1/collections/items/neighbors", json={"id": 10, "k": 3})
    snapshot = await client.get("/v1/collections/items/versions/current/snapshot")

    shutil.rmtree(store)
    shutil.copytree(backup, store)
    again, after = published.publish(settings, seed=3)
    assert again == version
    assert not np.allclose(before, after)
    answer = await client.post(
        "/v1/collections/items/vectors", json=asked, headers={"If-None-Match": first.headers["etag"]}
    )
    assert answer.status_code == 200
    assert answer.headers["etag"] != first.headers["etag"]
    fresh = published.store_at(settings).collection("items").view_lookup("items_rff", [10, 20, 30])[1]
    np.testing.assert_allclose([row["vector"] for row in answer.json()["items"]], fresh, atol=1e-5)
    assert (await client.post("/v1/collections/items/neighbors", json={"id": 10, "k": 3})).json() != near.json()
    unchanged = await client.get(
        "/v1/collections/items/versions/current/snapshot", headers={"If-None-Match": snapshot.headers["etag"]}
    )
    assert unchanged.status_code == 200
