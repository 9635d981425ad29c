"""Feature views over HTTP, and the layer that a frontend model loads."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np
import pytest

from embeddings.rff import RandomFourierFeatures
from service.core.settings import Settings
from tests.service import published

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
        ({"sigma": 1e38}, "sigma"),
        ({"sigma": 1e300}, "sigma"),
        ({"sigma": 1e-300}, "sigma"),
        ({"kind": "pca"}, "kind"),
        ({"name": "A b"}, "name"),
        ({"colour": 1}, "colour"),
    ],
)
@pytest.mark.usefixtures("items")
async def test_bad_views(reading, change: dict[str, Any], field: str):
    answer = await reading.post("/v1/views", json=NEW | change)
    assert answer.status_code == 422, answer.text
    assert field in [error["field"] for error in answer.json()["errors"]]
    assert (await reading.get("/v1/views/wide")).status_code == 404


async def test_views_of_what_is_not_there(client, settings: Settings):
    assert (await client.post("/v1/views", json=NEW)).status_code == 404
    assert (await client.delete("/v1/views/wide")).status_code == 404


async def test_the_default_view_stays(client, settings: Settings):
    published.publish(settings)
    answer = await client.delete("/v1/views/items_rff")
    assert answer.status_code == 409
    assert (await client.get("/v1/views/items_rff")).status_code == 200


@pytest.mark.slow
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
    assert answer.headers["evenkeel-frequencies-sha256"] == metadata["frequencies_sha256"] == metadata["sha256"]
    assert answer.headers["content-digest"] == content_digest(answer.content)
    again = await client.get("/v1/views/items_rff/layer", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def content_digest(data: bytes) -> str:
    """RFC 9530."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


async def test_layers_by_accept(client, settings: Settings):
    published.publish(settings)
    path = "/v1/views/items_rff/layer"
    tensors = await client.get(path, headers={"Accept": "application/octet-stream, application/onnx;q=0.5"})
    onnx = await client.get(path, headers={"Accept": "application/onnx"})
    assert tensors.headers["content-type"] == "application/octet-stream"
    assert onnx.headers["content-type"] == "application/onnx"
    assert 'filename="items_rff.onnx"' in onnx.headers["content-disposition"]
    assert onnx.headers["content-digest"] == content_digest(onnx.content)
    assert onnx.headers["etag"] != tensors.headers["etag"]
    assert (await client.get(path, headers={"Accept": "application/onnx"})).content == onnx.content
    same = {"If-None-Match": onnx.headers["etag"]}
    assert (await client.get(path, headers=same | {"Accept": "application/onnx"})).status_code == 304
    assert (await client.get(path, headers=same)).status_code == 200


async def test_a_layer_that_takes_the_models_vectors(client, settings: Settings):
    """What is served without an average is phi(raw R); the layer has R in its U."""
    published.publish(settings)
    raw = published.directions(50, 7) * 5
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((published.DIM, published.DIM)))[0]
    collection = published.store_at(settings).collection("items")
    parent = collection.current()
    version = published.write(
        collection, np.arange(1, 51) * 10, raw @ rotation.astype(np.float32), parent=parent, rotation=rotation,
        alignment={"kind": "procrustes", "new_weight": None},
    )  # fmt: skip
    collection.publish(version, parent)
    answer = await client.get("/v1/views/items_rff/layer", params={"takes": "model"})
    metadata, u = read_safetensors(answer.content)
    assert (metadata["takes"], metadata["version"], metadata["averaged"]) == ("model", version, "False")
    assert metadata["frequencies_sha256"] == hashlib.sha256(u.tobytes()).hexdigest() != metadata["sha256"]
    unit = raw.astype(np.float64) / np.linalg.norm(raw.astype(np.float64), axis=1, keepdims=True)
    phi = np.hstack([np.cos(unit @ u.T.astype(np.float64)), np.sin(unit @ u.T.astype(np.float64))]) / np.sqrt(len(u))
    served = await client.post("/v1/views/items_rff/vectors", json={"ids": list(range(10, 510, 10))})
    np.testing.assert_allclose([item["vector"] for item in served.json()["items"]], phi, rtol=0, atol=1e-6)
    plain = read_safetensors((await client.get("/v1/views/items_rff/layer")).content)[1]
    assert np.abs(plain - u).max() > 0.1
    lost = published.write(collection, [10], raw[:1], parent=version, alignment={"kind": "procrustes"})
    collection.publish(lost, version)
    answer = await client.get("/v1/views/items_rff/layer", params={"takes": "model"})
    assert answer.status_code == 404
    assert "not kept" in answer.json()["detail"]


