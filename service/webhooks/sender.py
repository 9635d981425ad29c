"""The background task that makes webhook deliveries. Any number of processes may run it on one database.

A delivery is claimed by a lease: its next attempt is postponed, in a transaction of its own. The delivery is then sent
outside any transaction, and its outcome is written if the lease is still the same. A process that dies in between
causes one repetition.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import orjson
import sqlalchemy as sa

from service.core import tables
from service.core.database import Database
from service.core.rows import DeliveryRow, all_rows
from service.core.settings import Settings
from service.core.ssrf_guard import Network, TargetError, resolve
from service.core.task_health import TaskHealth, repeat
from service.webhooks import webhook_records

log = logging.getLogger("evenkeel.webhooks")

BATCH_SIZE = 20
PER_WEBHOOK = 5
"""Most deliveries of one webhook in a batch; a batch takes as long as its slowest receiver."""
TIMEOUT_SECONDS = 10.0
LEASE = datetime.timedelta(seconds=60)
CLOCKS_APART = datetime.timedelta(minutes=5)
"""Largest difference between the clocks of processes on one database."""
WAITS_SECONDS = (10, 60, 300, 1800, 7200, 18000, 36000, 50400)
"""Waits after failed attempts; after the last wait, about 32 hours later, a delivery is given up."""
SHOWN_BYTES = 300
SWEEP_SECONDS = 3600.0
GONE = 410

OUTCOMES = ("delivered", "failed", "given_up")
Count = Callable[[str], None]


async def run(database: Database, settings: Settings, health: TaskHealth, count: Count = lambda outcome: None) -> None:
    """Make due deliveries every ``settings.webhook_seconds`` until cancelled.

    ``count`` is called after each attempt with its outcome, one of :data:`OUTCOMES`.
    """
    swept = -SWEEP_SECONDS

    async def deliver() -> None:
        nonlocal swept
        while await deliver_due(database, settings.target_networks, count):
            pass
        if time.monotonic() - swept > SWEEP_SECONDS:
            async with database.write() as connection:
                await webhook_records.forget_old(connection, tables.now())
            swept = time.monotonic()

    await repeat(deliver, settings.webhook_seconds, health)


async def deliver_due(database: Database, allowed: Sequence[Network], count: Count = lambda outcome: None) -> int:
    """Make one batch of due deliveries concurrently and return the number of attempts."""
    due = await _take(database)
    if due:
        limits = httpx.Timeout(TIMEOUT_SECONDS)
        async with httpx.AsyncClient(timeout=limits, follow_redirects=False, trust_env=False) as client:
            await asyncio.gather(*(_deliver(database, client, row, allowed, count) for row in due))
    return len(due)


class _Due(DeliveryRow):
    """A due delivery with the address and the secret of its webhook."""

    url: str
    secret: str


async def _take(database: Database) -> list[_Due]:
    now = tables.now()
    table, hook = tables.webhook_delivery, tables.webhook
    # A time further ahead than the wait after its attempt comes from a clock that was set back afterwards.
    waits = [datetime.timedelta(seconds=seconds) for seconds in (0, *WAITS_SECONDS)]
    latest = [now + max(LEASE, wait) + CLOCKS_APART for wait in waits]
    set_back = sa.or_(*(sa.and_(table.c.attempt == made, table.c.next_at > at) for made, at in enumerate(latest)))
    due = sa.and_(sa.or_(table.c.next_at <= now, set_back), hook.c.paused.is_(False))
    async with database.read() as connection:
        if await connection.scalar(sa.select(table.c.id).join(hook).where(due).limit(1)) is None:
            return []
    columns = (table, hook.c.url, hook.c.secret)
    query = sa.select(*columns).join(hook).where(due, table.c.id.in_(_fair_batch(due))).order_by(table.c.next_at)
    async with database.write() as connection:
        query = query.with_for_update(of=table, skip_locked=True)
        rows = await all_rows(connection, _Due, query)
        for row in rows:
            row["attempt"], row["next_at"] = row["attempt"] + 1, now + LEASE
            leased = table.update().where(table.c.id == row["id"])
            await connection.execute(leased.values(attempt=row["attempt"], next_at=row["next_at"]))
    return rows


def _fair_batch(due: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Return a query for the ids of a batch: each tenant's oldest delivery, then each tenant's next, and so on.

    A batch has at most PER_WEBHOOK deliveries of one webhook. One tenant's many failing deliveries thus do not delay
    those of others.
    """
    table, hook = tables.webhook_delivery.c, tables.webhook.c
    position = sa.func.row_number().over(partition_by=table.webhook_id, order_by=(table.next_at, table.id))
    numbered = (
        sa.select(table.id, table.next_at, hook.tenant, position.label("position")).join(tables.webhook).where(due)
    )
    delivery = numbered.subquery().c
    turn = sa.func.row_number().over(partition_by=delivery.tenant, order_by=(delivery.position, delivery.next_at))
    turns = (
        sa.select(delivery.id, delivery.next_at, turn.label("turn"))
        .where(delivery.position <= PER_WEBHOOK)
        .subquery()
        .c
    )
    return sa.select(turns.id).order_by(turns.turn, turns.next_at).limit(BATCH_SIZE)


