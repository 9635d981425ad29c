"""Pages stay whole while rows come and go: what was there all the time is seen once, nothing twice."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.service.service_kit import BOTH, job_body

pytestmark = [pytest.mark.anyio, BOTH]


async def walk(client: httpx.AsyncClient, path: str, field: str) -> list[str]:
    found: list[str] = []
    params: dict[str, str | int] = {"limit": 3}
    while True:
        page = (await client.get(path, params=params)).json()
        found += [item[field] for item in page["items"]]
        if page["next_cursor"] is None:
            return found
        params["cursor"] = page["next_cursor"]
        await asyncio.sleep(0)


async def test_pages_under_inserts_and_deletes(client: httpx.AsyncClient, dataset: str) -> None:
    made = [(await client.post("/v1/jobs", json=job_body())).json()["id"] for _ in range(24)]
    schedule = {"cron": "0 3 * * *", "job": job_body()}
    names = [f"schedule-{number:02}" for number in range(12)]
    for name in names:
        assert (await client.post("/v1/schedules", json={"name": name, **schedule})).status_code == 201
    for one in made:
        await client.post(f"/v1/jobs/{one}/cancel")
    doomed, kept = set(made[::3]), set(made) - set(made[::3])
    gone, stay = set(names[::3]), set(names) - set(names[::3])

    async def disturb() -> None:
        for one, name in zip(sorted(doomed), [*sorted(gone), *[""] * 9], strict=False):
            await client.post("/v1/jobs", json=job_body())
            await client.delete(f"/v1/jobs/{one}")
            if name:
                await client.delete(f"/v1/schedules/{name}")
                await client.post("/v1/schedules", json={"name": f"{name}-new", **schedule})

    task = asyncio.create_task(disturb())
    walks = 0
    while not task.done() or walks == 0:
        for path, field, there in (("/v1/jobs", "id", kept), ("/v1/schedules", "name", stay)):
            seen = await walk(client, path, field)
            assert len(seen) == len(set(seen))
            assert there <= set(seen)
            assert seen == sorted(seen, reverse=field == "id")
        walks += 1
    await task


async def test_a_list_that_ends_with_a_full_page_has_no_other(client: httpx.AsyncClient, dataset: str) -> None:
    made = [(await client.post("/v1/jobs", json=job_body())).json()["id"] for _ in range(4)]
    first = (await client.get("/v1/jobs", params={"limit": 2})).json()
    second = (await client.get("/v1/jobs", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [one["id"] for one in first["items"] + second["items"]] == sorted(made, reverse=True)
    assert second["next_cursor"] is None
