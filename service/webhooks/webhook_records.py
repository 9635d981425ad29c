"""Records of webhooks, their events, and pending deliveries, which :mod:`service.webhooks.sender` sends.

A delivery is written in the transaction of the event it reports, so no event is lost and none is reported that did not
happen, even if processes are killed. A delivery is sent at least once, always with the same id, so a receiver can
recognize a repetition. The delivery is signed as in `Standard Webhooks <https://www.standardwebhooks.com>`_, for which
receivers have libraries.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import sqlalchemy as sa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import json_schema, tables
from service.core.database import Database
from service.core.errors import Problem, not_found
from service.core.rows import DeliveryRow, WebhookRow, as_row, first_row
from service.core.ssrf_guard import TargetError, check_url

Event = Literal[
    "job.succeeded", "job.failed", "job.cancelled",
    "publication.published", "publication.held", "publication.held_repeatedly", "publication.released",
    "schedule.missed", "schedule.skipped", "schedule.failed",
    "ping",
]  # fmt: skip
EVENTS: tuple[str, ...] = get_args(Event)
SECRET_PREFIX = "whsec_"
MAX_WEBHOOKS = 50
"""Most webhooks of a tenant, since each event is written once per webhook."""
MAX_PINGS = 50
"""Most pings of a webhook that wait to be delivered."""
KEPT = datetime.timedelta(days=30)


def _checked(url: str) -> str:
    try:
        check_url(url)
    except TargetError as error:
        raise ValueError(str(error)) from None
    return url


Url = Annotated[str, Field(json_schema_extra={"pattern": "^https?://"}), AfterValidator(_checked)]
Events = Annotated[list[Event], Field(min_length=1, max_length=len(EVENTS))]


class WebhookSpec(BaseModel):
    """A webhook in a request that creates it."""

    model_config = ConfigDict(extra="forbid")

    url: Url = Field(examples=["https://ops.example.com/evenkeel"])
    events: Events = Field(default=["job.failed", "publication.held", "schedule.missed"])


class WebhookPatch(BaseModel):
    """The fields of a webhook to change."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=json_schema.without_defaults)

    url: Url = ""
    events: Events = []
    paused: bool = False


async def create(database: Database, connection: AsyncConnection, tenant: str, spec: WebhookSpec) -> WebhookRow:
    """Create a webhook and return its row, with the secret.

    Raises:
        Problem: 409 if the tenant has MAX_WEBHOOKS already.
    """
    table = tables.webhook
    await database.exclusive(connection, f"webhooks {tenant}")  # otherwise two requests could count the same
    count = await connection.scalar(sa.select(sa.func.count()).select_from(table).where(table.c.tenant == tenant))
    if (count or 0) >= MAX_WEBHOOKS:
        raise Problem(409, "too-many-webhooks", f"There are {count} webhooks already: delete one that nobody reads.")
    row: WebhookRow = {
        "id": tables.new_id("webhook"),
        "tenant": tenant,
        "url": spec.url,
        "events": list(dict.fromkeys(spec.events)),
        "secret": SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode(),
        "paused": False,
        "reason": None,
        "created_at": tables.now(),
    }
    await connection.execute(table.insert().values(row))
    return row


async def get(connection: AsyncConnection, tenant: str, webhook_id: str) -> WebhookRow:
    """Return the webhook's row, locked until the transaction ends.

    Raises:
        Problem: 404 if the tenant has no such webhook.
    """
    table = tables.webhook
    this_webhook = sa.and_(table.c.id == webhook_id, table.c.tenant == tenant)
    row = await first_row(connection, WebhookRow, sa.select(table).where(this_webhook).with_for_update())
    if row is None:
        raise not_found("webhook", webhook_id)
    return row


async def change(connection: AsyncConnection, tenant: str, webhook_id: str, patch: WebhookPatch) -> WebhookRow:
    """Apply the fields that were sent; a webhook resumed after a pause does not get the events in between."""
    row = await get(connection, tenant, webhook_id)
    values = patch.model_dump(exclude_unset=True)
    if "paused" in values:
        values["reason"] = None
    if values:
        await connection.execute(tables.webhook.update().where(tables.webhook.c.id == webhook_id).values(values))
    return as_row(WebhookRow, {**row, **values})


