"""Feature views over HTTP, and the layer that a frontend model loads."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import published
import pytest

from embeddings.rff import RandomFourierFeatures
from service.settings import Settings

pytestmark = pytest.mark.anyio
NEW = {"name": "wide", "collection": "items", "dim": 64, "sigma": 0.7, "seed": 3, "frequencies": "gaussian"}


async def test_create_list_get_delete(client, settings: Settings):
    published.publish(settings)
    answer = await client.post("/v1/views", json=NEW)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == "/v1/views/wide"
    expected = RandomFourierFeatures(published.DIM, 64, 0.7, 3, "gaussian")
    assert answer.json()["sha256"] == expected.sha256
    assert {key: answer.json()[key] for key in NEW} == NEW
    assert (await client.get("/v1/views/wide")).json() == answer.json()
    assert [view["name"] for view in (await client.get("/v1/views")).json()["items"]] == ["items_rff", "wide"]
    fetched = await client.post("/v1/views/wide/vectors", json={"ids": [10]})
    assert fetched.json()["dim"] == 64
    assert (await client.delete("/v1/views/wide")).status_code == 204
    assert (await client.get("/v1/views/wide")).status_code == 404
    assert (await client.post("/v1/views/wide/vectors", json={"ids": [10]})).status_code == 404


async def test_the_same_view_again_is_200_and_another_by_its_name_409(client, settings: Settings):
    published.publish(settings)
    published.publish(settings, "others")
    assert (await client.post("/v1/views", json=NEW)).status_code == 201
    assert (await client.post("/v1/views", json=NEW)).status_code == 200
    for change in ({"sigma": 0.8}, {"collection": "others"}):
        answer = await client.post("/v1/views", json=NEW | change)
        assert answer.status_code == 409, answer.text
        assert answer.json()["type"] == "urn:evenkeel:view-exists"


async def test_defaults_are_orthogonal_2d(client, settings: Settings):
    published.publish(settings)
    view = (await client.post("/v1/views", json={"name": "plain", "collection": "items"})).json()
    assert (view["kind"], view["dim"], view["sigma"], view["frequencies"]) == ("rff", 16, 0.4, "orthogonal")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dim": 7}, "dim"),
        ({"sigma": 0}, "sigma"),
        ({"kind": "pca"}, "kind"),
        ({"name": "A b"}, "name"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_bad_views(client, settings: Settings, change: dict[str, Any], field: str):
    published.publish(settings)
    answer = await client.post("/v1/views", json=NEW | change)
    assert answer.status_code == 422, answer.text
    assert field in [error["field"] for error in answer.json()["errors"]]
    assert (await client.get("/v1/views/wide")).status_code == 404


async def test_views_of_what_is_not_there(client, settings: Settings):
    assert (await client.post("/v1/views", json=NEW)).status_code == 404
    assert (await client.delete("/v1/views/wide")).status_code == 404


async def test_the_default_view_stays(client, settings: Settings):
    published.publish(settings)
    answer = await client.delete("/v1/views/items_rff")
    assert answer.status_code == 409
    assert (await client.get("/v1/views/items_rff")).status_code == 200


async def test_scopes(stranger, settings: Settings, key_with: Any):
    published.publish(settings)
    reader = {"Authorization": f"Bearer {await key_with('features:read')}"}
    assert (await stranger.get("/v1/views")).status_code == 401
    assert (await stranger.get("/v1/views", headers=reader)).status_code == 200
    assert (await stranger.post("/v1/views", json=NEW, headers=reader)).status_code == 403
    assert (await stranger.delete("/v1/views/items_rff", headers=reader)).status_code == 403


def read_safetensors(data: bytes) -> tuple[dict[str, Any], np.ndarray]:
    """The format, read as its specification says."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensor = header["frequencies"]
    begin, end = tensor["data_offsets"]
    assert tensor["dtype"] == "F32"
    assert 8 + length + end == len(data)
    values = np.frombuffer(data[8 + length + begin : 8 + length + end], dtype="<f4").reshape(tensor["shape"])
    return header["__metadata__"], values


async def test_layer_recomputes_what_is_served(client, settings: Settings):
    _, vectors = published.publish(settings)
    answer = await client.get("/v1/views/items_rff/layer")
    assert answer.status_code == 200, answer.text
    metadata, frequencies = read_safetensors(answer.content)
    assert frequencies.shape == (published.DIM, published.DIM)
    assert metadata["sha256"] == hashlib.sha256(frequencies.tobytes()).hexdigest()
    angles = vectors.astype(np.float64) @ frequencies.T.astype(np.float64)
    phi = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / np.sqrt(len(frequencies))
    ids = list(range(10, 510, 10))
    served = (await client.post("/v1/views/items_rff/vectors", json={"ids": ids})).json()["items"]
    # float32 against float64
    np.testing.assert_allclose([item["vector"] for item in served], phi, atol=1e-6)
    again = await client.get("/v1/views/items_rff/layer", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


async def test_layers_that_there_are_not(client, settings: Settings):
    published.publish(settings)
    await client.post("/v1/views", json={"name": "raw", "collection": "items", "kind": "identity"})
    assert (await client.get("/v1/views/raw/layer")).status_code == 409
    assert (await client.get("/v1/views/none/layer")).status_code == 404
    onnx = await client.get("/v1/views/items_rff/layer", headers={"Accept": "application/onnx"})
    assert onnx.status_code == 406
