"""Datasets over HTTP: what is registered, what is refused and with which remedy, profile, infer."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from tests.service import published
from tests.service.service_kit import client_of, job_body, running

pytestmark = pytest.mark.anyio


async def test_register_get_list_delete(client: httpx.AsyncClient, dataset_body: dict[str, Any]) -> None:
    made = await client.post("/v1/datasets", json=dataset_body)
    assert made.status_code == 201
    assert made.headers["location"] == "/v1/datasets/ratings"
    again = await client.post("/v1/datasets", json=dataset_body)
    assert again.status_code == 200
    assert again.json() == made.json()
    assert (await client.get("/v1/datasets/ratings")).json() == made.json()
    assert (await client.get("/v1/datasets")).json() == {"items": [made.json()], "next_cursor": None}
    other = await client.post("/v1/datasets", json={**dataset_body, "partition": None})
    assert other.status_code == 409
    assert "another name" in other.json()["detail"]
    assert (await client.delete("/v1/datasets/ratings")).status_code == 204
    assert (await client.delete("/v1/datasets/ratings")).status_code == 404
    assert (await client.get("/v1/datasets/ratings")).status_code == 404


async def test_a_dataset_is_replaced_and_jobs_keep_theirs(
    app: FastAPI, client: httpx.AsyncClient, dataset_body: dict[str, Any]
) -> None:
    replaced = {**dataset_body, "max_bad_rows": 0.25}
    assert (await client.put("/v1/datasets/ratings", json=replaced)).status_code == 404
    made = (await client.post("/v1/datasets", json=dataset_body)).json()
    job = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    answer = await client.put("/v1/datasets/ratings", json=replaced)
    assert (answer.status_code, answer.json()) == (200, {**made, "max_bad_rows": 0.25})
    assert (await client.get("/v1/datasets/ratings")).json() == answer.json()
    later = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    async with app.state.database.read() as connection:
        rows = await connection.execute(sa.select(tables.job.c.id, tables.job.c.dataset_spec))
        kept = {row.id: row.dataset_spec.get("max_bad_rows") for row in rows}
    assert kept == {job: made.get("max_bad_rows"), later: 0.25}


async def test_a_replacement_is_checked_as_a_new_dataset_is(
    client: httpx.AsyncClient, dataset_body: dict[str, Any]
) -> None:
    made = (await client.post("/v1/datasets", json=dataset_body)).json()
    for change, field, message in (
        ({"uri": "/etc/passwd"}, "uri", "outside the data roots"),
        ({"features": {"nobody": {"type": "id"}}}, "features.nobody", "no column"),
        ({"name": "others"}, "name", "the address names 'ratings'"),
    ):
        refused(await client.put("/v1/datasets/ratings", json={**dataset_body, **change}), field, message)
    assert (await client.get("/v1/datasets/ratings")).json() == made


async def test_a_replacement_fits_the_jobs_of_schedules(
    client: httpx.AsyncClient, dataset_body: dict[str, Any]
) -> None:
    await client.post("/v1/datasets", json=dataset_body)
    job = {key: value for key, value in job_body().items() if key != "idempotency_key"}
    job["dataset"] = {"name": "ratings", "window": {"start": "{firing_date}", "days": 1}}
    schedule = {"name": "nightly", "cron": "0 3 * * *", "timezone": "UTC", "job": job}
    assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
    answer = await client.put("/v1/datasets/ratings", json={**dataset_body, "partition": None})
    assert answer.status_code == 409
    assert "schedule 'nightly' does not fit it" in answer.json()["detail"]
    assert (await client.put("/v1/datasets/ratings", json={**dataset_body, "max_bad_rows": 0.5})).status_code == 200


async def test_lists_come_in_pages(client: httpx.AsyncClient, dataset_body: dict[str, Any]) -> None:
    names = [f"d{number}" for number in range(5)]
    for name in reversed(names):
        assert (await client.post("/v1/datasets", json={**dataset_body, "name": name})).status_code == 201
    found: list[str] = []
    cursor = None
    for size in (2, 2, 1):
        page = (await client.get("/v1/datasets", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))).json()
        assert len(page["items"]) == size
        found += [one["name"] for one in page["items"]]
        cursor = page["next_cursor"]
    assert cursor is None
    assert found == names


def refused(response: httpx.Response, field: str, message: str) -> dict[str, str]:
    assert response.status_code == 422, response.text
    error = response.json()["errors"][0]
    assert error["field"] == field
    assert message in error["message"]
    return dict(error)


async def test_paths_outside_the_data_roots(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings, tmp_path: Path
) -> None:
    root = settings.data_roots[0]
    outside = tmp_path / "outside.parquet"
    pq.write_table(pa.table({"user": [1]}), outside)
    (root / "link.parquet").symlink_to(outside)
    (root / "folder").mkdir()
    (root / "folder" / "a.parquet").symlink_to(outside)
    (tmp_path / "data-too").mkdir()
    for uri in [
        str(outside),
        outside.as_uri(),
        f"{root}/../outside.parquet",
        str(root / "link.parquet"),
        str(root / "folder"),
        str(tmp_path / "data-too" / "x.parquet"),
        "/etc/passwd",
        "/etc/does-not-exist",
        os.path.relpath(outside),
    ]:
        error = refused(await client.post("/v1/datasets", json={**dataset_body, "uri": uri}), "uri", "outside the data")
        assert "`evenkeel roots add /" in error["remedy"] or "link" in error["remedy"]
    features = {**dataset_body["features"], "extra": {"join": {"uri": "/etc/passwd", "on": "item", "column": "c"}}}
    joined = await client.post("/v1/datasets", json={**dataset_body, "features": features})
    refused(joined, "features.extra.join.uri", "outside the data roots")
    far = await client.post("/v1/datasets", json={**dataset_body, "uri": "file://elsewhere/x.parquet"})
    refused(far, "uri", "neither a local path")


async def test_what_the_service_keeps_is_no_data_though_a_root_holds_it(
    settings: Settings, dataset_body: dict[str, Any], tmp_path: Path
) -> None:
    """Vectors and events are of all tenants, and every key that may submit could read them row by row."""
    roots = (tmp_path, settings.home / "chosen")
    settings = dataclasses.replace(settings, data_roots=roots, tenant_data_roots=(("ads", tmp_path),))
    published.publish(settings.for_tenant("ads"), name="secret")
    vectors = next(settings.home.rglob("items.arrow"))
    (tmp_path / "link").symlink_to(vectors)
    (settings.home / "chosen").mkdir()
    shutil.copy(dataset_body["uri"], settings.home / "chosen" / "rows.parquet")
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        not_there = settings.run_dir("job") / "events.jsonl"
        for uri in (vectors, tmp_path / "link", settings.home / "store", settings.home, not_there, tmp_path):
            for tenant in ("default", "ads"):
                response = await client.post(
                    "/v1/datasets/infer", json={"uri": str(uri)}, headers={"Evenkeel-Tenant": tenant}
                )
                refused(response, "uri", "keeps files of its own")
        chosen = {**dataset_body, "uri": str(settings.home / "chosen")}
        assert (await client.post("/v1/datasets", json=chosen)).status_code == 201
        assert (await client.post("/v1/datasets", json={**dataset_body, "name": "beside"})).status_code == 201


async def test_a_log_that_leads_outside_is_not_followed(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings, tmp_path: Path
) -> None:
    table = settings.data_roots[0] / "table"
    (table / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"user": [1]}), table / "rows.parquet")
    body = {**dataset_body, "uri": str(table)}
    (table / "_delta_log" / "0.json").write_text("{}")
    error = refused(await client.post("/v1/datasets", json=body), "uri", "a table of Delta Lake")
    assert "plain Parquet files" in error["remedy"]
    (table / "_delta_log" / "0.json").unlink()
    (tmp_path / "0.json").write_text("{}")
    (table / "_delta_log" / "0.json").symlink_to(tmp_path / "0.json")
    refused(await client.post("/v1/datasets", json=body), "uri", "0.json is a link that leads outside the data roots")


async def test_files_that_cannot_be_used(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings, data_file: Path
) -> None:
    root = settings.data_roots[0]
    whole = data_file.read_bytes()
    (root / "empty.parquet").write_bytes(b"")
    (root / "short.parquet").write_bytes(whole[: len(whole) // 2])
    (root / "words.parquet").write_bytes(b"this is not parquet at all")
    (root / "none").mkdir()
    for name, message in [
        ("missing.parquet", "no such file"),
        ("empty.parquet", "is empty"),
        ("short.parquet", "cannot be read"),
        ("words.parquet", "cannot be read"),
        ("none", "holds no"),
    ]:
        error = refused(
            await client.post("/v1/datasets", json={**dataset_body, "uri": str(root / name)}), "uri", message
        )
        assert error["remedy"]
    assert (await client.get("/v1/datasets")).json()["items"] == []


async def test_columns_that_are_not_there(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings
) -> None:
    async def post(**fields: Any) -> httpx.Response:
        return await client.post("/v1/datasets", json={**dataset_body, **fields})

    refused(await post(features={"usr": {"type": "id"}}), "features.usr", "no column 'usr'")
    refused(await post(label={"rule": "stars >= 4"}), "label.rule", "no column 'stars'")
    refused(await post(label={"column": "click"}), "label.column", "there are date, item, rating, user")
    refused(await post(label={"value": "stars"}), "label.value", "no column 'stars'")
    labels = {"like": {"rule": "rating >= 4"}, "buy": {"column": "bought", "mask": "shown"}}
    refused(await post(label=None, labels=labels), "labels.buy.column", "no column 'bought'")
    labels["buy"]["column"] = "item"
    refused(await post(label=None, labels=labels), "labels.buy.mask", "no column 'shown'")
    refused(await post(weight="price"), "weight", "no column 'price'")
    weighted = {"item": {"type": "id"}, "user": {"type": "id_list", "weights": "shares"}}
    refused(await post(features=weighted), "features.user.weights", "no column 'shares'")
    refused(await post(features={"price": {"type": "dense"}, "item": {"type": "id"}}), "features.price", "'price'")
    refused(await post(order="pos"), "order", "no column 'pos'")
    refused(await post(filter="stars > 1 and rating >= 4"), "filter", "no column 'stars'")
    pq.write_table(pa.table({"item": [1], "brand": [2]}), settings.data_roots[0] / "brands.parquet")
    good = {"join": {"uri": "brands.parquet", "on": "item", "column": "brand"}}
    bad = {"join": {"uri": "brands.parquet", "on": "item", "column": "maker"}}
    features = dataset_body["features"]
    refused(await post(features={**features, "maker": bad}), "features.maker.join.column", "no column 'maker'")
    pq.write_table(pa.table({"src": [1], "dst": [2]}), settings.data_roots[0] / "friends.parquet")
    graph = {"uri": "friends.parquet", "source": "src", "target": "dst", "of": "user"}
    unnamed = await post(graphs={"friends": {**graph, "target": "to"}})
    refused(unnamed, "graphs.friends.target", "no column 'to' in")
    elsewhere = await post(graphs={"friends": {**graph, "uri": "/etc/passwd"}})
    refused(elsewhere, "graphs.friends.uri", "outside the data roots")
    assert (await post(features={**features, "brand": good}, graphs={"friends": graph})).status_code == 201


async def test_an_item_table(client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings) -> None:
    pq.write_table(pa.table({"item": [1], "brand": [2]}), settings.data_roots[0] / "items.parquet")
    table = {"uri": "items.parquet", "features": {"brand": {"type": "id"}, "maker": {"column": "firm"}}}

    async def post(**changes: Any) -> httpx.Response:
        return await client.post("/v1/datasets", json={**dataset_body, "items": {**table, **changes}})

    refused(await post(), "items.features.maker", "no column 'firm' in")
    refused(await post(uri="/etc/passwd"), "items.uri", "outside the data roots")
    refused(await post(on="product"), "items.on", "'product' is not the column of 'item'")
    brand = {"brand": {"type": "id"}}
    made = await post(features=brand)
    assert made.status_code == 201, made.text
    pq.write_table(pa.table({"product": [1], "brand": [2]}), settings.data_roots[0] / "items.parquet")
    other = {**dataset_body, "name": "others", "items": {**table, "features": brand}}
    refused(await client.post("/v1/datasets", json=other), "items.on", "no column 'item' in")


async def test_a_folder_of_csv(client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings) -> None:
    folder = settings.data_roots[0] / "days"
    folder.mkdir()
    (folder / "b.csv").write_text("user,item,rating,date\n2,2,1,2026-01-02\n")
    (folder / "a.csv").write_text("user,item,rating,date\n1,1,5,2026-01-01\n1,2,4,2026-01-01\n")
    (folder / "_notes.csv").write_text("not data\n")
    assert (await client.post("/v1/datasets", json={**dataset_body, "uri": str(folder)})).status_code == 201
    profile = (await client.get("/v1/datasets/ratings/profile")).json()
    assert (profile["rows"], profile["files"]) == (3, 2)
    assert profile["label_rate"] == pytest.approx(2 / 3)


async def test_a_folder_of_json_lines(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings
) -> None:
    folder = settings.data_roots[0] / "days"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"user": 2, "item": 2, "rating": 1, "date": "2026-01-02"}\n')
    (folder / "a.jsonl").write_text('{"user": 1, "item": 1, "rating": 5, "date": "2026-01-01"}\n')
    assert (await client.post("/v1/datasets", json={**dataset_body, "uri": str(folder)})).status_code == 201
    profile = (await client.get("/v1/datasets/ratings/profile")).json()
    assert (profile["rows"], profile["files"], profile["label_rate"]) == (2, 2, pytest.approx(1 / 2))


async def test_profile_counts(client: httpx.AsyncClient, dataset_body: dict[str, Any], data_file: Path) -> None:
    table = {"user": [1, 1, None, 2], "item": [[1, 2], [3], [], [1]], "rating": [5.0, float("nan"), 1.0, None]}
    pq.write_table(pa.table(table), data_file)
    body = {**dataset_body, "partition": None, "features": {"user": {}, "item": {"type": "id_list"}}}
    assert (await client.post("/v1/datasets", json=body)).status_code == 201
    profile = (await client.get("/v1/datasets/ratings/profile")).json()
    assert profile["rows"] == 4
    assert profile["features"]["user"] == {"column": "user", "nulls": 1, "distinct": 2}
    assert profile["features"]["item"] == {"column": "item", "nulls": 0, "distinct": 3}
    assert "row 3" in profile["label_problem"]


async def test_folders_named_key_value_are_columns(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], settings: Settings, data_file: Path
) -> None:
    rows = pq.read_table(data_file).drop_columns(["date"])
    for day in ("2026-01-01", "2026-01-02"):
        folder = settings.data_roots[0] / "days" / f"date={day}"
        folder.mkdir(parents=True)
        pq.write_table(rows, folder / "part.parquet")
    body = {**dataset_body, "uri": str(settings.data_roots[0] / "days"), "partition": "date"}
    made = await client.post("/v1/datasets", json=body)
    assert made.status_code == 201, made.text
    profile = (await client.get("/v1/datasets/ratings/profile")).json()
    assert (profile["rows"], profile["files"]) == (2 * len(rows), 2)


async def test_a_dataset_of_a_schedule_stays(client: httpx.AsyncClient, dataset: str) -> None:
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body()}
    assert (await client.post("/v1/schedules", json=body)).status_code == 201
    refusal = await client.delete(f"/v1/datasets/{dataset}")
    assert refusal.status_code == 409
    assert "daily" in refusal.json()["detail"]
    await client.delete("/v1/schedules/daily")
    assert (await client.delete(f"/v1/datasets/{dataset}")).status_code == 204


async def test_infer_proposes_what_can_be_registered(
    client: httpx.AsyncClient, data_file: Path, tmp_path: Path
) -> None:
    response = await client.post("/v1/datasets/infer", json={"uri": str(data_file), "name": "mine"})
    assert response.status_code == 200, response.text
    proposal = response.json()
    assert (proposal["name"], proposal["uri"]) == ("mine", str(data_file))
    assert {"user", "item"} <= set(proposal["features"])
    assert (await client.post("/v1/datasets", json=proposal)).status_code == 201
    refused(await client.post("/v1/datasets/infer", json={"uri": "/etc/passwd"}), "uri", "outside the data roots")
    (data_file.parent / "empty.csv").write_text("")
    empty = await client.post("/v1/datasets/infer", json={"uri": str(data_file.parent / "empty.csv")})
    assert refused(empty, "uri", "empty.csv")["remedy"]