async def delete(connection: AsyncConnection, tenant: str, webhook_id: str) -> None:
    """Delete a webhook with its deliveries; pending deliveries are not sent any more."""
    await get(connection, tenant, webhook_id)
    await connection.execute(tables.webhook.delete().where(tables.webhook.c.id == webhook_id))


async def tell(connection: AsyncConnection, tenant: str, event: Event, data: Mapping[str, Any]) -> None:
    """Queue ``event`` for every webhook of the tenant that subscribes to it, in the caller's transaction."""
    table = tables.webhook
    query = sa.select(table.c.id, table.c.events).where(table.c.tenant == tenant, table.c.paused.is_(False))
    # Wait for webhooks that are being deleted: a delivery to one would fail the transaction.
    for webhook_id, events in (await connection.execute(query.with_for_update(read=True, key_share=True))).all():
        if event in events:
            await enqueue(connection, webhook_id, event, data)


async def enqueue(connection: AsyncConnection, webhook_id: str, event: Event, data: Mapping[str, Any]) -> DeliveryRow:
    """Queue one delivery, due at once."""
    now = tables.now()
    # Times are formatted as in the API's responses.
    payload = to_jsonable_python({"type": event, "timestamp": now, "data": data})
    row: DeliveryRow = {
        "id": tables.new_id("delivery"),
        "webhook_id": webhook_id,
        "event": event,
        "payload": payload,
        "created_at": now,
        "attempt": 0,
        "next_at": now,
        "delivered_at": None,
        "status": None,
        "error": None,
    }
    await connection.execute(tables.webhook_delivery.insert().values(row))
    return row


async def ping(connection: AsyncConnection, tenant: str, webhook_id: str) -> DeliveryRow:
    """Queue a ``ping``.

    Raises:
        Problem: 404 if the tenant has no such webhook, 429 if too many of its pings have not arrived yet.
    """
    row = await get(connection, tenant, webhook_id)
    table = tables.webhook_delivery
    waiting = (table.c.webhook_id == row["id"], table.c.event == "ping", table.c.next_at.is_not(None))
    count = await connection.scalar(sa.select(sa.func.count()).select_from(table).where(*waiting))
    if (count or 0) >= MAX_PINGS:
        detail = (
            f"{count} pings of this webhook have not arrived: its list of deliveries shows the "
            "errors. Correct its address first."
        )
        raise Problem(429, "too-many-pings", detail, headers={"Retry-After": "60"})
    return await enqueue(connection, row["id"], "ping", {"webhook": row["id"]})


async def redeliver(connection: AsyncConnection, tenant: str, webhook_id: str, delivery_id: str) -> DeliveryRow:
    """Queue a delivery once more under the same id, whatever its outcome was.

    Raises:
        Problem: 404 if there is no such delivery.
    """
    await get(connection, tenant, webhook_id)
    table = tables.webhook_delivery
    this = sa.and_(table.c.id == delivery_id, table.c.webhook_id == webhook_id)
    row = await first_row(connection, DeliveryRow, sa.select(table).where(this).with_for_update())
    if row is None:
        raise not_found("delivery", delivery_id)
    row["next_at"], row["attempt"] = tables.now(), 0
    await connection.execute(table.update().where(this).values(next_at=row["next_at"], attempt=row["attempt"]))
    return row


async def forget_old(connection: AsyncConnection, now: datetime.datetime) -> int:
    """Remove delivered and abandoned deliveries that are older than :data:`KEPT`; return their number."""
    table = tables.webhook_delivery
    old = sa.and_(table.c.created_at < now - KEPT, table.c.next_at.is_(None))
    return (await connection.execute(table.delete().where(old))).rowcount


def signature(secret: str, delivery_id: str, timestamp: int, body: bytes) -> str:
    """Return the header ``webhook-signature``: ``v1,`` and the base64 of HMAC-SHA256 over ``id.timestamp.body``."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