async def test_materialized_views_serve_the_same(client, settings: Settings):
    published.publish(settings)
    parameters = {"dim": 32, "sigma": 0.9, "seed": 4, "collection": "items"}
    for name, materialized in (("stored", True), ("computed", False)):
        body = {**parameters, "name": name, "materialized": materialized}
        answer = await client.post("/v1/views", json=body)
        assert answer.status_code == 201, answer.text
        assert answer.json()["materialized"] is materialized
    version, _ = published.publish(settings, seed=1)
    manifest = (await client.get(f"/v1/collections/items/versions/{version}")).json()
    assert "view-stored.arrow" in [file["name"] for file in manifest["files"]]
    assert {view["name"]: view["materialized"] for view in manifest["views"]}["stored"] is True
    fetched = [
        (await client.post(f"/v1/views/{name}/vectors", json={"ids": [20, 15, 500]})).json()["items"]
        for name in ("stored", "computed")
    ]
    for stored, computed in zip(*fetched, strict=True):
        assert stored["status"] == computed["status"]
        if stored["status"] == "found":
            np.testing.assert_allclose(stored["vector"], computed["vector"], rtol=0, atol=1e-6)
        else:
            assert stored["vector"] is computed["vector"] is None


async def test_a_dry_run_advises_and_makes_nothing(client, settings: Settings):
    published.publish(settings, num_items=200)
    body = NEW | {"sigma": 1.0, "frequencies": "orthogonal"}
    answer = await client.post("/v1/views", json=body, params={"dry_run": "true", "epsilon": 0.1})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["exists"] is False
    assert {key: found["view"][key] for key in body} == body
    advice = found["advice"]
    assert advice["epsilon"] == 0.1
    assert advice["num_vectors"] == 200
    measured = {row["dim"]: row for row in advice["measured"]}
    assert measured[advice["dim"]]["max_error"] <= 0.1
    assert advice["dim"] < advice["bound_dim"]
    assert [warning["code"] for warning in found["warnings"]] == ["standardise"]
    assert (await client.get("/v1/views/wide")).status_code == 404
    assert (await client.post("/v1/views", json=body)).status_code == 201
    again = await client.post("/v1/views", json=body, params={"dry_run": "true"})
    assert again.json()["exists"] is True
    other = await client.post("/v1/views", json=body | {"seed": 9}, params={"dry_run": "true"})
    assert other.status_code == 409
    raw = {"name": "raw", "collection": "items", "kind": "identity"}
    plain = (await client.post("/v1/views", json=raw, params={"dry_run": "true"})).json()
    assert (plain["advice"], plain["warnings"]) == (None, [])
    for bad in ("0", "1", "nan", "1e-300"):
        refused = await client.post("/v1/views", json=body, params={"dry_run": "true", "epsilon": bad})
        assert refused.status_code == 422, bad


async def test_views_say_what_their_consumers_should_know(client, settings: Settings):
    published.publish(settings)
    small = {"name": "small", "collection": "items", "dim": 4, "sigma": 0.01}
    created = await client.post("/v1/views", json=small)
    assert created.status_code == 201, created.text
    codes = [warning["code"] for warning in created.json()["warnings"]]
    assert codes == ["few-frequencies", "narrow-kernel", "standardise"]
    assert all(warning["remedy"] for warning in created.json()["warnings"])
    assert (await client.get("/v1/views/small")).json()["warnings"] == created.json()["warnings"]
    raw = {"name": "raw", "collection": "items", "kind": "identity"}
    assert (await client.post("/v1/views", json=raw)).json()["warnings"] == []


async def test_layers_that_there_are_not(client, settings: Settings):
    published.publish(settings)
    await client.post("/v1/views", json={"name": "raw", "collection": "items", "kind": "identity"})
    assert (await client.get("/v1/views/raw/layer")).status_code == 409
    assert (await client.get("/v1/views/none/layer")).status_code == 404
    csv = await client.get("/v1/views/items_rff/layer", headers={"Accept": "text/csv"})
    assert csv.status_code == 406
    assert (await client.get("/v1/views/items_rff/layer", params={"takes": "raw"})).status_code == 422


