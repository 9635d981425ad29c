"""Routes for webhooks (notified when a job fails, a version is held or a firing is missed) and their deliveries."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, BaseModel, Field

from service.core import errors, pagination, tables
from service.core.pagination import Page, Paging
from service.core.rows import DeliveryRow, WebhookRow
from service.core.ssrf_guard import TargetError, resolve
from service.identity.auth import Admin
from service.webhooks import webhook_records
from service.webhooks.webhook_records import WebhookPatch, WebhookSpec
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


class WebhookView(BaseModel):
    """A webhook. ``reason``: why the service paused it, if it did."""

    id: str
    url: str
    events: list[str]
    paused: bool
    reason: str | None
    created_at: AwareDatetime


class NewWebhook(WebhookView):
    secret: str = Field(
        description="The secret that signs deliveries (HMAC-SHA256, Standard Webhooks). It is shown only this once."
    )


class DeliveryView(BaseModel):
    """A delivery of one event.

    ``next_at``: the time of the next attempt; null if the event was delivered or given up. ``status``: status of the
    last response.
    """

    id: str
    event: str
    payload: dict[str, Any]
    created_at: AwareDatetime
    attempt: int
    next_at: AwareDatetime | None
    delivered_at: AwareDatetime | None
    status: int | None
    error: str | None


async def _refuse_private(request: Request, url: str) -> None:
    try:
        await resolve(url, request.app.state.settings.target_networks)
    except TargetError as error:
        raise errors.invalid(FieldProblem("url", str(error))) from None


@router.post("", status_code=201, responses=errors.responses(409))
async def create(request: Request, response: Response, body: WebhookSpec, admin: Admin) -> NewWebhook:
    """Register an address. The address must be public unless the operator has allowed its network."""
    await _refuse_private(request, body.url)
    database = request.app.state.database
    async with database.write() as connection:
        row = await webhook_records.create(database, connection, admin.tenant, body)
    response.headers["Location"] = f"/v1/webhooks/{row['id']}"
    return NewWebhook.model_validate(row)


@router.get("")
async def list_webhooks(request: Request, admin: Admin, paging: Paging) -> Page[WebhookView]:
    table = tables.webhook
    query = sa.select(table).where(table.c.tenant == admin.tenant)
    async with request.app.state.database.read() as connection:
        return await pagination.page(connection, WebhookRow, query, table.c.id, paging, WebhookView.model_validate)


@router.get("/{webhook_id}", responses=errors.responses(404))
async def get(request: Request, webhook_id: str, admin: Admin) -> WebhookView:
    async with request.app.state.database.read() as connection:
        return WebhookView.model_validate(await webhook_records.get(connection, admin.tenant, webhook_id))


@router.patch("/{webhook_id}", responses=errors.responses(404))
async def change(request: Request, webhook_id: str, body: WebhookPatch, admin: Admin) -> WebhookView:
    """Change the address or the events, pause, or resume; events that occurred during a pause are not sent."""
    if body.url:
        await _refuse_private(request, body.url)
    async with request.app.state.database.write() as connection:
        return WebhookView.model_validate(await webhook_records.change(connection, admin.tenant, webhook_id, body))


@router.delete("/{webhook_id}", status_code=204, responses=errors.responses(404))
async def delete(request: Request, webhook_id: str, admin: Admin) -> None:
    """Delete a webhook and its deliveries."""
    async with request.app.state.database.write() as connection:
        await webhook_records.delete(connection, admin.tenant, webhook_id)


@router.post("/{webhook_id}/ping", status_code=202, responses=errors.responses(404))
async def ping(request: Request, webhook_id: str, admin: Admin) -> DeliveryView:
    """Send a `ping` event, to test the address and the receiver's signature check."""
    async with request.app.state.database.write() as connection:
        return DeliveryView.model_validate(await webhook_records.ping(connection, admin.tenant, webhook_id))


@router.get("/{webhook_id}/deliveries", responses=errors.responses(404))
async def deliveries(request: Request, webhook_id: str, admin: Admin, paging: Paging) -> Page[DeliveryView]:
    """List deliveries, newest first; they are kept for thirty days."""
    table = tables.webhook_delivery
    async with request.app.state.database.read() as connection:
        await webhook_records.get(connection, admin.tenant, webhook_id)
        query = sa.select(table).where(table.c.webhook_id == webhook_id)
        return await pagination.page(connection, DeliveryRow, query, table.c.id, paging, DeliveryView.model_validate)


@router.post("/{webhook_id}/deliveries/{delivery_id}/retry", status_code=202, responses=errors.responses(404))
async def redeliver(request: Request, webhook_id: str, delivery_id: str, admin: Admin) -> DeliveryView:
    """Send a delivery again under the same id."""
    async with request.app.state.database.write() as connection:
        return DeliveryView.model_validate(
            await webhook_records.redeliver(connection, admin.tenant, webhook_id, delivery_id)
        )
