"""CLI command group for webhooks."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli import output
from service.cli.output import JsonFlag, ask
from service.client import Client

webhooks = typer.Typer(
    help="Webhooks: addresses that are notified of failures, held versions and missed firings.", no_args_is_help=True
)

Id = Annotated[str, typer.Argument(metavar="ID")]
Events = Annotated[
    list[str] | None,
    typer.Option(
        "--event", help="An event such as job.failed; repeat the option for more (default: failed, held, missed)."
    ),
]


@webhooks.command("create")
def create(url: Annotated[str, typer.Argument(metavar="URL")], event: Events = None, as_json: JsonFlag = False) -> None:
    """Register an address and show the secret that signs its deliveries; the secret cannot be shown again."""
    answer = ask(Client.add_webhook, url, event)
    remark = f"webhook {answer['id']} for {', '.join(answer['events'])}: save the secret now"
    output.print_with_note(answer, "secret", remark, as_json)


@webhooks.command("list")
def list_webhooks(as_json: JsonFlag = False) -> None:
    """List webhooks."""
    columns = output.headings("id", "url", "events", "paused", "reason")
    output.print_list(ask(Client.webhooks), columns, "no webhooks", as_json)


@webhooks.command("pause")
def pause(webhook_id: Id) -> None:
    """Stop deliveries to a webhook until it is resumed."""
    ask(Client.change_webhook, webhook_id, paused=True)
    typer.echo(f"webhook {webhook_id} paused")


@webhooks.command("resume")
def resume(webhook_id: Id) -> None:
    """Resume a paused webhook."""
    ask(Client.change_webhook, webhook_id, paused=False)
    typer.echo(f"webhook {webhook_id} resumed")


@webhooks.command("delete")
def delete(webhook_id: Id) -> None:
    """Delete a webhook and its deliveries."""
    ask(Client.delete_webhook, webhook_id)
    typer.echo(f"webhook {webhook_id} deleted")


@webhooks.command("ping")
def ping(webhook_id: Id) -> None:
    """Send a test event; `evenkeel webhooks deliveries ID` shows the result."""
    answer = ask(Client.ping_webhook, webhook_id)
    typer.echo(f"delivery {answer['id']} is due")


@webhooks.command("deliveries")
def deliveries(webhook_id: Id, limit: Annotated[int, typer.Option(min=1)] = 20, as_json: JsonFlag = False) -> None:
    """List deliveries, newest first."""
    columns = output.headings("id", "event", "attempt", "status", "delivered_at", "next_at", "error")
    output.print_list(ask(Client.deliveries, webhook_id, limit), columns, "nothing was sent yet", as_json)


@webhooks.command("retry")
def retry(webhook_id: Id, delivery_id: Annotated[str, typer.Argument(metavar="DELIVERY")]) -> None:
    """Send a delivery again, under the same id."""
    ask(Client.redeliver, webhook_id, delivery_id)
    typer.echo(f"delivery {delivery_id} is due")