async def test_an_exponential_view(client, settings: Settings):
    _, vectors = published.publish(settings)
    body = {"name": "near", "collection": "items", "kind": "exponential", "dim": 8}
    dry = await client.post("/v1/views", json=body, params={"dry_run": "true"})
    assert (dry.status_code, dry.json()["view"]["dim"], dry.json()["advice"]) == (200, 8, None)
    made = await client.post("/v1/views", json=body)
    assert (made.status_code, made.json()["sigma"], made.json()["warnings"]) == (201, None, [])
    assert (await client.post("/v1/views", json=body)).status_code == 200
    answer = (await client.post("/v1/views/near/vectors", json={"ids": [10, 11, 500]})).json()["items"]
    # Without counts the anchors are the first items.
    assert answer[2]["vector"] == pytest.approx(np.exp(vectors[49] @ vectors[:8].T).tolist(), rel=1e-5)
    assert answer[0]["vector"][0] == pytest.approx(np.e, rel=1e-5)
    assert answer[1]["vector"] is None
    assert (await client.get("/v1/views/near/layer")).status_code == 409
    for change in ({"materialized": True, "name": "stored"}, {"dim": 52, "name": "many"}):
        refused = await client.post("/v1/views", json=body | change)
        assert refused.status_code == 422, refused.text
    assert (await client.delete("/v1/views/near")).status_code == 204


async def test_views_of_an_earlier_generation(client, settings: Settings):
    old, vectors = published.publish(settings)
    pinned = {"ids": [10, 11], "version": old}
    before = (await client.post("/v1/views/items@g1/vectors", json=pinned)).json()
    assert before["items"][0]["vector"] == pytest.approx(vectors[0].tolist())
    assert (await client.get("/v1/views/items@g1/vectors")).status_code == 405
    new, _ = published.change_model(settings)
    for path in ("items@g1", "items%40g1"):
        answer = await client.post(f"/v1/views/{path}/vectors", json={"ids": [10, 11]})
        assert answer.status_code == 200, answer.text
        after = answer.json()
        assert (after["version"], after["view"], after["dim"]) == (new, "items@g1", published.DIM)
        assert after["items"][0]["vector"] == pytest.approx(vectors[0].tolist(), abs=1e-5)
        assert after["items"][1] == {"id": 11, "status": "missing", "vector": None}
    assert answer.headers["evenkeel-version"] == new
    again = await client.post(
        "/v1/views/items%40g1/vectors", json={"ids": [10, 11]}, headers={"If-None-Match": answer.headers["etag"]}
    )
    assert again.status_code == 304
    listed = (await client.get("/v1/views")).json()["items"]
    assert [view["name"] for view in listed] == ["items@g1", "items_rff", "items_rff@g1"]
    rff = (await client.get("/v1/views/items_rff@g1")).json()
    assert (rff["map"]["generation"], rff["map"]["kind"], rff["warnings"]) == (1, "ridge", [])
    phi = (await client.post("/v1/views/items_rff@g1/vectors", json={"ids": [10]})).json()["items"][0]["vector"]
    then = (await client.post("/v1/views/items_rff/vectors", json=pinned)).json()["items"][0]["vector"]
    assert phi == pytest.approx(then, abs=1e-5)
    layer = await client.get("/v1/views/items_rff@g1/layer")
    assert (layer.status_code, "takes vectors of 'items@g1'" in layer.json()["detail"]) == (409, True)
    assert (await client.get("/v1/collections/items/versions/current")).json()["maps"][0]["generation"] == 1
    for unknown in ("items@g2", "items@g", "other@g1"):
        missing = await client.post(f"/v1/views/{unknown}/vectors", json={"ids": [10]})
        assert (missing.status_code, missing.json()["type"]) == (404, "urn:evenkeel:view-not-found"), unknown
    refused = await client.delete("/v1/views/items@g1")
    assert refused.status_code == 404
    assert (await client.post("/v1/views", json=NEW | {"name": "items@g1"})).status_code == 422


@pytest.mark.parametrize("takes", ["published", "model"])
async def test_a_version_that_has_expired_has_no_layer(client, settings: Settings, takes: str):
    first, _ = published.publish(settings, rotation=np.eye(published.DIM), alignment={"kind": "procrustes"})
    published.publish(settings, seed=1)
    asked = {"takes": takes, "version": first}
    assert (await client.get("/v1/views/items_rff/layer", params=asked)).status_code == 200
    published.store_at(settings).collection("items").expire(first)
    answer = await client.get("/v1/views/items_rff/layer", params=asked)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:evenkeel:version-not-found")
    assert "has expired" in answer.json()["detail"]
