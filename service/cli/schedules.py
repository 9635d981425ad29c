"""CLI command group for schedules."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli import job_status, output
from service.cli.output import CommandError, JsonFlag, ask
from service.client import Client

schedules = typer.Typer(help="Schedules: jobs that start at set times.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME")]


# One parameter for each option of the command.
@schedules.command("add")
def add_schedule(
    name: Name,
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC.yaml", help="The job; the date of each firing replaces `{firing_date}` in its window."
        ),
    ],
    cron: Annotated[str, typer.Option(help="Cron expression with five fields, such as '0 3 * * *'.")],
    timezone: Annotated[str, typer.Option(help="An IANA time zone.")] = "UTC",
    catchup: Annotated[
        str, typer.Option(help="Firings to make up for after an outage of the service: none, last or all.")
    ] = "none",
    overlap: Annotated[
        str,
        typer.Option(
            help="If the previous job still runs: forbid (skip this firing), queue or replace (cancel that job)."
        ),
    ] = "forbid",
    misfire_grace_seconds: Annotated[
        int, typer.Option(min=0, help="Most seconds that a firing may start late.")
    ] = 3600,
    paused: Annotated[bool, typer.Option("--paused", help="Create the schedule paused.")] = False,
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
    answer = ask(Client.add_schedule, schedule)
    text = f"schedule {name}: next firing {answer.get('next_fire_at') or 'none while paused'}"
    output.print_answer(answer, text, as_json)


@schedules.command("list")
def list_schedules(as_json: JsonFlag = False) -> None:
    """List schedules with their next firing."""
    columns = output.headings(
        "name", "cron", "timezone", "paused", "overlap", "catchup", next_fire_at="NEXT FIRING", last="LAST PUBLICATION"
    )
    empty = "no schedules yet: `evenkeel schedules add NAME SPEC.yaml --cron '0 3 * * *'`"
    listed = ask(Client.schedules)
    rows = [{**schedule, "last": job_status.status(schedule.get("last_publication") or {})} for schedule in listed]
    output.print_list(listed, columns, empty, as_json, rows)


@schedules.command("show")
def show_schedule(name: Name, as_json: JsonFlag = False) -> None:
    """Show a schedule, its job and its next five firings."""
    output.print_document(ask(Client.schedule, name), as_json)


@schedules.command("trigger")
def trigger(
    name: Name,
    date: Annotated[str | None, typer.Option(help="The firing's date, YYYY-MM-DD (default: today).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fire a schedule now."""
    answer = ask(Client.trigger, name, **({} if date is None else {"firing_date": date}))
    output.print_fields(answer, as_json)


@schedules.command("backfill")
def backfill(
    name: Name,
    first: Annotated[datetime.datetime, typer.Option("--from", formats=["%Y-%m-%d"], help="The first date.")],
    last: Annotated[datetime.datetime, typer.Option("--to", formats=["%Y-%m-%d"], help="The last date.")],
    past_held: Annotated[
        bool, typer.Option("--past-held", help="Continue after a day whose version the gate held.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fire a schedule for each date of a range in turn; each firing waits for the previous job to end.

    Stops at the first job that fails (exit 1), and at the first version that is held (exit 3).
    """
    if last < first:
        raise CommandError(f"--to {last:%Y-%m-%d} is before --from {first:%Y-%m-%d}", "", output.USAGE)
    dates = [first + datetime.timedelta(number) for number in range((last - first).days + 1)]
    done: list[dict[str, Any]] = []
    with Client() as client:
        if ((client.schedule(name)["job"]["dataset"].get("window")) or {}).get("start") != "{firing_date}":
            raise CommandError(
                f"the job of schedule {name} trains on the same rows on every date",
                'give it a window that begins at the firing date: window: {start: "{firing_date}"}',
            )
        try:
            for date in dates:
                done.append(_fired(client, name, f"{date:%Y-%m-%d}", as_json))
                if done[-1]["state"] != "succeeded" or (done[-1]["status"] == "held" and not past_held):
                    break
        finally:
            if as_json:
                output.print_json(done)
    _end_of_backfill(name, done[-1], last)


def _fired(client: Client, name: str, date: str, as_json: bool) -> dict[str, Any]:
    """Fire a schedule for a date, wait for its job, print the outcome, and return it."""
    job_id = client.trigger(name, firing_date=date)["job_id"]
    try:
        with output.job_progress() as progress:
            job = client.wait(job_id, on_update=progress.update)
    except KeyboardInterrupt:
        again = f"`evenkeel schedules backfill {name} --from {date} ...` begins with this date again"
        raise CommandError(f"stopped waiting; job {job_id} of {date} keeps running", again, 130) from None
    publication = job.get("publication") or {}
    if not as_json:
        typer.echo(f"{date}  {job_id}  {job['state']}  {job_status.status(publication)}".rstrip())
    error = (job.get("error") or {}).get("message")
    return {
        "firing_date": date,
        "job_id": job_id,
        "state": job["state"],
        "status": publication.get("status"),
        "version": publication.get("version"),
        "error": error,
    }


def _end_of_backfill(name: str, ended: Mapping[str, Any], last: datetime.datetime) -> None:
    """Exit with an error if the last job failed or its version was held; the error names the command to continue."""
    date = ended["firing_date"]
    rest = f"`evenkeel schedules backfill {name} --from {date} --to {last:%Y-%m-%d}`"
    if ended["state"] != "succeeded":
        why = f": {ended['error']}" if ended["error"] else ""
        raise CommandError(
            f"{date}: job {ended['job_id']} {ended['state']}{why}",
            f"see `evenkeel logs {ended['job_id']}`, then {rest}",
        )
    if ended["status"] == "held":
        raise CommandError(
            f"{date}: version {ended['version']} is held",
            f"`evenkeel job {ended['job_id']}` shows the reason; continue from the next date, or add --past-held",
            output.HELD,
        )


@schedules.command("pause")
def pause(name: Name) -> None:
    """Stop a schedule from firing."""
    ask(Client.change_schedule, name, paused=True)
    typer.echo(f"schedule {name} paused")


@schedules.command("resume")
def resume(name: Name) -> None:
    """Let a paused schedule fire again."""
    answer = ask(Client.change_schedule, name, paused=False)
    typer.echo(f"schedule {name} resumed: next firing {answer.get('next_fire_at')}")


@schedules.command("delete")
def delete_schedule(name: Name) -> None:
    """Delete a schedule; its jobs stay."""
    ask(Client.delete_schedule, name)
    typer.echo(f"schedule {name} deleted")


@schedules.command("firings")
def firings(name: Name, limit: Annotated[int, typer.Option(min=1)] = 20, as_json: JsonFlag = False) -> None:
    """List a schedule's firings, newest first."""
    listed = ask(Client.firings, name, limit)
    columns = {field: field.upper() for row in listed or [{"fire_at": ""}] for field in row}
    rows = [{**firing, "publication": job_status.status(firing.get("publication") or {})} for firing in listed]
    output.print_list(listed, columns, f"schedule {name} has not fired yet", as_json, rows)
