"""CLI command group for API keys, tenants and the audit log."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli import output
from service.cli.output import JsonFlag, ask
from service.client import Client

keys = typer.Typer(help="API keys.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Id = Annotated[str, typer.Argument(metavar="ID")]


@keys.command("create")
def create_key(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="jobs:read, jobs:write, features:read, features:write or admin; repeat it."),
    ],
    tenant: Annotated[
        str | None, typer.Option(help="The key's tenant (default: your own); only operators may name another one.")
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(help="The time when the key expires, with time zone, such as 2027-01-31T18:00:00Z.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and show it; it cannot be shown again."""
    answer = ask(Client.create_key, name, scope, tenant, expires_at)
    remark = f"key {answer['id']} with {', '.join(scope)}: save it now, the service stores only its hash"
    output.print_with_note(answer, "key", remark, as_json)


@keys.command("list")
def list_keys(as_json: JsonFlag = False) -> None:
    """List keys, without their secrets."""
    columns = output.headings("id", "name", "prefix", "scopes", "created_at", "expires_at", "revoked_at")
    output.print_list(ask(Client.keys), columns, "no keys", as_json)


@keys.command("rotate")
def rotate_key(
    key_id: Id,
    overlap_seconds: Annotated[float, typer.Option(help="Seconds that the previous secret stays valid.")] = 24 * 3600,
    as_json: JsonFlag = False,
) -> None:
    """Give a key a new secret and show it, only this once; by default the previous secret stays valid for a day."""
    answer = ask(Client.rotate_key, key_id, overlap_seconds)
    until = answer["old_until"] or "now"
    remark = f"key {key_id}: the previous secret ends {until}; save the new one now, the service stores only its hash"
    output.print_with_note(answer, "key", remark, as_json)


@keys.command("tenants")
def list_tenants(as_json: JsonFlag = False) -> None:
    """List tenants and the number of their usable keys."""
    output.print_list(ask(Client.tenants), {"name": "TENANT", "num_keys": "KEYS"}, "no tenants", as_json)


@keys.command("audit")
def list_audit(
    key: Annotated[str | None, typer.Option(help="Only entries of the key with this id.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only entries since this time, with time zone, such as 2026-11-20T06:00:00Z.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1)] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Show who did what to which object, newest first."""
    columns = {
        "at": "WHEN", "tenant": "TENANT", "key_name": "KEY", "action": "DID", "object": "TO", "status": "STATUS",
        "address": "FROM",
    }  # fmt: skip
    output.print_list(ask(Client.audit, limit, key=key, since=since), columns, "no entries", as_json)


@keys.command("revoke")
def revoke_key(key_id: Id) -> None:
    """Revoke a key; other processes refuse it within seconds."""
    ask(Client.revoke_key, key_id)
    typer.echo(f"key {key_id} revoked")


@keys.command("reset-admin")
def reset_admin() -> None:
    """Replace a lost admin key and write the new key to $EVENKEEL_HOME/admin.key. Run it on the service's machine."""
    from service.cli.serve import reset_admin as reset

    typer.echo(f"new admin key written to {reset()}; the old one no longer works")
