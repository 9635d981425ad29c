"""CLI command group for schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag
from service.client import Client

schedules = typer.Typer(help="Schedules: jobs that the clock starts.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME")]


# A parameter for each option that users have.
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
        listed = client.schedules()
    columns = output.headings("name", "cron", "timezone", "paused", "overlap", "catchup", next_fire_at="NEXT FIRING")
    empty = "no schedules yet: `evenkeel schedules add NAME SPEC.yaml --cron '0 3 * * *'`"
    output.print_list(listed, columns, empty, as_json)


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
        listed = client.firings(name, limit)
    columns = {field: field.upper() for row in listed or [{"fire_at": ""}] for field in row}
    output.print_list(listed, columns, f"schedule {name} has not fired yet", as_json)
