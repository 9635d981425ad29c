"""Fetching vectors over HTTP: order, duplicates, status, both formats, both dtypes, caching, and every refusal."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.rff import RandomFourierFeatures
from embeddings.vectors.item_vectors import ItemIdError
from service.api.routes.vectors import ARROW, JSON
from service.client.vectors import table_of, vectors_of
from service.core.settings import Settings
from service.features.store_access import accepted, ids_as
from tests.service import published

pytestmark = pytest.mark.anyio


async def fetch(client: httpx.AsyncClient, path: str, ids: list[Any], **fields: Any) -> Any:
    answer = await client.post(f"/v1/{path}/vectors", json={"ids": ids, **fields}, headers={"Accept": ARROW})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARROW
    return vectors_of(table_of(answer.content))


async def test_collection_serves_its_rff_view_in_request_order_with_duplicates(client, settings: Settings):
    version, vectors = published.publish(settings, carried=(2,))
    got = await fetch(client, "collections/items", [500, 10, 11, 30, 10])
    assert got.version == version
    assert got.view == "items_rff"
    assert got.ids.tolist() == [500, 10, 11, 30, 10]
    assert got.status.tolist() == ["found", "found", "missing", "carried", "found"]
    expected = RandomFourierFeatures(published.DIM, 2 * published.DIM).transform(vectors)
    # A matrix product of other shape may round otherwise in the last place.
    np.testing.assert_allclose(got.vectors[[0, 1, 3, 4]], expected[[49, 0, 2, 0]], atol=1e-6)
    assert np.isnan(got.vectors[2]).all()
    np.testing.assert_allclose(np.linalg.norm(got.vectors[got.found], axis=1), 1, atol=1e-6)  # float32 rounding


@pytest.mark.slow
async def test_answers_that_would_hold_up_the_others_are_refused(client, settings: Settings):
    published.publish(settings)
    view = {"name": "wide", "collection": "items", "kind": "rff", "dim": 8192}
    assert (await client.post("/v1/views", json=view)).status_code == 201
    body = {"ids": [10] * 2049}
    answer = await client.post("/v1/views/wide/vectors", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "ids"
    assert answer.json()["errors"][0]["remedy"] == "send at most 2048 ids at once, or ask for Arrow"
    assert (await client.post("/v1/views/wide/vectors", json=body, headers={"Accept": ARROW})).status_code == 200
    answer = await client.post("/v1/views/wide/vectors", json={"ids": [10] * 10_000}, headers={"Accept": ARROW})
    assert answer.status_code == 422
    # The usual dims are far from it.
    assert (await client.post("/v1/views/items_rff/vectors", json={"ids": [11] * 10_000})).status_code == 200


async def test_identity_view_serves_the_published_vectors(client, settings: Settings):
    _, vectors = published.publish(settings)
    answer = await client.post("/v1/views", json={"name": "raw", "collection": "items", "kind": "identity"})
    assert answer.status_code == 201, answer.text
    got = await fetch(client, "views/raw", [20, 10])
    np.testing.assert_array_equal(got.vectors, vectors[[1, 0]])


async def test_json_says_the_same_as_arrow(reading, items: tuple[str, np.ndarray]):
    version, _ = items
    arrow = await fetch(reading, "views/items_rff", [10, 11, 20])
    answer = await reading.post("/v1/views/items_rff/vectors", json={"ids": [10, 11, 20]})
    assert answer.headers["content-type"] == JSON
    assert answer.headers["evenkeel-version"] == version
    body = answer.json()
    assert (body["version"], body["view"], body["dim"]) == (version, "items_rff", 16)
    assert [item["id"] for item in body["items"]] == [10, 11, 20]
    assert [item["status"] for item in body["items"]] == arrow.status.tolist()
    assert body["items"][1]["vector"] is None
    np.testing.assert_array_equal(np.float32(body["items"][2]["vector"]), arrow.vectors[2])


@pytest.mark.parametrize("accept", [ARROW, JSON])
@pytest.mark.usefixtures("items")
async def test_float16(reading, accept: str):
    exact = await fetch(reading, "collections/items", [10, 20])
    answer = await reading.post(
        "/v1/collections/items/vectors", json={"ids": [10, 20], "dtype": "float16"}, headers={"Accept": accept}
    )
    assert answer.status_code == 200, answer.text
    if accept == ARROW:
        table = table_of(answer.content)
        assert table.schema.field("vector").type == pa.list_(pa.float16(), 16)
        got = vectors_of(table).vectors
    else:
        got = np.float16([item["vector"] for item in answer.json()["items"]])
    np.testing.assert_array_equal(got, exact.vectors.astype(np.float16))


@pytest.mark.usefixtures("items")
async def test_no_ids_and_only_missing_ids(reading):
    assert (await fetch(reading, "collections/items", [])).vectors.shape == (0, 16)
    got = await fetch(reading, "collections/items", [1, 2])
    assert got.status.tolist() == ["missing", "missing"]
    assert np.isnan(got.vectors).all()


async def test_string_ids(client, settings: Settings):
    _, vectors = published.publish(settings, ids=["b", "ä", "a", "7"])
    await client.post("/v1/views", json={"name": "raw", "collection": "items", "kind": "identity"})
    got = await fetch(client, "views/raw", ["a", "ä", "zz", "a"])
    assert got.ids.tolist() == ["a", "ä", "zz", "a"]
    np.testing.assert_array_equal(got.vectors[[0, 1, 3]], vectors[[2, 1, 2]])
    assert (await fetch(client, "views/raw", [7, 8])).status.tolist() == ["found", "missing"]


async def test_decimal_strings_are_taken_for_int64_ids(client, settings: Settings):
    published.publish(settings, ids=[5, 2**53 + 1])
    got = await fetch(client, "collections/items", [str(2**53 + 1), "5"])
    assert got.ids.tolist() == [2**53 + 1, 5]
    assert got.status.tolist() == ["found", "found"]


async def test_an_older_version_is_served_by_name_and_current_follows_the_switch(client, settings: Settings):
    first, _ = published.publish(settings, seed=1)
    before = await fetch(client, "collections/items", [10])
    second, _ = published.publish(settings, seed=2)
    after = await fetch(client, "collections/items", [10])
    assert (before.version, after.version) == (first, second)
    assert not np.array_equal(before.vectors, after.vectors)
    old = await fetch(client, "collections/items", [10], version=first)
    np.testing.assert_array_equal(old.vectors, before.vectors)


async def test_etag_matches_until_ids_format_or_version_change(client, settings: Settings):
    published.publish(settings, seed=1)
    url, body = "/v1/collections/items/vectors", {"ids": [10, 20]}
    first = await client.post(url, json=body)
    etag = first.headers["etag"]
    again = await client.post(url, json=body, headers={"If-None-Match": f'"other", W/{etag}'})
    assert again.status_code == 304
    assert again.content == b""
    assert again.headers["etag"] == etag
    assert again.headers["evenkeel-version"] == first.headers["evenkeel-version"]
    for changed in (
        await client.post(url, json={"ids": [20, 10]}, headers={"If-None-Match": etag}),
        await client.post(url, json=body, headers={"If-None-Match": etag, "Accept": ARROW}),
    ):
        assert changed.status_code == 200
    published.publish(settings, seed=2)
    assert (await client.post(url, json=body, headers={"If-None-Match": etag})).status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({}, "ids", "list"),
        ({"ids": "10"}, "ids", "list"),
        ({"ids": list(range(10_001))}, "ids", "at most 10000"),
        ({"ids": [1], "version": 3}, "version", "name of a version"),
        ({"ids": [1], "dtype": "float64"}, "dtype", "float32, float16"),
        ({"ids": [1], "dtype": ["float16"]}, "dtype", "float32, float16"),
        ({"ids": [1], "versoin": "current"}, "versoin", "spelling"),
        ({"ids": [1, "2"]}, "", "all integers or all strings"),
        ({"ids": [1.5]}, "", "float"),
        ({"ids": [True]}, "", "bool"),
        ({"ids": [None]}, "", "NoneType"),
        ({"ids": ["x1"]}, "", "'x1' is not an integer"),
        ({"ids": ["007"]}, "", "'007' is not an integer"),
        ({"ids": [2**63]}, "", "does not fit into int64"),
        ([1, 2], "", "object"),
    ],
)
@pytest.mark.usefixtures("items")
async def test_bad_bodies_are_422_and_name_the_field(reading, body: Any, field: str, says: str):
    answer = await reading.post("/v1/collections/items/vectors", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert any(
        error["field"] == field and says in error["message"] + error["remedy"] for error in answer.json()["errors"]
    ), answer.text


@pytest.mark.usefixtures("items")
async def test_ten_thousand_ids_are_served(reading):
    got = await fetch(reading, "collections/items", [10] * 10_000)
    assert got.vectors.shape == (10_000, 16)
    np.testing.assert_allclose(got.vectors, np.broadcast_to(got.vectors[0], (10_000, 16)), atol=1e-6)  # as above


@pytest.mark.usefixtures("items")
async def test_body_that_is_not_json(reading):
    answer = await reading.post("/v1/collections/items/vectors", content=b"{ids: [1]")
    assert answer.status_code == 422
    assert "not JSON" in answer.json()["detail"]


@pytest.mark.usefixtures("items")
async def test_what_is_not_there_is_404(reading):
    for path, body, code in (
        ("collections/nothing", {"ids": [1]}, "collection-not-found"),
        ("views/nothing", {"ids": [1]}, "view-not-found"),
        ("collections/items", {"ids": [1], "version": "v000009"}, "version-not-found"),
        ("collections/items", {"ids": [1], "version": "../v000001"}, "version-not-found"),
    ):
        answer = await reading.post(f"/v1/{path}/vectors", json=body)
        assert answer.status_code == 404, answer.text
        assert answer.json()["type"] == f"urn:evenkeel:{code}"


@pytest.mark.usefixtures("items")
async def test_other_formats_are_406(reading):
    answer = await reading.post("/v1/collections/items/vectors", json={"ids": [10]}, headers={"Accept": "text/csv"})
    assert answer.status_code == 406
    assert ARROW in answer.json()["detail"]


async def test_scope(client, stranger, settings: Settings, key_with: Any):
    published.publish(settings)
    url, body = "/v1/collections/items/vectors", {"ids": [10]}
    assert (await stranger.post(url, json=body)).status_code == 401
    wrong, right = await key_with("jobs:read"), await key_with("features:read")
    assert (await stranger.post(url, json=body, headers={"Authorization": f"Bearer {wrong}"})).status_code == 403
    assert (await stranger.post(url, json=body, headers={"Authorization": f"Bearer {right}"})).status_code == 200


async def test_fetch_goes_on_without_the_database(app, client, settings: Settings, monkeypatch: pytest.MonkeyPatch):
    """A key that was seen once is enough, past the time for which its answer counts as fresh."""
    published.publish(settings)
    url, body = "/v1/collections/items/vectors", {"ids": [10]}
    assert (await client.post(url, json=body)).status_code == 200
    await app.state.database.stop()
    monkeypatch.setattr(app.state.authenticator, "_fresh_seconds", 0.0)
    for path in settings.home.glob("evenkeel.db*"):
        path.unlink()
    (settings.home / "evenkeel.db").mkdir()
    try:
        answer = await client.post(url, json=body)
        unknown = await client.post(url, json=body, headers={"Authorization": "Bearer ek_0_0"})
    finally:
        (settings.home / "evenkeel.db").rmdir()
    assert answer.status_code == 200, answer.text
    assert unknown.status_code == 503


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_int64_ids_survive_being_written_as_strings(ids: list[int]):
    assert ids_as("int64", ids) == ids
    assert ids_as("int64", [str(one) for one in ids]) == ids


@pytest.mark.parametrize("written", ["0108775000", "007", "-0", "+7", " 7", "7.0", "\u0667"])
def test_text_that_is_written_otherwise_is_no_integer_id(written: str):
    assert ids_as("string", [written]) == [written]
    with pytest.raises(ItemIdError, match="is not an integer"):
        ids_as("int64", [written])


@pytest.mark.slow
@given(st.lists(st.one_of(st.integers(), st.text(max_size=3), st.floats(), st.booleans(), st.none()), max_size=4))
def test_ids_of_any_kind_are_taken_or_refused(ids: list[Any]):
    for id_type, kind in (("int64", int), ("string", str)):
        try:
            taken = ids_as(id_type, ids)
        except ItemIdError:
            continue
        assert len(taken) == len(ids)
        assert all(type(one) is kind for one in taken)


def test_accept_prefers_by_quality():
    assert accepted(None, (JSON, ARROW)) == JSON
    assert accepted("*/*", (JSON, ARROW)) == JSON
    assert accepted(f"{JSON};q=0.5, {ARROW}", (JSON, ARROW)) == ARROW
    assert accepted("text/html, application/*;q=0.1", (JSON, ARROW)) == JSON
