"""CLI command groups: datasets, schedules, keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag
from service.client import Client

datasets = typer.Typer(help="Datasets: register, propose a manifest, list, profile, delete.", no_args_is_help=True)
schedules = typer.Typer(help="Schedules: jobs that the clock starts.", no_args_is_help=True)
keys = typer.Typer(help="API keys.", no_args_is_help=True)

if TYPE_CHECKING:
    from trainer.spec import DatasetSpec

Name = Annotated[str, typer.Argument(metavar="NAME")]


def register(app: typer.Typer) -> None:
    app.add_typer(datasets, name="datasets")
    app.add_typer(schedules, name="schedules")
    app.add_typer(keys, name="keys")


# --- datasets --------------------------------------------------------------------------------------------------------


@datasets.command("add")
def add_dataset(file: Annotated[Path, typer.Argument(metavar="FILE.yaml")], as_json: JsonFlag = False) -> None:
    """Register the dataset in a YAML file."""
    from trainer.spec import load_documents

    dataset, _ = load_documents(file)
    if dataset is None:
        raise CommandError(
            f"{file}: holds a job and no dataset", "`evenkeel datasets infer DATA.parquet` proposes a manifest"
        )
    with Client() as client:
        answer = client.add_dataset(_located(dataset) if client.is_local else dataset)
    output.print_answer(answer, f"dataset {dataset.name} registered", as_json)


def _located(dataset: DatasetSpec) -> DatasetSpec:
    """Make relative paths of existing files absolute: the service on this machine may run in another directory."""

    def locate(uri: str) -> str:
        return str(Path(uri).absolute()) if "://" not in uri and Path(uri).exists() else uri

    features = {
        name: feature.model_copy(update={"join": feature.join.model_copy(update={"uri": locate(feature.join.uri)})})
        if feature.join is not None and Path(feature.join.uri).parent != Path(".")
        else feature
        for name, feature in dataset.features.items()
    }
    graphs = {
        name: graph.model_copy(update={"uri": locate(graph.uri)}) if Path(graph.uri).parent != Path(".") else graph
        for name, graph in dataset.graphs.items()
    }
    return dataset.model_copy(update={"uri": locate(dataset.uri), "features": features, "graphs": graphs})


@datasets.command("infer")
def infer_dataset(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet or CSV, or a directory of them.")],
    name: Annotated[str | None, typer.Option(help="The dataset's name; left out: from the file's.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Propose a manifest for a file, as YAML to review and save. Contacts no service."""
    from trainer.data.sources.infer import as_yaml, infer

    document = infer(file, name=name)
    if as_json:
        output.print_json(document)
    else:
        typer.echo(as_yaml(document), nl=False)


@datasets.command("list")
def list_datasets(as_json: JsonFlag = False) -> None:
    """List registered datasets."""
    with Client() as client:
        found = client.datasets()
    columns = output.headings("name", "uri", "features")
    empty = "no datasets yet: register one with `evenkeel datasets add FILE.yaml`"
    output.print_list(found, columns, empty, as_json, lambda one: {**one, "features": list(one.get("features") or ())})


@datasets.command("profile")
def profile(name: Name, as_json: JsonFlag = False) -> None:
    """Show a dataset's statistics: rows, distinct ids, label rate."""
    with Client() as client:
        output.print_document(client.profile(name), as_json)


@datasets.command("delete")
def delete_dataset(name: Name) -> None:
    """Remove a dataset from the registry; its files and the jobs that used it stay."""
    with Client() as client:
        client.delete_dataset(name)
    typer.echo(f"dataset {name} deleted")


# --- schedules -------------------------------------------------------------------------------------------------------


