"""CLI command group for sinks: databases that hold the version that a collection serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag, ask
from service.client import Client

sinks = typer.Typer(
    help="Sinks: databases of the operator's that hold the version that a collection serves.", no_args_is_help=True
)
Names = Annotated[list[str] | None, typer.Option(metavar="NAME", help="A sink of EVENKEEL_SINKS; may be repeated.")]


@sinks.command("list")
def list_sinks(as_json: JsonFlag = False) -> None:
    """List the sinks of all collections, with the version that each has and the seconds by which it is behind."""
    listed = [{"collection": one["name"], **sink} for one in ask(Client.collections) for sink in one["sinks"]]
    columns = output.headings("collection", "name", "version", "rows", "lag_seconds", "loaded_at", "error")
    columns["name"] = "SINK"
    output.print_list(listed, columns, "no sinks: a job with `publish.sinks` has some", as_json)


@sinks.command("sync")
def sync(
    collection: Annotated[str, typer.Argument(metavar="COLLECTION")],
    add: Names = None,
    remove: Names = None,
    tenant: Annotated[str, typer.Option(help="The tenant that owns the collection.")] = "default",
    store: Annotated[
        str | None, typer.Option(help="The store (default: EVENKEEL_STORE_URL, else EVENKEEL_HOME/store).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring a collection's sinks up to date now, without a service; a sink that is removed loses its table."""
    from embeddings.sinks.configured import SINKS_VARIABLE, read_sinks
    from embeddings.sinks.follow import KIND, attach, sinks_of, sync_when_free
    from embeddings.store import StoreError, open_store
    from service.core.tenants import url_of

    home = os.environ.get("EVENKEEL_HOME", ".evenkeel")
    url = store or os.environ.get("EVENKEEL_STORE_URL") or str(Path(home, "store"))
    try:
        configured = {
            name: sink for name, sink in read_sinks(os.environ.get(SINKS_VARIABLE)).items() if sink.tenant == tenant
        }
        target = open_store(url_of(url, tenant)).collection(collection)
        following = {sink["name"] for sink in sinks_of(target)}
        wanted = (following | set(add or ())) - set(remove or ())
        names = sorted(target.settings(KIND).keys() | wanted)
        unknown = [name for name in names if name not in configured]
        if unknown:
            raise CommandError(
                f"{', '.join(unknown)}: no such sink of tenant {tenant}",
                f"add it to the file that {SINKS_VARIABLE} names",
            )
        if not target.exists():
            raise CommandError(f"there is no collection '{collection}' in {url}", "see `evenkeel collections`")
        if wanted != following:
            attach(target, wanted)
    except (ValueError, StoreError, OSError) as error:
        raise CommandError(str(error), "see `evenkeel sinks sync --help`") from None
    failed = []
    for name in names:
        try:
            sync_when_free(target, name, configured[name].open())
        except Exception as error:  # a client's errors are of any class
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise CommandError("; ".join(failed), "sinks that are not named here are up to date")
    columns = output.headings("name", "version", "rows", "lag_seconds", "loaded_at")
    output.print_list(sinks_of(target), columns, f"no sink follows {collection}: --add NAME", as_json)
