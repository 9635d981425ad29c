"""Output of the CLI: tables or JSON on stdout, errors (what, where, remedy) on stderr, progress bars on a terminal."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.client import Client

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FAILED, USAGE, HELD = 1, 2, 3

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class CommandError(Exception):
    """A command cannot continue, for a reason that the user can fix."""

    def __init__(self, message: str, remedy: str = "", code: int = FAILED):
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code


def ask(
    call: Callable[Concatenate[Client, Arguments], Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Make one call to the service, such as ``ask(Client.job, job_id)``."""
    with Client() as client:
        return call(client, *args, **kwargs)


def out() -> Console:
    """Return a console on the current stdout (tests replace it) that never wraps piped output."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


_ROUTE = re.compile(r" \((?:GET|POST|PUT|PATCH|DELETE) /[^)]*\)")
_OVERRIDE = re.compile(r"\boverride_gate(: true)?\b")


def in_words(text: str) -> str:
    """Return a text of the service in the command line's words: options for fields, and no routes."""
    return _OVERRIDE.sub("--override-gate", _ROUTE.sub("", text))


def error(message: str, remedy: str = "") -> None:
    """Print one error on stderr."""
    message, remedy = in_words(message), in_words(remedy)
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(message)}")
    if remedy:
        console.print(f"[bold]remedy:[/] {escape(remedy)}")


def note(message: str) -> None:
    """Print a remark for people on stderr, so that a pipe from stdout receives data only."""
    Console(file=sys.stderr, highlight=False, soft_wrap=True).print(escape(message))


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2 if sys.stdout.isatty() else None, default=str) + "\n")


def print_document(value: Any, as_json: bool) -> None:
    """Print a nested answer of the service, as JSON or as YAML."""
    if as_json:
        print_json(value)
    else:
        import yaml

        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def headings(*fields: str, **others: str) -> dict[str, str]:
    """Map each field to its column's heading: ``fields`` in capitals without ``_at``, ``others`` as given."""
    return {field: field.removesuffix("_at").upper() for field in fields} | others


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], empty: str) -> None:
    """Print rows as a table on a terminal, otherwise as tab-separated lines without colour.

    ``columns`` maps each field to its heading; ``empty`` is printed on a terminal if there are no rows.
    """
    if not sys.stdout.isatty():
        sys.stdout.write("\t".join(columns.values()) + "\n")
        for row in rows:
            sys.stdout.write("\t".join(cell(row.get(field)) for field in columns) + "\n")
        return
    if not rows:
        out().print(escape(empty))
        return
    out().print(table(rows, columns))


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """Return rows as a table for a terminal; ``rows`` and ``columns`` are as in :func:`print_table`.

    A row whose ``bold`` is true is bold.
    """
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for field, heading in columns.items():
        drawn.add_column(heading, overflow="fold", no_wrap=field in _WHOLE)
    for row in rows:
        cells = (cell(row.get(field)) for field in columns)
        texts = (_minute(text) if field.endswith("_at") else text for field, text in zip(columns, cells, strict=True))
        style = "bold" if row.get("bold") else None
        drawn.add_row(*(_coloured(field, text) for field, text in zip(columns, texts, strict=True)), style=style)
    return drawn


_WHOLE = frozenset({"id", "job", "version", "current"})
"""Columns that are never wrapped, because their values are copied."""


def _minute(time: str) -> str:
    """Return an ISO time without its seconds, in UTC: ``2026-11-30 09:05Z``; another text unchanged."""
    try:
        at = datetime.datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%MZ}" if at.tzinfo else time


def print_list(
    items: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    empty: str,
    as_json: bool,
    rows: Iterable[Mapping[str, Any]] | None = None,
) -> None:
    """Print the items of a list: all their fields as JSON, or a table of ``rows`` (default: the items)."""
    if as_json:
        print_json(items)
    else:
        print_table(items if rows is None else list(rows), columns, empty)