@schedules.command("add")
def add_schedule(
    name: Name,
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.yaml", help="The job; `{firing_date}` in its window is filled in.")
    ],
    cron: Annotated[str, typer.Option(help="Five fields, such as '0 3 * * *'.")],
    timezone: Annotated[str, typer.Option(help="An IANA time zone.")] = "UTC",
    catchup: Annotated[str, typer.Option(help="Firings missed while down: none, last or all.")] = "none",
    overlap: Annotated[str, typer.Option(help="The last one still runs: forbid (skips), queue or replace.")] = "forbid",
    misfire_grace_seconds: Annotated[int, typer.Option(min=0, help="How late a firing may start.")] = 3600,
    paused: Annotated[bool, typer.Option("--paused", help="Created, but not yet firing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a schedule from a job's spec."""
    from trainer.spec import load_documents

    _, job = load_documents(spec)
    if job is None:
        raise CommandError(f"{spec}: holds a dataset and no job", "give a file that holds a job")
    schedule = {
        "name": name, "cron": cron, "timezone": timezone, "job": job.model_dump(mode="json", exclude_unset=True),
        "catchup": catchup, "overlap": overlap, "misfire_grace_seconds": misfire_grace_seconds, "paused": paused,
    }  # fmt: skip
    with Client() as client:
        answer = client.add_schedule(schedule)
    text = f"schedule {name}: next firing {answer.get('next_fire_at') or 'none while paused'}"
    output.print_answer(answer, text, as_json)


@schedules.command("list")
def list_schedules(as_json: JsonFlag = False) -> None:
    """List schedules with their next firing."""
    with Client() as client:
        found = client.schedules()
    columns = output.headings("name", "cron", "timezone", "paused", "overlap", "catchup", next_fire_at="NEXT FIRING")
    empty = "no schedules yet: `evenkeel schedules add NAME SPEC.yaml --cron '0 3 * * *'`"
    output.print_list(found, columns, empty, as_json)


@schedules.command("show")
def show_schedule(name: Name, as_json: JsonFlag = False) -> None:
    """Show a schedule, its job and its next five firings."""
    with Client() as client:
        output.print_document(client.schedule(name), as_json)


@schedules.command("trigger")
def trigger(
    name: Name,
    date: Annotated[str | None, typer.Option(help="The firing's date, YYYY-MM-DD; left out: today's.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fire a schedule now."""
    with Client() as client:
        answer = client.trigger(name, **({} if date is None else {"firing_date": date}))
    output.print_fields(answer, as_json)


@schedules.command("pause")
def pause(name: Name) -> None:
    """Stop a schedule from firing."""
    with Client() as client:
        client.change_schedule(name, paused=True)
    typer.echo(f"schedule {name} paused")


@schedules.command("resume")
def resume(name: Name) -> None:
    """Let a paused schedule fire again."""
    with Client() as client:
        answer = client.change_schedule(name, paused=False)
    typer.echo(f"schedule {name} resumed: next firing {answer.get('next_fire_at')}")


@schedules.command("delete")
def delete_schedule(name: Name) -> None:
    """Delete a schedule; its jobs stay."""
    with Client() as client:
        client.delete_schedule(name)
    typer.echo(f"schedule {name} deleted")


@schedules.command("firings")
def firings(name: Name, limit: Annotated[int, typer.Option(min=1)] = 20, as_json: JsonFlag = False) -> None:
    """List a schedule's firings, newest first."""
    with Client() as client:
        found = client.firings(name, limit)
    columns = {field: field.upper() for row in found or [{"fire_at": ""}] for field in row}
    output.print_list(found, columns, f"schedule {name} has not fired yet", as_json)


# --- keys ------------------------------------------------------------------------------------------------------------


@keys.command("create")
def create_key(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="jobs:read, jobs:write, features:read, features:write or admin; repeat it."),
    ],
    tenant: Annotated[str | None, typer.Option(help="Another tenant than one's own, for operators.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and show it, only this once."""
    with Client() as client:
        answer = client.create_key(name, scope, tenant)
    remark = f"key {answer['id']} with {', '.join(scope)}: kept nowhere in clear, so keep it now"
    output.print_with_note(answer, "key", remark, as_json)


@keys.command("list")
def list_keys(as_json: JsonFlag = False) -> None:
    """List keys, without their secrets."""
    with Client() as client:
        found = client.keys()
    columns = output.headings("id", "name", "prefix", "scopes", "created_at", "expires_at", "revoked_at")
    output.print_list(found, columns, "no keys", as_json)


@keys.command("rotate")
def rotate_key(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    overlap_seconds: Annotated[float, typer.Option(help="How long the secret before goes on.")] = 24 * 3600,
    as_json: JsonFlag = False,
) -> None:
    """Give a key a new secret and show it, only this once; the previous one stays valid for a day."""
    with Client() as client:
        answer = client.rotate_key(key_id, overlap_seconds)
    until = answer["old_until"] or "now"
    remark = f"key {key_id}: the secret before ends {until}; kept nowhere in clear, so keep this one now"
    output.print_with_note(answer, "key", remark, as_json)


@keys.command("tenants")
def list_tenants(as_json: JsonFlag = False) -> None:
    """List tenants and the number of their usable keys."""
    with Client() as client:
        found = client.tenants()
    output.print_list(found, {"name": "TENANT", "num_keys": "KEYS"}, "no tenants", as_json)


@keys.command("audit")
def list_audit(
    key: Annotated[str | None, typer.Option(help="Id of a key.")] = None,
    since: Annotated[str | None, typer.Option(help="A time with zone, such as 2026-11-20T06:00:00Z.")] = None,
    limit: Annotated[int, typer.Option(min=1)] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Show who did what to which object, newest first."""
    with Client() as client:
        found = client.audit(limit, key=key, since=since)
    columns = {
        "at": "WHEN", "tenant": "TENANT", "key_name": "KEY", "action": "DID", "object": "TO", "status": "STATUS",
        "address": "FROM",
    }  # fmt: skip
    output.print_list(found, columns, "no entries", as_json)


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a key immediately."""
    with Client() as client:
        client.revoke_key(key_id)
    typer.echo(f"key {key_id} revoked")


@keys.command("reset-admin")
def reset_admin() -> None:
    """Replace a lost admin key, on the service's own machine: writes $EVENKEEL_HOME/admin.key."""
    from service.cli.serve import reset_admin as reset

    typer.echo(f"new admin key written to {reset()}; the old one no longer works")
