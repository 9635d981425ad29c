"""Items for users over HTTP: what is answered, refused, and never mixed while versions are switched."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import fcntl
import hashlib
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.vectors.item_columns import ItemColumns
from service.api.routes import recommend
from service.core.settings import Settings
from service.features.indexes import Indexes
from tests.service import published
from tests.service.service_kit import until
from tests.support.query_towers import tower_of

pytestmark = pytest.mark.anyio

URL = "/v1/collections/items/recommend"
SEEN = [10, 40, 70]


def publish(settings: Settings, seed: int = 0, users: Any = (1, 2, 3)) -> tuple[str, np.ndarray]:
    """A version with users, and its scores [users, items]."""
    everybody = published.users_of(users, SEEN, seed, tower=published.tower_of_items(seed)[0])
    version, vectors = published.publish(settings, seed=seed, users=everybody)
    return version, np.asarray(everybody.vectors @ vectors.T)


def best(scores: np.ndarray, k: int, without: Any = ()) -> list[int]:
    ids = [10 * int(row + 1) for row in np.argsort(-scores)]
    return [one for one in ids if one not in without][:k]


async def test_each_user_gets_its_best_items(client: Any, settings: Settings) -> None:
    version, scores = publish(settings)
    answer = await client.post(URL, json={"users": [2, 9, 1], "k": 4})
    assert answer.status_code == 200
    body = answer.json()
    assert body["version"] == version
    second, unknown, first = body["users"]
    assert (second["id"], second["found"]) == (2, True)
    assert [item["id"] for item in second["items"]] == best(scores[1], 4)
    np.testing.assert_allclose([item["score"] for item in second["items"]], np.sort(scores[1])[::-1][:4], rtol=1e-5)
    assert unknown == {"id": 9, "found": False, "items": []}
    assert [item["id"] for item in first["items"]] == best(scores[0], 4)


async def test_items_are_left_out_by_id_and_because_they_were_seen(client: Any, settings: Settings) -> None:
    _, scores = publish(settings)
    body = {"users": [1, 2], "k": 50, "exclude": ["20", "999"], "exclude_seen": True}
    first, second = (await client.post(URL, json=body)).json()["users"]
    assert [item["id"] for item in first["items"]] == best(scores[0], 50, [20, *SEEN])
    assert [item["id"] for item in second["items"]] == best(scores[1], 50, [20])


async def test_requests_that_cannot_be_answered(
    client: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(settings)
    alone, _ = published.publish(settings, seed=1)
    answer = await client.post(URL, json={"users": [1]})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:evenkeel:no-users")
    assert alone in answer.json()["detail"]
    assert (await client.post(URL, json={"users": [1], "version": "v000001"})).status_code == 200
    assert (await client.post(URL, json={"users": [1], "version": "v000009"})).status_code == 404
    assert (await client.post("/v1/collections/none/recommend", json={"users": [1]})).status_code == 404
    at_first: dict[str, Any] = {"version": "v000001"}
    for wrong in (
        {},
        {"users": None},
        {"users": [1], "histories": [[10]]},
        {"users": ["x"]},
        {"users": [1], "k": 0},
        {"users": [1.5]},
        {"users": [1], "of": 1},
        {"features": [{"country": [[1]]}]},
        {"histories": [10]},
    ):
        assert (await client.post(URL, json=at_first | wrong)).status_code == 422, wrong
    monkeypatch.setattr(recommend, "MAX_ITEMS", 10)
    answer = await client.post(URL, json={"users": [1, 2, 3], "k": 5})
    assert answer.status_code == 422
    assert "ask for at most 2 users at once" in answer.text


@pytest.mark.parametrize("asked", [{"users": [1]}, {"histories": [[30, 110]]}], ids=["users", "histories"])
async def test_users_are_never_scored_against_items_of_another_version(
    client: Any, settings: Settings, asked: dict[str, Any]
) -> None:
    """While versions are switched; a version without users is among them, and answers 409."""
    made = dict(publish(settings, seed) for seed in range(4))
    alone, _ = published.publish(settings, seed=9)
    collection = published.store_at(settings).collection("items")
    expected = {version: best(scores[0], 10) for version, scores in made.items()}
    if "histories" in asked:
        for seed, version in enumerate(made):
            query = published.tower_of_items(seed)[1][[2, 10]].sum(axis=0)
            expected[version] = best(published.directions(50, seed) @ query, 10)
    answered: dict[str, int] = {}

    switched = asyncio.Event()

    async def ask() -> None:
        while not switched.is_set():
            answer = await client.post(URL, json=asked)
            if answer.status_code == 409:
                assert alone in answer.text
                answered[alone] = answered.get(alone, 0) + 1
                continue
            body = answer.json()
            assert [item["id"] for item in body["users"][0]["items"]] == expected[body["version"]]
            answered[body["version"]] = answered.get(body["version"], 0) + 1

    async def switch() -> None:
        for number in range(2000):
            version = [*made, alone][number % 5]
            await asyncio.to_thread(collection.promote, version, "to and fro")
            if number > 40 and len(answered) > 2:
                break
        switched.set()

    await asyncio.gather(switch(), ask(), ask())
    assert len(answered) > 2


async def test_erased_users_are_unknown(client: Any, settings: Settings) -> None:
    publish(settings)
    erased = await client.post(
        "/v1/collections/items/erase", json={"ids": [2], "reason": "they asked", "part": "users"}
    )
    assert erased.json() == {"versions": ["v000001"], "rows": 1}
    users = (await client.post(URL, json={"users": [1, 2]})).json()["users"]
    assert [user["found"] for user in users] == [True, False]
    (note,) = (await client.get("/v1/collections/items/erasures")).json()["items"]
    assert (note["part"], note["rows"]) == ("users", 1)
    readmitted = {"ids": [2, 3], "reason": "they came back", "part": "users"}
    assert (await client.post("/v1/collections/items/readmit", json=readmitted)).json() == {"ids": 1}


async def test_histories_are_answered(client: Any, settings: Settings) -> None:
    version, _ = publish(settings)
    body = {"histories": [["10", "40", "90"], [7], []], "k": 5, "exclude_seen": True, "exclude": [20]}
    answer = (await client.post(URL, json=body)).json()
    assert answer["version"] == version
    query = published.tower_of_items()[1][[0, 3, 8]].sum(axis=0)
    scores = published.directions(50, 0) @ query
    first, *others = answer["users"]
    assert (first["id"], first["found"]) == (None, True)
    assert [item["id"] for item in first["items"]] == best(scores, 5, [10, 40, 90, 20])
    assert others == [{"id": None, "found": False, "items": []}] * 2


async def test_features_are_answered(client: Any, settings: Settings) -> None:
    rows = np.random.default_rng(5).standard_normal((3, 8)).astype(np.float32)
    tower = tower_of({"country": (["de", "fr"], rows[:2]), "user": ([4], rows[2:])})
    version, vectors = published.publish(settings, users=published.users_of([1], tower=tower))
    body: dict[str, Any] = {"features": [{"country": "fr", "user": "4"}, {"country": "es", "user": None}], "k": 3}
    answer = (await client.post(URL, json=body)).json()
    assert [item["id"] for item in answer["users"][0]["items"]] == best(vectors @ (rows[1] + rows[2]), 3)
    assert (answer["version"], answer["users"][1]["found"]) == (version, False)
    body["features"][1] = {"town": "Ulm"}
    refused = (await client.post(URL, json=body)).json()
    assert refused["errors"] == [
        {"field": "features.1.town", "message": "version v000001 reads no such feature",
         "remedy": "it reads country, user"},
    ]  # fmt: skip
    refused = await client.post(URL, json={"histories": [[10]]})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:evenkeel:no-query-tower")
    assert "reads features, not histories" in refused.json()["detail"]


async def test_without_onnxruntime_it_is_named(
    client: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(settings)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused = await client.post(URL, json={"histories": [[10]]})
    assert (refused.status_code, refused.json()["type"]) == (501, "urn:evenkeel:onnxruntime-missing")
    assert (await client.post(URL, json={"users": [1]})).status_code == 200


async def test_the_query_tower_is_sent(client: Any, settings: Settings) -> None:
    version, _ = publish(settings)
    answer = await client.get("/v1/collections/items/versions/current/tower")
    assert (answer.status_code, answer.headers["Evenkeel-Version"]) == (200, version)
    assert answer.content == published.tower_of_items()[0].data
    digest = base64.b64encode(hashlib.sha256(answer.content).digest()).decode()
    assert answer.headers["Content-Digest"] == f"sha-256=:{digest}:"
    known = {"If-None-Match": answer.headers["ETag"]}
    assert (await client.get(f"/v1/collections/items/versions/{version}/tower", headers=known)).status_code == 304
    published.publish(settings, seed=1, users=published.users_of([1]))
    refused = await client.get("/v1/collections/items/versions/current/tower")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:evenkeel:no-query-tower")


async def test_items_are_filtered(client: Any, settings: Settings) -> None:
    columns = ItemColumns(np.arange(1, 51) * 10, {"brand": pa.array(np.arange(1, 51) % 4)})
    everybody = dataclasses.replace(published.users_of([1, 2]), columns=columns)
    _, vectors = published.publish(settings, users=everybody)
    body = {"users": [1], "k": 50, "filter": {"brand": ["2", "3"]}}
    (user,) = (await client.post(URL, json=body)).json()["users"]
    scores = np.asarray(everybody.vectors @ vectors.T)[0]
    expected = best(scores, 50, [10 * key for key in range(1, 51) if key % 4 not in (2, 3)])
    assert [item["id"] for item in user["items"]] == expected
    refused = (await client.post(URL, json=body | {"filter": {"size": [2]}})).json()
    assert refused["errors"] == [
        {"field": "filter.size", "message": "version v000001 has no such column", "remedy": "it has brand"}
    ]


@pytest.mark.process
async def test_a_large_version_is_searched_exactly_until_its_index_is_there(
    app: Any, client: Any, settings: Settings
) -> None:
    version, scores = publish(settings)
    app.state.indexes.close()
    app.state.indexes = Indexes(settings.store_url, settings.home / "neighbors", exact_items=20)
    body = {"users": [1, 2], "k": 5, "exclude_seen": True}
    first = (await client.post(URL, json=body)).json()
    assert first["exact"] is True

    async def look() -> Any:
        answer = (await client.post(URL, json=body)).json()
        return None if answer["exact"] else answer

    found = await until(look)
    assert [item["id"] for item in found["users"][0]["items"]] == best(scores[0], 5, SEEN)
    assert [one["items"] for one in found["users"]] == [
        [{"id": item["id"], "score": pytest.approx(item["score"], rel=1e-5)} for item in one["items"]]
        for one in first["users"]
    ]
    folder = settings.home / "neighbors" / "default" / "items" / "scores"
    (file,) = folder.glob(f"{version}-*.usearch")
    assert {one.name for one in folder.iterdir()} == {file.name, f"{file.stem}.json"}
    gone = found["users"][0]["items"][0]["id"]
    answer = await client.post("/v1/collections/items/erase", json={"ids": [gone], "reason": "they asked"})
    assert answer.status_code == 200
    assert not file.exists()
    for _ in range(2):
        after = await client.post(URL, json=body)
        assert gone not in {item["id"] for one in after.json()["users"] for item in one["items"]}
        await until(look)


@pytest.mark.process
async def test_a_builder_that_finds_another_at_work_is_not_started_again(
    app: Any, client: Any, settings: Settings
) -> None:
    publish(settings)
    app.state.indexes.close()
    app.state.indexes = Indexes(settings.store_url, settings.home / "neighbors", exact_items=20)
    collection = published.store_at(settings).collection("items")
    name = f"{collection.current()}-{collection.open().manifest.identity}-0.lock"
    folder = settings.home / "neighbors" / "default" / "items" / "scores"
    folder.mkdir(parents=True)
    with open(folder / name, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (await client.post(URL, json={"users": [1], "k": 5})).json()["exact"] is True
        ((builder, _),) = app.state.indexes._builders.values()
        assert builder.wait(300) == 0
        assert (await client.post(URL, json={"users": [1], "k": 5})).json()["exact"] is True
        assert [one for one, _ in app.state.indexes._builders.values()] == [builder]