async def _deliver(
    database: Database, client: httpx.AsyncClient, row: _Due, allowed: Sequence[Network], count: Count
) -> None:
    status, error = await _post(client, row, allowed)
    now = tables.now()
    table = tables.webhook_delivery
    values: dict[str, Any] = {"status": status, "error": error, "next_at": None}
    if error is None:
        outcome = "delivered"
        values["delivered_at"] = now
    elif row["attempt"] > len(WAITS_SECONDS) or status == GONE:
        outcome = "given_up"
    else:
        outcome = "failed"
        values["next_at"] = now + datetime.timedelta(seconds=WAITS_SECONDS[row["attempt"] - 1])
    if error is not None:
        log.warning("webhook %s, delivery %s: %s (%s)", row["webhook_id"], row["id"], error, outcome)
    count(outcome)
    async with database.write() as connection:
        if status == GONE:  # the webhook first, because a deletion locks it before its deliveries
            hook = tables.webhook
            reason = "its address answered 410 Gone"
            await connection.execute(
                hook.update().where(hook.c.id == row["webhook_id"]).values(paused=True, reason=reason)
            )
        # Found by its lease, because attempts count from 1 again if someone requests the delivery once more.
        same = sa.and_(table.c.id == row["id"], table.c.next_at == row["next_at"])
        await connection.execute(table.update().where(same).values(values))


async def _post(client: httpx.AsyncClient, row: _Due, allowed: Sequence[Network]) -> tuple[int | None, str | None]:
    """Send a delivery; return (response status, error); reads only the beginning of the response, for the error."""
    body = orjson.dumps(row["payload"])
    timestamp = int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": "Evenkeel",
        "webhook-id": row["id"],
        "webhook-timestamp": str(timestamp),
        "webhook-signature": webhook_records.signature(row["secret"], row["id"], timestamp, body),
    }
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            target = await resolve(row["url"], allowed)
            headers |= target.headers
            async with client.stream(
                "POST", target.url, content=body, headers=headers, extensions=target.extensions
            ) as answer:
                if answer.is_success:
                    return answer.status_code, None
                received = b""
                async for part in answer.aiter_raw():
                    received += part
                    if len(received) >= SHOWN_BYTES:
                        break
    except TargetError as error:
        return None, str(error)
    except TimeoutError:
        return None, f"no answer within {TIMEOUT_SECONDS:g} s"
    except (httpx.HTTPError, OSError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    shown = received[:SHOWN_BYTES].decode("utf-8", "replace")
    shown = "".join(character if character.isprintable() else " " for character in shown).strip()
    return answer.status_code, f"answered {answer.status_code}" + (f": {shown}" if shown else "")
