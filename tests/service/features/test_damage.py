"""A damaged version in the feature store: not served, the one before it is, and everybody can see it."""

from __future__ import annotations

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