def print_answer(answer: Any, text: str, as_json: bool) -> None:
    """Print an answer of the service as JSON, or print ``text`` instead."""
    if as_json:
        print_json(answer)
    else:
        typer.echo(text)


def print_with_note(answer: Any, field: str, remark: str, as_json: bool) -> None:
    """Print an answer as JSON, or print its field ``field`` on stdout for pipes and ``remark`` on stderr for people."""
    print_answer(answer, answer[field], as_json)
    if not as_json:
        note(remark)


def print_fields(fields: Mapping[str, Any], as_json: bool = False) -> None:
    """Print fields as JSON, or as lines ``name: value`` that leave out absent values."""
    if as_json:
        print_json(fields)
        return
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        if value not in (None, "", [], {}):
            sys.stdout.write(f"{name:<{width}}  {cell(value)}\n")


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value:.6g}"
        return f"{Decimal(text):f}" if 1e-9 <= abs(value) < 1e15 else text
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={cell(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return str(value)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 row`` or ``2,500 rows``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def size(num_bytes: float) -> str:
    """Format a number of bytes in decimal units, such as ``1.7 GB``."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    power = min(int(math.log10(num_bytes) / 3), 4)
    return f"{num_bytes / 1000**power:.1f} {('', 'kB', 'MB', 'GB', 'TB')[power]}"


_COLOURS = {
    **dict.fromkeys(("succeeded", "published", "ok", "found", "current"), "green"),
    **dict.fromkeys(("running", "starting", "publishing", "carried", "uncertain"), "cyan"),
    **dict.fromkeys(("failed", "fail", "missing"), "red"),
    **dict.fromkeys(("held", "warn", "cancelling", "paused"), "yellow"),
}


def _coloured(field: str, text: str) -> str:
    colour = _COLOURS.get(text) if field in ("state", "status", "verdict", "level") else None
    return f"[{colour}]{escape(text)}[/]" if colour else escape(text)


def preparation(figures: Mapping[str, Any]) -> str:
    """Describe a preparation's progress: ``reading 4,194,304 of 20,000,000 rows, 210,000 rows/s``."""
    doing = {"read": "reading", "write": "writing"}[figures["stage"]]
    of = "" if figures["total_rows"] is None else f" of {figures['total_rows']:,}"
    return f"{doing} {figures['rows']:,}{of} rows, {figures['rows_per_second']:,.0f} rows/s"


class JobProgress:
    """Displays a job's progress on stderr: a bar on a terminal, otherwise one line per change of state or epoch."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._shown: tuple[Any, ...] = ()

    def update(self, job: Mapping[str, Any]) -> None:
        progress = job.get("progress") or {}
        epoch, epochs = progress.get("epoch") or 0, progress.get("epochs") or 0
        if self._bar is None:
            shown = (job["state"], epoch)
            if shown != self._shown:
                self._shown = shown
                note(f"{job['id']}  {job['state']}" + (f"  epoch {epoch} of {epochs}" if epochs else ""))
            return
        preparing = job.get("preparation")
        if preparing:
            done, of = preparing["rows"], preparing["total_rows"]
            detail = preparation(preparing)
            self._bar.update(self._task, total=of, completed=done, state="preparing", detail=detail)
            return
        rate = progress.get("examples_per_second")
        total = progress.get("steps")
        step = progress.get("step") or 0
        done = step if total else max(epoch - 1, 0) + (1 if job["state"] in ("publishing", "succeeded") else 0)
        self._bar.update(
            self._task,
            total=total or epochs or None,
            completed=done,
            state=job["state"],
            detail=(f"epoch {epoch}/{epochs}  step {step}" if epochs else "")
            + (f"  {rate:,.0f} examples/s" if rate else ""),
        )


@contextlib.contextmanager
def job_progress() -> Iterator[JobProgress]:
    shown = JobProgress()
    if not sys.stderr.isatty():
        yield shown
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[state]}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        shown._bar = bar
        shown._task = bar.add_task("", state="queued", detail="")
        yield shown
