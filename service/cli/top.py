"""``evenkeel top``: a screen that follows running jobs, waiting jobs and held versions."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from service.cli import job_status, output
from service.client import Client, ServiceError

ACTIVE = ("running", "publishing", "cancelling", "starting", "queued")
MAX_ENDED = 5
ACTIVE_COLUMNS = output.headings(
    "name", "state", "progress", examples_per_second="EXAMPLES/S", auc="AUC", since="SINCE"
)
ENDED_COLUMNS = output.headings("name", "state", "auc", "publication", finished_at="ENDED")
HELD_COLUMNS = output.headings("name", current="SERVED", held="HELD", since="SINCE")


class Picture(NamedTuple):
    """Rows of the screen: jobs that have not ended, the jobs that ended last, and collections with held versions."""

    active: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    held: list[dict[str, Any]]


def top(seconds: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two updates.")] = 2.0) -> None:
    """Show jobs and held versions on the full screen until Ctrl-C; without a terminal, print them once."""
    with Client() as client:
        if not sys.stdout.isatty():
            _print(picture(client))
            return
        console = output.out()
        # Ask once before taking the screen: a wrong address or key is then an ordinary error.
        first = _drawn(client, picture(client))
        with (
            _interruption() as interrupted_by_user,
            Live(first, console=console, screen=True, auto_refresh=False) as screen,
        ):
            while not interrupted_by_user.wait(seconds):
                try:
                    screen.update(_drawn(client, picture(client)), refresh=True)
                except ServiceError as error:
                    screen.update(Text(f"{error}: trying again in {seconds:g} seconds"), refresh=True)


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets during the ``with`` block; a second Ctrl-C interrupts as usual.

    By default Ctrl-C raises an exception, which is lost if a destructor or callback is running at that moment.
    """
    interrupted = threading.Event()

    def tell(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, tell)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def picture(client: Client) -> Picture:
    """Return the service's current state."""
    active = [job for state in ACTIVE for job in client.jobs(state=state)]
    ended = [job for job in client.jobs(limit=MAX_ENDED + len(active)) if job["state"] not in ACTIVE][:MAX_ENDED]
    held = [collection for collection in client.collections() if collection["held"]["in_a_row"]]
    return Picture(list(map(_active, active)), list(map(job_status.row, ended)), list(map(_held, held)))


def _active(job: Mapping[str, Any]) -> dict[str, Any]:
    rate = (job.get("progress") or {}).get("examples_per_second")
    return {
        **job_status.row(job),
        "progress": job.get("reason") or job_status.progress(job),
        "examples_per_second": "" if rate is None else f"{rate:,.0f}",
        "since": job.get("started_at") or job["created_at"],
    }


def _held(collection: Mapping[str, Any]) -> dict[str, Any]:
    held = collection["held"]
    return {
        "name": collection["name"],
        "current": collection["current"],
        "held": f"{held['versions'][-1]} ({held['in_a_row']} in a row)",
        "since": held["since"],
    }


def _parts(shown: Picture) -> list[tuple[str, list[dict[str, Any]], dict[str, str]]]:
    return [
        ("Running and waiting", shown.active, ACTIVE_COLUMNS),
        ("Held", shown.held, HELD_COLUMNS),
        ("Recently finished", shown.ended, ENDED_COLUMNS),
    ]


def _print(shown: Picture) -> None:
    for heading, rows, columns in _parts(shown):
        if rows:
            typer.echo(heading)
            output.print_table(rows, columns, "")


def _drawn(client: Client, shown: Picture) -> Group:
    now = datetime.now(UTC).strftime("%H:%M:%S")
    parts: list[Any] = [Text.from_markup(f"[bold]evenkeel[/]  {escape(client.url)}  {now} UTC  Ctrl-C ends")]
    for heading, rows, columns in _parts(shown):
        parts.append(Text(f"\n{heading}", style="bold"))
        parts.append(output.table(rows, columns) if rows else Text("none", style="dim"))
    return Group(*parts)
