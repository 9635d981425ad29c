"""Schedules over HTTP and the scheduler behind them, on both kinds of database."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from service.jobs import job_records
from service.schedules import scheduler
from tests.service.racers import fire_in_process
from tests.service.service_kit import BOTH, client_of, job_body, running, until, wait_for, waits_for
from tests.support import forked

pytestmark = [pytest.mark.anyio, BOTH]

WINDOW = {"name": "ratings", "window": {"start": "{firing_date}", "days": 2}}
START = datetime.datetime(2026, 3, 1, 2, 59, tzinfo=datetime.UTC)


def body(name: str = "daily", **fields: Any) -> dict[str, Any]:
    job = job_body(**fields.pop("job", {}))
    return {"name": name, "cron": "0 3 * * *", "job": {**job, "dataset": WINDOW}, **fields}


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/schedules", json=body(**fields))
    assert response.status_code == 201, response.text
    return dict(response.json())


async def due_from(app: FastAPI, at: datetime.datetime) -> None:
    """Sets the clock of every schedule: the next firing is the first after ``at``."""
    async with app.state.database.write() as connection:
        first = at.replace(hour=3, minute=0, second=0, microsecond=0)
        await connection.execute(tables.schedule.update().values(next_fire_at=first))


async def firings(client: httpx.AsyncClient, name: str = "daily") -> list[dict[str, Any]]:
    return list((await client.get(f"/v1/schedules/{name}/firings")).json()["items"])


async def end_all(app: FastAPI) -> None:
    async with app.state.database.write() as connection:
        ids = await connection.scalars(sa.select(tables.job.c.id).where(tables.job.c.state == "queued"))
        for job_id in list(ids):
            await job_records.cancel(connection, job_id)


# --- over HTTP -------------------------------------------------------------------------------------------------------


async def test_create_get_list_change_delete(client: httpx.AsyncClient, dataset: str) -> None:
    # Far from now: it must not fire between two of these requests.
    hour = (tables.now() + datetime.timedelta(hours=12)).hour
    made = await create(client, timezone="Europe/Berlin", cron=f"0 {hour} * * *")
    assert made["catchup"] == "none"
    assert made["misfire_grace_seconds"] == 3600
    assert made["overlap"] == "forbid"
    assert made["paused"] is False
    following = datetime.datetime.fromisoformat(made["next_fire_at"])
    assert datetime.timedelta(0) < following - tables.now() <= datetime.timedelta(hours=25)
    shown = [datetime.datetime.fromisoformat(one) for one in made["next_firings"]]
    assert shown[0] == following
    assert [one.astimezone(ZoneInfo("Europe/Berlin")).hour for one in shown] == [hour] * 5
    assert len({one.date() for one in shown}) == 5
    assert (await client.get("/v1/schedules/daily")).json() == made
    assert (await client.get("/v1/schedules")).json() == {"items": [made], "next_cursor": None}
    assert (await client.post("/v1/schedules", json=body())).status_code == 409
    paused = (await client.patch("/v1/schedules/daily", json={"paused": True})).json()
    assert paused == {**made, "paused": True, "next_fire_at": None, "next_firings": []}
    resumed = (await client.patch("/v1/schedules/daily", json={"paused": False, "overlap": "queue"})).json()
    assert resumed == {**made, "overlap": "queue"}
    moved = (await client.patch("/v1/schedules/daily", json={"cron": "30 4 1 * *"})).json()
    assert ":30:00Z" in moved["next_fire_at"]
    assert (await client.delete("/v1/schedules/daily")).status_code == 204
    for method, path in [("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/trigger"), ("GET", "/firings")]:
        answer = await client.request(method, f"/v1/schedules/daily{path}", json={} if method == "PATCH" else None)
        assert answer.status_code == 404, path


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "* * * * * *"}, "cron"),
        ({"cron": "0" + ",0" * 4_000 + " * * * *"}, "cron"),
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"name": "Not a name"}, "name"),
        ({"catchup": "some"}, "catchup"),
        ({"catchup": "all"}, "catchup"),
        ({"catchup": "all", "overlap": "replace"}, "catchup"),
        ({"misfire_grace_seconds": -1}, "misfire_grace_seconds"),
        ({"overlap": "maybe"}, "overlap"),
        ({"every": "day"}, "every"),
        ({"job": {"name": "x"}}, "job.dataset"),
        ({"job": job_body(dataset={"name": "unknown"})}, "dataset.name"),
    ],
)
async def test_bad_schedules(reading: httpx.AsyncClient, change: dict[str, Any], field: str) -> None:
    response = await reading.post("/v1/schedules", json={**body(), **change})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field
    if field in ("name", "every", "dataset.name"):
        return
    await create(reading)
    patched = await reading.patch("/v1/schedules/daily", json=change)
    null = await reading.patch("/v1/schedules/daily", json={field.partition(".")[0]: None})
    assert (await reading.delete("/v1/schedules/daily")).status_code == 204
    assert (patched.status_code, null.status_code) == (422, 422)


async def test_trigger_fills_in_the_date(client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, timezone="Pacific/Kiritimati")
    response = await client.post("/v1/schedules/daily/trigger", json={"firing_date": "2026-01-02"})
    assert response.status_code == 202
    fired = response.json()
    assert response.headers["location"] == f"/v1/jobs/{fired['job_id']}"
    assert (fired["kind"], fired["outcome"], fired["firing_date"]) == ("trigger", "started", "2026-01-02")
    job = (await client.get(f"/v1/jobs/{fired['job_id']}")).json()
    assert job["spec"]["dataset"]["window"] == {"start": "2026-01-02", "days": 2}
    assert job["schedule"] == "daily"
    busy = await client.post("/v1/schedules/daily/trigger")
    assert busy.status_code == 409
    assert fired["job_id"] in busy.json()["detail"]
    await client.post(f"/v1/jobs/{fired['job_id']}/cancel")
    there = datetime.timezone(datetime.timedelta(hours=14))
    before = datetime.datetime.now(there).date().isoformat()
    today = await client.post("/v1/schedules/daily/trigger")
    assert before <= today.json()["firing_date"] <= datetime.datetime.now(there).date().isoformat()
    assert [one["fire_at"] for one in await firings(client)] == [today.json()["fire_at"], fired["fire_at"]]
    assert (await client.post("/v1/schedules/daily/trigger", json={"date": "2026-01-02"})).status_code == 422
    assert (await client.get("/v1/schedules/daily")).json()["job"]["dataset"]["window"]["start"] == "{firing_date}"


# --- the scheduler ---------------------------------------------------------------------------------------------------


async def test_a_due_schedule_fires_once(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, overlap="queue")
    await due_from(app, START)
    database = app.state.database
    assert await scheduler.fire_due(database, START) == 0
    three = START + datetime.timedelta(minutes=1, seconds=1)
    assert await scheduler.fire_due(database, three) == 1
    assert await scheduler.fire_due(database, three) == 0
    (fired,) = await firings(client)
    assert (fired["fire_at"], fired["firing_date"]) == ("2026-03-01T03:00:00Z", "2026-03-01")
    assert (fired["kind"], fired["outcome"]) == ("cron", "started")
    shown = (await client.get("/v1/schedules/daily")).json()
    assert shown["next_fire_at"] == "2026-03-02T03:00:00Z"
    # The clock set back: what has fired does not fire again.
    await due_from(app, START)
    assert await scheduler.fire_due(database, three) == 0
    assert len((await client.get("/v1/jobs")).json()["items"]) == 1


async def test_a_firing_says_what_came_of_its_job(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, overlap="queue")
    await create(client, name="other")
    told = {"status": "held", "collection": "items", "version": "v000007", "held_in_a_row": 2, "held_since": "then"}
    for publication in ({"status": "published", "version": "v000005"}, told, None):
        fired = (await client.post("/v1/schedules/daily/trigger")).json()
        async with app.state.database.write() as connection:
            row = await job_records.locked(connection, fired["job_id"])
            if publication is not None:
                await job_records.change(connection, row, publication=publication, state="succeeded")
    fired_so_far = await firings(client)
    assert [(one["outcome"], one["job_state"]) for one in fired_so_far] == [
        ("started", "queued"), ("started", "succeeded"), ("started", "succeeded"),
    ]  # fmt: skip
    assert [one["publication"] for one in fired_so_far] == [
        None,
        {"status": "held", "version": "v000007", "held_in_a_row": 2},
        {"status": "published", "version": "v000005", "held_in_a_row": None},
    ]
    # The last that ended, not the one that waits; a schedule without a job has none.
    shown = {one["name"]: one["last_publication"] for one in (await client.get("/v1/schedules")).json()["items"]}
    assert shown == {"daily": {"job_id": fired_so_far[1]["job_id"], **told}, "other": None}
    assert (await client.get("/v1/schedules/daily")).json()["last_publication"] == shown["daily"]
    # Retention takes jobs before firings.
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.delete())
    (newest, *_) = await firings(client)
    assert (newest["outcome"], newest["job_state"], newest["publication"]) == ("started", None, None)


async def test_paused_schedules_do_not_fire(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, paused=True)
    assert (await client.get("/v1/schedules/daily")).json()["next_fire_at"] is None
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(days=400)) == 0
    assert await firings(client) == []
    assert (await client.post("/v1/schedules/daily/trigger")).status_code == 202


@pytest.mark.parametrize("overlap", ["forbid", "queue", "replace"])
async def test_overlap(app: FastAPI, client: httpx.AsyncClient, dataset: str, overlap: str) -> None:
    await create(client, overlap=overlap)
    await due_from(app, START)
    for day in (0, 1):
        await scheduler.fire_due(app.state.database, START + datetime.timedelta(days=day, minutes=2))
    second, first = await firings(client)
    states = {job["id"]: job["state"] for job in (await client.get("/v1/jobs")).json()["items"]}
    assert first["outcome"] == "started"
    if overlap == "forbid":
        assert second["outcome"] == "skipped"
        assert first["job_id"] in second["reason"]
        assert states == {first["job_id"]: "queued"}
    else:
        assert second["outcome"] == "started"
        old = "queued" if overlap == "queue" else "cancelled"
        assert states == {first["job_id"]: old, second["job_id"]: "queued"}


async def test_a_change_that_leaves_the_times_leaves_what_is_due(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    await create(client, catchup="last")
    await due_from(app, START)
    same = await client.patch("/v1/schedules/daily", json={"paused": False, "cron": "0 3 * * *", "timezone": "UTC"})
    assert same.json()["next_fire_at"] == "2026-03-01T03:00:00Z"
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(minutes=2)) == 1


async def test_a_changed_job_is_stored_whole(client: httpx.AsyncClient, dataset: str) -> None:
    """Fields that the request leaves out keep their values under a version with another default."""
    await create(client)
    job = job_body(optimizer={"kind": "adam_ar"})
    changed = (await client.patch("/v1/schedules/daily", json={"job": job})).json()
    read = (await client.get("/v1/schedules/daily")).json()
    assert changed["job"]["optimizer"] == read["job"]["optimizer"]
    assert read["job"]["optimizer"]["decay"] == "by_epoch"
    assert read["job"]["epochs"] == job.get("epochs", 1)


@pytest.mark.parametrize("change", [{"cron": "0 4 * * *"}, {"paused": True}])
async def test_what_is_due_when_the_times_change_is_missed(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, change: dict[str, Any]
) -> None:
    await create(client, catchup="last")
    await due_from(app, tables.now() - datetime.timedelta(days=2))
    assert (await client.patch("/v1/schedules/daily", json=change)).status_code == 200
    assert await scheduler.fire_due(app.state.database, tables.now()) == 0
    found = await firings(client)
    assert len(found) in (2, 3)  # before three o'clock that of today is still to come
    assert {(one["outcome"], one["reason"]) for one in found} == {
        ("missed", "the schedule was changed before it was fired")
    }


async def test_a_schedule_from_before_that_catches_up_with_one_job_goes_on(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    await create(client)
    async with app.state.database.write() as connection:
        await connection.execute(tables.schedule.update().values(catchup="all"))
    await due_from(app, START)
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(minutes=2)) == 1
    assert (await client.patch("/v1/schedules/daily", json={"paused": True})).status_code == 200


async def test_a_job_that_ends_as_it_is_to_be_replaced_hinders_nothing(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, backend: str
) -> None:
    await create(client, overlap="replace")
    first = (await client.post("/v1/schedules/daily/trigger")).json()
    database = app.state.database
    async with database.write() as connection:
        row = await job_records.locked(connection, first["job_id"])
        triggering = asyncio.create_task(client.post("/v1/schedules/daily/trigger"))
        if backend == "postgresql":  # writers of SQLite wait for each other from the beginning
            await until(lambda: waits_for(database, connection))
        await job_records.change(connection, row, state="succeeded")
    assert (await triggering).json()["outcome"] == "started"


async def test_missed_firings_are_listed(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, catchup="last")
    await due_from(app, START)
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(days=2, hours=5)) == 1
    found = [(one["firing_date"], one["outcome"]) for one in await firings(client)]
    assert found == [("2026-03-03", "started"), ("2026-03-02", "missed"), ("2026-03-01", "missed")]


async def test_catching_up_all_gives_each_its_date(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, catchup="all", overlap="queue")
    await due_from(app, START)
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(days=2, hours=5)) == 3
    listed = (await client.get("/v1/jobs")).json()["items"]
    starts = sorted(job["spec"]["dataset"]["window"]["start"] for job in listed)
    assert starts == ["2026-03-01", "2026-03-02", "2026-03-03"]


async def test_a_dataset_that_went_fails_the_firing_and_not_the_scheduler(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    await create(client)
    await create(client, name="other", job={"name": "other"})
    await due_from(app, START)
    async with app.state.database.write() as connection:
        row = (await connection.execute(sa.select(tables.schedule.c.job))).first()
        job = {**row.job, "dataset": {"name": "gone", "window": None}}
        first = tables.schedule.update().where(tables.schedule.c.name == "daily")
        await connection.execute(first.values(job=job))
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(minutes=2)) == 1
    (failed,) = await firings(client)
    assert failed["outcome"] == "failed"
    assert "no dataset 'gone'" in failed["reason"]
    (fired,) = await firings(client, "other")
    assert fired["outcome"] == "started"


async def test_a_zone_that_this_machine_does_not_know_holds_up_no_other(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    """Known where the schedule was made, and not where the database lies now."""
    await create(client)
    await create(client, name="other", job={"name": "other"})
    await due_from(app, START)
    async with app.state.database.write() as connection:
        first = tables.schedule.update().where(tables.schedule.c.name == "daily")
        await connection.execute(first.values(timezone="Mars/Olympus", next_fire_at=START - datetime.timedelta(days=1)))
    assert await scheduler.look_again(app.state.database, START - datetime.timedelta(days=9)) == 1
    await due_from(app, START)
    with pytest.raises(ValueError, match="Mars/Olympus") as told:
        await scheduler.fire_due(app.state.database, START + datetime.timedelta(minutes=2))
    assert told.value.__notes__[0].startswith("while firing schedule 'daily' (schedule_")
    assert await firings(client) == []
    (fired,) = await firings(client, "other")
    assert fired["outcome"] == "started"
    listed = (await client.get("/v1/schedules")).json()["items"]
    assert [(one["name"], len(one["next_firings"])) for one in listed] == [("daily", 0), ("other", 5)]
    triggered = await client.post("/v1/schedules/daily/trigger")
    assert (triggered.status_code, triggered.json()["errors"][0]["field"]) == (422, "timezone")
    moved = await client.patch("/v1/schedules/daily", json={"cron": "0 4 * * *"})
    assert (moved.status_code, moved.json()["errors"][0]["field"]) == (422, "timezone")
    assert (await client.patch("/v1/schedules/daily", json={"paused": True})).json()["paused"]
    resumed = await client.patch("/v1/schedules/daily", json={"paused": False})
    assert (resumed.status_code, resumed.json()["errors"][0]["field"]) == (422, "timezone")
    mended = await client.patch("/v1/schedules/daily", json={"timezone": "Europe/Berlin", "paused": False})
    assert len(mended.json()["next_firings"]) == 5


async def test_firings_come_in_pages(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await create(client, catchup="last")
    await due_from(app, START)
    await scheduler.fire_due(app.state.database, START + datetime.timedelta(days=6, hours=1))
    dates: list[str] = []
    cursor = None
    while True:
        parameters = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await client.get("/v1/schedules/daily/firings", params=parameters)).json()
        dates += [one["firing_date"] for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert dates == [f"2026-03-0{day}" for day in (7, 6, 5, 4, 3, 2, 1)]


@pytest.mark.process
async def test_three_racing_schedulers_fire_nothing_twice(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, database_url: str, tmp_path: Path
) -> None:
    """Three processes live through the same twelve days, each at its own pace: every instant fires, each firing has
    one job and each job one firing."""
    names = [f"daily{number}" for number in range(4)]
    for name in names:
        await create(client, name=name, overlap="queue", catchup="all")
    await due_from(app, START)
    days = 12
    instants = [START + datetime.timedelta(days=day, minutes=2) for day in range(days)]
    barrier, log = forked.barrier(3), tmp_path / "racers.txt"
    racers = [forked.start(fire_in_process, database_url, barrier, instants, log=log) for _ in range(3)]
    await asyncio.to_thread(lambda: [racer.join(240) for racer in racers])
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    fired = [(name, one["fire_at"], one["job_id"]) for name in names for one in await firings(client, name)]
    assert len(fired) == days * len(names)
    assert len({(name, at) for name, at, _ in fired}) == len(fired)
    async with app.state.database.read() as connection:
        ids = set(await connection.scalars(sa.select(tables.job.c.id)))
    assert ids == {job_id for _, _, job_id in fired}


async def test_a_crash_between_firing_and_job_leaves_neither(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(client)
    await due_from(app, START)
    whole = job_records.create

    async def cut(*arguments: Any, **options: Any) -> Any:
        await whole(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(job_records, "create", cut)
    with pytest.raises(KeyboardInterrupt):
        await scheduler.fire_due(app.state.database, START + datetime.timedelta(minutes=2))
    monkeypatch.undo()
    assert await firings(client) == []
    assert (await client.get("/v1/jobs")).json()["items"] == []
    assert await scheduler.fire_due(app.state.database, START + datetime.timedelta(minutes=2)) == 1


async def test_a_schedule_keeps_the_defaults_that_its_dataset_decides(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], data_file: Path
) -> None:
    items = {"uri": str(data_file), "features": {"brand": {"column": "rating"}}}
    await client.post("/v1/datasets", json=dataset_body | {"name": "with-items", "items": items})
    job = {"name": "daily", "dataset": {"name": "with-items"}, "model": {"kind": "two_tower"}}
    made = await client.post("/v1/schedules", json={"name": "daily", "cron": "0 3 * * *", "job": job})
    assert made.status_code == 201, made.text
    for answer in (made, await client.patch("/v1/schedules/daily", json={"job": job})):
        model = answer.json()["job"]["model"]
        assert (model["loss"], model["normalize"], model["temperature"]) == ("sampled_softmax", True, 0.2)
    plain = await client.patch("/v1/schedules/daily", json={"job": job | {"model": job["model"] | {"loss": "bce"}}})
    assert "normalize" not in plain.json()["job"]["model"]


async def test_a_running_service_fires_and_runs(
    settings: Settings, runs: Any, dataset_body: dict[str, Any], data_file: Path
) -> None:
    async with running(dataclasses.replace(settings, role="all"), executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            await create(client)
            async with app.state.database.write() as connection:
                minute = tables.now().replace(second=0, microsecond=0)
                await connection.execute(tables.schedule.update().values(next_fire_at=minute, cron="* * * * *"))

            async def fired() -> Any:
                return await firings(client)

            oldest = (await until(fired))[-1]
            assert oldest["outcome"] == "started"
            await wait_for(client, oldest["job_id"], "succeeded")
