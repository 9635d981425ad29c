"""Webhooks: told once the thing has happened, signed, again after a failure, never to where they must not go."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import hashlib
import hmac
import ipaddress
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.database import Database
from service.core.settings import Settings
from service.core.task_health import TaskHealth
from service.core.tenants import HEADER
from service.webhooks import sender as webhook_sender
from service.webhooks import webhook_records
from tests.service.service_kit import BOTH, client_of, job_body, running, until, wait_for, waits_for
from tests.service.small_run import SmallRuns

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


class Receiver:
    """A real HTTP server that keeps what it is sent and answers as it is told."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[int], tuple[int, bytes]] = lambda number: (204, b"")
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                receiver.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status, said = receiver.answer(len(receiver.received))
                self.send_response(status)
                if status in (302, 307):
                    self.send_header("location", f"{receiver.url}elsewhere")
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(said)

            do_GET = do_POST  # what a followed 302 becomes

            def log_message(self, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # of five, the kernel resets what comes at once

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.received]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return dataclasses.replace(settings, target_networks=LOOPBACK, webhook_seconds=0.05)


async def made(client: httpx.AsyncClient, url: str, *events: str) -> dict[str, Any]:
    answer = await client.post("/v1/webhooks", json={"url": url, **({"events": list(events)} if events else {})})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def deliveries(client: httpx.AsyncClient, webhook: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/webhooks/{webhook['id']}/deliveries")
    return list(answer.raise_for_status().json()["items"])


async def send(app: FastAPI) -> list[str]:
    """One look of the sender; the outcomes."""
    outcomes: list[str] = []
    await webhook_sender.deliver_due(app.state.database, LOOPBACK, outcomes.append)
    return outcomes


async def forward(app: FastAPI, **ago: float) -> None:
    """As if that much time had passed for what is owed."""
    table = tables.webhook_delivery
    async with app.state.database.write() as connection:
        for row in (await connection.execute(sa.select(table).where(table.c.next_at.is_not(None)))).mappings().all():
            at = row["next_at"] - datetime.timedelta(**ago)
            await connection.execute(table.update().where(table.c.id == row["id"]).values(next_at=at))


@BOTH
async def test_a_failed_job_is_told_of_signed(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], receiver: Receiver, backend: str
) -> None:
    """By a whole service: runner, sender, a run that fails."""
    async with running(dataclasses.replace(settings, role="all"), executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            hook = await made(client, receiver.url)
            assert hook["events"] == ["job.failed", "publication.held", "schedule.missed"]
            job = (await client.post("/v1/jobs", json=job_body("fail", labels={"team": "ads"}))).json()
            good = (await client.post("/v1/jobs", json=job_body())).json()
            await wait_for(client, job["id"], "failed")
            await wait_for(client, good["id"], "succeeded")

            async def delivered() -> Any:
                return [one for one in await deliveries(client, hook) if one["delivered_at"]]

            (kept,) = await until(delivered)
    ((headers, body),) = receiver.received
    document = json.loads(body)
    assert document["type"] == "job.failed"
    assert document["data"]["job"] == job["id"]
    assert document["data"]["error"]["message"]
    assert document["data"]["labels"]["team"] == "ads"
    assert headers["webhook-id"] == kept["id"]
    key = base64.b64decode(hook["secret"].removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


async def test_a_known_signature() -> None:
    """The example of the Standard Webhooks specification."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = webhook_records.signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_a_delivery_is_tried_again_and_then_given_up(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver
) -> None:
    receiver.answer = lambda number: (500, b"on fire\x00" + b"x" * 10_000)
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    for seconds in webhook_sender.WAITS_SECONDS:
        wait, began = datetime.timedelta(seconds=seconds), tables.now()
        assert await send(app) == ["failed"]
        (one,) = await deliveries(client, hook)
        assert began + wait <= datetime.datetime.fromisoformat(one["next_at"]) <= tables.now() + wait
        await forward(app, minutes=-4)  # the first wait is short, and the machine may be busy
        assert await send(app) == [], "not before its time"
        await forward(app, days=1)
    assert await send(app) == ["given_up"]
    (one,) = await deliveries(client, hook)
    assert one["next_at"] is None
    assert (one["status"], one["delivered_at"]) == (500, None)
    assert one["error"].startswith("answered 500: on fire")
    assert len(one["error"]) < 400
    ids = {headers["webhook-id"] for headers, _ in receiver.received}
    assert ids == {one["id"]}
    receiver.answer = lambda number: (200, b"")
    again = await client.post(f"/v1/webhooks/{hook['id']}/deliveries/{one['id']}/retry")
    assert again.status_code == 202
    assert await send(app) == ["delivered"]
    assert receiver.received[-1][0]["webhook-id"] == one["id"]


async def test_a_receiver_that_is_gone_is_not_called_again(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver
) -> None:
    receiver.answer = lambda number: (410, b"")
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    assert await send(app) == ["given_up"]
    shown = (await client.get(f"/v1/webhooks/{hook['id']}")).json()
    assert shown["paused"]
    assert "410" in shown["reason"]
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    assert await send(app) == []
    resumed = (await client.patch(f"/v1/webhooks/{hook['id']}", json={"paused": False})).json()
    assert (resumed["paused"], resumed["reason"]) == (False, None)
    receiver.answer = lambda number: (200, b"")
    assert await send(app) == ["delivered"]


@pytest.mark.parametrize("status", [302, 307])
async def test_no_redirect_is_followed(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, status: int
) -> None:
    receiver.answer = lambda number: (status if number == 1 else 204, b"")
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    assert await send(app) == ["failed"]
    assert len(receiver.received) == 1


async def test_a_proxy_of_the_environment_is_not_asked(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would call for us what was checked here, from where it stands."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    assert await send(app) == ["delivered"]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/", "http://localhost/", "http://[::1]/", "http://169.254.169.254/latest", "http://10.0.0.1/"],
)
async def test_an_inner_address_is_refused(settings: Settings, url: str) -> None:
    async with running(dataclasses.replace(settings, target_networks=())) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            answer = await client.post("/v1/webhooks", json={"url": url})
            assert answer.status_code == 422
            assert answer.json()["errors"][0]["field"] == "url"
            assert "EVENKEEL_TARGET_NETWORKS" in answer.text


async def test_an_address_that_turned_inner_is_not_called(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver
) -> None:
    """Allowed when it was registered, not any more when it is called."""
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    await webhook_sender.deliver_due(app.state.database, ())
    assert receiver.received == []
    (one,) = await deliveries(client, hook)
    assert "no public address" in one["error"]


@BOTH
async def test_many_senders_make_each_delivery_once(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, backend: str
) -> None:
    hook = await made(client, receiver.url)
    for _ in range(30):
        await client.post(f"/v1/webhooks/{hook['id']}/ping")

    async def sender() -> None:
        while await webhook_sender.deliver_due(app.state.database, LOOPBACK):
            pass

    await asyncio.gather(*(sender() for _ in range(4)))
    ids = [headers["webhook-id"] for headers, _ in receiver.received]
    assert len(ids) == 30
    assert len(set(ids)) == 30
    assert all(one["delivered_at"] for one in await deliveries(client, hook))


@BOTH
async def test_what_one_receiver_does_not_take_keeps_nobody_elses_waiting(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, backend: str
) -> None:
    """A batch takes as long as its slowest receiver: older deliveries of one tenant do not fill it."""
    for _ in range(5):
        full = await made(client, receiver.url)
        for _ in range(webhook_sender.PER_WEBHOOK + 1):
            await client.post(f"/v1/webhooks/{full['id']}/ping")
    client.headers[HEADER] = "ads"
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    taken = [row["webhook_id"] for row in await webhook_sender._take(app.state.database)]
    assert len(taken) == webhook_sender.BATCH_SIZE
    assert hook["id"] in taken
    assert max(map(taken.count, taken)) <= webhook_sender.PER_WEBHOOK


async def test_pings_that_do_not_arrive_end(
    client: httpx.AsyncClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_records, "MAX_PINGS", 2)
    hook = await made(client, receiver.url)
    answers = [await client.post(f"/v1/webhooks/{hook['id']}/ping") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert "Correct its address" in answers[2].json()["detail"]


async def test_a_sender_that_dies_costs_a_repetition_and_loses_nothing(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver
) -> None:
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    (taken,) = await webhook_sender._take(app.state.database)  # and here it is killed
    assert await send(app) == []
    await forward(app, seconds=61)
    assert await send(app) == ["delivered"]
    assert receiver.received[0][0]["webhook-id"] == taken["id"]


async def test_a_clock_that_was_ahead_holds_no_delivery_up(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five hours, when one delivery was made and another had failed once; then the clock is right again."""
    real_now, ahead = tables.now, datetime.timedelta(hours=5)
    hook = await made(client, receiver.url)
    receiver.answer = lambda number: (500, b"")
    monkeypatch.setattr(tables, "now", lambda: real_now() + ahead)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    assert await send(app) == ["failed"]
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    monkeypatch.setattr(tables, "now", real_now)
    receiver.answer = lambda number: (204, b"")
    assert await send(app) == ["delivered", "delivered"]


async def test_an_attempt_overtaken_by_hand_says_nothing_of_the_next(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are the first since someone asked: only the lease tells them apart."""
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    (slow,) = await webhook_sender._take(app.state.database)
    again = await client.post(f"/v1/webhooks/{hook['id']}/deliveries/{slow['id']}/retry")
    assert again.status_code == 202
    assert await send(app) == ["delivered"]

    async def times_out(*args: Any) -> tuple[None, str]:
        return None, "no answer"

    monkeypatch.setattr(webhook_sender, "_post", times_out)
    await webhook_sender._deliver(app.state.database, None, slow, LOOPBACK, lambda outcome: None)  # type: ignore[arg-type]
    (one,) = await deliveries(client, hook)
    assert (one["status"], one["error"], one["next_at"]) == (204, None, None)


async def test_a_job_that_is_not_stored_is_not_told_of(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, receiver: Receiver
) -> None:
    from service.jobs import job_records

    await made(client, receiver.url, "job.cancelled")
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    with contextlib.suppress(RuntimeError):
        async with app.state.database.write() as connection:
            await job_records.cancel(connection, job_id)
            raise RuntimeError("the process dies before the commit")
    assert await send(app) == []
    await client.post(f"/v1/jobs/{job_id}/cancel")
    assert await send(app) == ["delivered"]
    assert receiver.documents()[0]["data"]["state"] == "cancelled"


async def test_a_webhook_of_another_tenant_is_told_nothing(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver, dataset: str
) -> None:
    mine = await made(client, f"{receiver.url}mine", "job.cancelled")
    async with client_of(app, app.state.settings.admin_key_file.read_text().strip()) as other:
        other.headers[HEADER] = "ads"
        theirs = await made(other, f"{receiver.url}theirs", "job.cancelled")
        job = (await client.post("/v1/jobs", json=job_body())).json()["id"]
        await client.post(f"/v1/jobs/{job}/cancel")
        assert await send(app) == ["delivered"]
        (told,) = await deliveries(client, mine)
        assert told["event"] == "job.cancelled"
        assert await deliveries(other, theirs) == []
        for hook in (mine, theirs):  # by one's own webhook neither
            again = await other.post(f"/v1/webhooks/{hook['id']}/deliveries/{told['id']}/retry")
            assert again.status_code == 404


async def test_a_held_version_and_a_missed_firing_are_told_of(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, receiver: Receiver
) -> None:
    from service.jobs import job_records
    from service.schedules import scheduler

    await made(client, receiver.url)
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    held = {"status": "held", "collection": "items", "version": "v000002", "reasons": ["cosine_mean"], "gate": []}
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job_id)
        await job_records.move(connection, row, "claimed")
        await job_records.change(connection, row, publication=held)
        await job_records.move(connection, row, "succeeded")
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body(), "misfire_grace_seconds": 60}
    await client.post("/v1/schedules", json=body)
    async with app.state.database.write() as connection:
        due = tables.now() - datetime.timedelta(days=40, hours=2)
        await connection.execute(tables.schedule.update().values(next_fire_at=due))
    await scheduler.fire_due(app.state.database, tables.now())
    while await send(app):
        pass
    told = {one["type"]: one["data"] for one in receiver.documents()}
    assert len(receiver.documents()) == len(told) == 2
    assert told["publication.held"]["publication"] == held
    missed = told["schedule.missed"]
    assert (missed["schedule"], missed["outcome"]) == ("daily", "missed")
    # One page for an outage of forty days.
    firings = (await client.get("/v1/schedules/daily/firings", params={"limit": 100})).json()["items"]
    assert missed["num_missed"] == len(firings) >= 39
    assert (missed["fire_at"], missed["first_fire_at"]) == (firings[0]["fire_at"], firings[-1]["fire_at"])


@pytest.mark.parametrize(
    ("publication", "events"),
    [
        ({"status": "held", "held_in_a_row": 2, "max_held": 3}, ["publication.held"]),
        ({"status": "held", "held_in_a_row": 3, "max_held": 3}, ["publication.held", "publication.held_repeatedly"]),
        ({"status": "held", "held_in_a_row": 4, "max_held": 3}, ["publication.held", "publication.held_repeatedly"]),
        ({"status": "published"}, ["publication.published"]),
        ({"status": "published", "released": {"in_a_row": 3}}, ["publication.published", "publication.released"]),
    ],
)
async def test_what_is_held_too_often_or_ends_a_row_of_held_ones_is_told_of_by_itself(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, receiver: Receiver, publication: Any, events: list[str]
) -> None:
    from service.jobs import job_records

    kinds = ["held", "held_repeatedly", "published", "released"]
    await made(client, receiver.url, *(f"publication.{kind}" for kind in kinds))
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job_id)
        await job_records.move(connection, row, "claimed")
        await job_records.change(connection, row, publication=publication)
        await job_records.move(connection, row, "succeeded")
    while await send(app):
        pass
    assert sorted(one["type"] for one in receiver.documents()) == events
    assert all(one["data"]["publication"] == publication for one in receiver.documents())


@pytest.mark.parametrize("migrated", [False])
async def test_a_look_that_fails_is_counted(settings: Settings) -> None:
    """A database that was never made: every look fails, and the alert BackgroundFails goes by the count."""
    settings.home.mkdir()
    database, failed = Database(settings.database_url), asyncio.Event()
    health = TaskHealth("webhooks", on_error=failed.set)
    looking = asyncio.create_task(webhook_sender.run(database, settings, health))
    try:
        await asyncio.wait_for(failed.wait(), 60)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await database.stop()


async def test_old_deliveries_are_forgotten(app: FastAPI, client: httpx.AsyncClient, receiver: Receiver) -> None:
    hook = await made(client, receiver.url)
    for _ in range(2):
        await client.post(f"/v1/webhooks/{hook['id']}/ping")
        await send(app)
    receiver.answer = lambda number: (500, b"")
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    await send(app)
    async with app.state.database.write() as connection:
        assert await webhook_records.forget_old(connection, tables.now()) == 0
        later = tables.now() + webhook_records.KEPT + datetime.timedelta(minutes=1)
        assert await webhook_records.forget_old(connection, later) == 2  # the third is still owed
    assert len(await deliveries(client, hook)) == 1


async def test_webhooks_are_an_admins(client: httpx.AsyncClient, app: FastAPI, key_with: Any) -> None:
    async with client_of(app, await key_with("jobs:write", "features:write")) as other:
        assert (await other.get("/v1/webhooks")).status_code == 403


async def test_the_secret_is_shown_once(client: httpx.AsyncClient, receiver: Receiver) -> None:
    hook = await made(client, receiver.url)
    assert hook["secret"].startswith("whsec_")
    assert "secret" not in (await client.get(f"/v1/webhooks/{hook['id']}")).json()
    assert "secret" not in (await client.get("/v1/webhooks")).json()["items"][0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": "ftp://example.com"}, "url"),
        ({"url": "https://user:pass@example.com"}, "url"),
        ({"url": "https://example.com", "events": []}, "events"),
        ({"url": "https://example.com", "events": ["job.exploded"]}, "events.0"),
        ({"url": "https://example.com", "colour": 1}, "colour"),
    ],
)
async def test_a_bad_webhook_is_refused(reading: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    answer = await reading.post("/v1/webhooks", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field


@BOTH
async def test_no_more_than_the_limit_are_made_at_once(
    client: httpx.AsyncClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_records, "MAX_WEBHOOKS", 3)
    answers = await asyncio.gather(*(client.post("/v1/webhooks", json={"url": receiver.url}) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [409] * 5
    assert len((await client.get("/v1/webhooks")).json()["items"]) == 3


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
async def test_a_webhook_is_deleted_while_its_address_says_that_it_is_gone(
    app: FastAPI, client: httpx.AsyncClient, receiver: Receiver
) -> None:
    """Both take the webhook before its deliveries: in another order each would wait for the other."""
    hook = await made(client, receiver.url)
    await client.post(f"/v1/webhooks/{hook['id']}/ping")
    receiver.answer = lambda number: (410, b"")
    database = app.state.database
    async with database.write() as connection:
        await webhook_records.get(connection, "default", hook["id"])
        sending = asyncio.create_task(send(app))

        await until(lambda: waits_for(database, connection))
        await webhook_records.delete(connection, "default", hook["id"])
    assert await sending == ["given_up"]
    assert (await client.get("/v1/webhooks")).json()["items"] == []
