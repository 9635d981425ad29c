"""Erasing ids over HTTP, from the command line and from Python."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from fastapi import FastAPI

from embeddings.store.collection import erasure
from embeddings.store.files import writer_lock
from service.app import create_app
from service.client import Client, ProblemError
from service.core.settings import Settings
from service.features.indexes import Indexes
from tests.service import published, serving
from tests.service.service_kit import until
from tests.service.serving import Served


@pytest.mark.anyio
async def test_erasures_that_wait_keep_no_fetch_waiting(
    client: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(settings)
    collection = published.store_at(settings).collection("items")
    body = {"ids": [10], "reason": "they asked"}
    with writer_lock(collection.directory / erasure.LOCK_FILE):
        # More than the threads that short requests share now.
        monkeypatch.setattr(to_thread.current_default_thread_limiter(), "total_tokens", 2)
        waiting = [asyncio.create_task(client.post("/v1/collections/items/erase", json=body)) for _ in range(3)]
        async with asyncio.timeout(300):
            answer = await client.post("/v1/collections/items/vectors", json={"ids": [20]})
        assert answer.status_code == 200
        assert not any(task.done() for task in waiting)
    assert {done.status_code for done in await asyncio.gather(*waiting)} == {200}


@pytest.mark.anyio
async def test_ids_are_erased_from_every_version(app: FastAPI, client: Any, settings: Settings) -> None:
    for seed in (1, 2):
        published.publish(settings, seed=seed)
    ask = {"ids": [10, 30, 10], "version": "current"}
    before = await client.post("/v1/collections/items/vectors", json=ask)
    # A version without its rows is another content: nobody is told that theirs is still good.
    etag = before.headers["etag"]
    indexes = settings.home / "neighbors" / "default" / "items"
    indexes.mkdir(parents=True)
    (indexes / "v000001-0.usearch").write_bytes(b"directions")
    answer = await client.post("/v1/collections/items/erase", json={"ids": [10, 20], "reason": "they asked"})
    assert (answer.status_code, answer.json()) == (200, {"versions": ["v000001", "v000002"], "rows": 4})
    assert not indexes.exists()
    after = await client.post("/v1/collections/items/vectors", json=ask, headers={"If-None-Match": etag})
    assert after.status_code == 200
    assert [item["status"] for item in after.json()["items"]] == ["missing", "found", "missing"]
    old = await client.post("/v1/collections/items/vectors", json={**ask, "version": "v000001"})
    assert old.json()["items"][0]["vector"] is None
    (note,) = (await client.get("/v1/collections/items/erasures")).json()["items"]
    assert (note["reason"], note["ids"], note["rows"]) == ("they asked", 2, 4)
    assert note["key"].startswith("key_")
    answer = await client.post("/v1/collections/items/readmit", json={"ids": ["10", "30"], "reason": "back"})
    assert (answer.status_code, answer.json()) == (200, {"ids": 1})
    # Each of these answers is documented.
    paths = app.openapi()["paths"]
    for path in ("erase", "readmit"):
        assert {"200", "401", "403", "404", "422", "507"} <= set(
            paths[f"/v1/collections/{{collection}}/{path}"]["post"]["responses"]
        )


@pytest.mark.anyio
async def test_ids_are_erased_from_scratch_collections(client: Any, settings: Settings) -> None:
    nulls = "items-nulls-0123abcd"
    for name in ("items", nulls, "films"):
        published.publish(settings, name)
    indexes = settings.home / "neighbors" / "default" / nulls
    indexes.mkdir(parents=True)
    answer = await client.post("/v1/collections/items/erase", json={"ids": [10], "reason": "they asked"})
    assert answer.json() == {"versions": ["v000001"], "rows": 1}
    assert not indexes.exists()
    for name, status in (("items", "missing"), (nulls, "missing"), ("films", "found")):
        answer = await client.post(f"/v1/collections/{name}/vectors", json={"ids": [10]})
        assert answer.json()["items"][0]["status"] == status


@pytest.mark.process
def test_neighbours_elsewhere_name_no_erased_id(settings: Settings, tmp_path: Path) -> None:
    """Another process has searched two versions, one through an index of its own and one exactly, when ids go."""
    old, _ = published.publish(settings, num_items=300, seed=1)
    new, vectors = published.publish(settings, seed=2)
    elsewhere = published.store_at(settings).collection("items")
    searches = Indexes(settings.store_url, tmp_path / "elsewhere", exact_rows=100)
    indexes = tmp_path / "elsewhere" / "default" / "items"

    def nearest(version: str) -> tuple[list[Any], bool]:
        erasures = elsewhere.num_erasures()
        found = searches.search(elsewhere.open(version), vectors[0], 300, erasures=erasures)
        assert found is not None
        return [id_ for id_, _ in found[0]], found[1]

    try:
        assert 10 in nearest(new)[0]
        deadline = time.monotonic() + 300
        while nearest(old)[1]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = {*indexes.glob("*.usearch"), *searches._searches}
        assert len(before) == 2
        published.store_at(settings).collection("items").erase([10], "they asked")
        assert 10 not in nearest(new)[0]
        # With the first search after the erasure all from before it are gone, those of other versions too.
        assert not before & {*indexes.glob("*"), *searches._searches}
        assert 10 not in nearest(old)[0]
        assert len(nearest(new)[0]) == 49
    finally:
        searches.close()


@pytest.mark.anyio
@pytest.mark.parametrize("action", ["erase", "readmit"])
async def test_what_is_refused(client: Any, settings: Settings, action: str) -> None:
    published.publish(settings)
    body = {"ids": [10], "reason": "they asked"}
    assert (await client.post(f"/v1/collections/none/{action}", json=body)).status_code == 404
    for wrong in (
        {"ids": [10]}, {"reason": "x"}, {**body, "ids": []}, {**body, "reason": ""}, {**body, "reason": "  "},
        {**body, "ids": ["ten"]}, {**body, "ids": [1.5]}, {**body, "ids": [10, "20"]}, {**body, "more": 1},
    ):  # fmt: skip
        answer = await client.post(f"/v1/collections/items/{action}", json=wrong)
        assert answer.status_code == 422, wrong
        assert answer.headers["content-type"] == "application/problem+json"
    assert published.store_at(settings).collection("items").manifest()["rows"] == 50


@pytest.mark.anyio
async def test_erasing_needs_features_write(client: Any, settings: Settings) -> None:
    published.publish(settings)
    key = (await client.post("/v1/keys", json={"name": "reader", "scopes": ["features:read"]})).json()["key"]
    reader = {"Authorization": f"Bearer {key}"}
    for action in ("erase", "readmit"):
        answer = await client.post(f"/v1/collections/items/{action}", json={"ids": [10], "reason": "x"}, headers=reader)
        assert answer.status_code == 403
        assert "features:write" in answer.json()["detail"]
    assert (await client.get("/v1/collections/items/erasures", headers=reader)).status_code == 200


@pytest.mark.anyio
async def test_a_start_of_the_service_finishes_what_was_interrupted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embeddings.store.collection import erasure

    published.publish(settings)
    collection = published.store_at(settings).collection("items")
    with monkeypatch.context() as patched:
        patched.setattr(erasure.CollectionErasure, "_finish", lambda self, part, own=None: None)
        collection.erase([10], "they asked")
    assert collection.open().lookup([10])[0].tolist() == [1]
    app = create_app(settings)
    async with app.router.lifespan_context(app):

        async def is_done() -> bool:
            return "rows" in collection.erasures()[0]

        await until(is_done)
    assert collection.open().lookup([10])[0].tolist() == [0]


def test_from_the_command_line_and_from_python(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published.publish(served.settings, "films", seed=1)
    published.publish(served.settings, "films", seed=2)
    run = serving.in_this_process(served, monkeypatch, capsys)
    assert run("erase", "films", "10", "20", "--reason", "they asked")[:2] == (
        0, "films: 4 rows erased from 2 versions\n",
    )  # fmt: skip
    assert run("readmit", "films", "10", "--reason", "back")[:2] == (0, "films: 1 id may be published again\n")
    code, out, _ = run("erase", "films", "30", "--reason", "they asked", "--json")
    assert code == 0
    assert re.search(r'"rows": ?2', out)
    assert run("erase", "films", "10")[0] == 2
    code, _, told = run("erase", "nothing", "10", "--reason", "they asked")
    assert code == 1
    assert "there is no collection 'nothing'" in told
    with Client(served.url, served.key) as client:
        assert client.erase("films", [40, 50], "they asked") == {"versions": ["v000001", "v000002"], "rows": 4}
        assert client.readmit("films", [40, 60], "back") == {"ids": 1}
        with pytest.raises(ProblemError) as refused:
            client.erase("films", ["forty"], "they asked")
        assert refused.value.status == 422
