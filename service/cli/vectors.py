"""CLI commands for published vectors: versions, promote, erase, readmit, fetch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import output, publication_status
from service.cli.output import CommandError, JsonFlag
from service.client import Client, ProblemError

if TYPE_CHECKING:
    import pyarrow as pa

Collection = Annotated[str, typer.Argument(metavar="COLLECTION")]


def register(app: typer.Typer) -> None:
    app.command()(versions)
    app.command()(promote)
    app.command()(erase)
    app.command()(readmit)
    app.command()(fetch)


def versions(collection: Collection, as_json: JsonFlag = False) -> None:
    """List a collection's versions, newest first, with the gate's verdicts."""
    with Client() as client:
        listed = client.versions(collection)
        shown = client.collection(collection)
    current, held = shown.get("current"), shown.get("held") or {}

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        mark = "*" if one["version"] == current else ""
        summary = (one.get("diagnosis") or {}).get("summary") if one["state"] == "held" else None
        why = summary or "; ".join(one.get("reasons") or ())
        return {**one, "current": mark, "compared": publication_status.compared(one), "why": why}

    columns = {"current": ""} | output.headings(
        "version",
        "state",
        "parent",
        "rows",
        "dim",
        "carried",
        "missing",
        "job",
        "created_at",
        compared="MODEL (SERVED)",
        why="HELD BECAUSE",
    )
    output.print_list(listed, columns, f"no versions in '{collection}' yet", as_json, row)
    if held.get("in_a_row") and not as_json:
        told = f"{collection}: {publication_status.in_a_row(held['in_a_row'], held['since'])}"
        advice = (held.get("diagnosis") or {}).get("advice")
        output.note(f"{told}. {advice}" if advice else told)


def promote(
    collection: Collection,
    version: Annotated[str, typer.Argument(metavar="VERSION")],
    reason: Annotated[str, typer.Option(help="Why; kept with the version.")],
    override_gate: Annotated[
        bool, typer.Option("--override-gate", help="Publish a version that the gate held.")
    ] = False,
    if_current: Annotated[str | None, typer.Option(help="Only if this version is still the current one.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a version the current one; promoting an older one is a rollback."""
    with Client() as client:
        answer = client.promote(collection, version, reason, override_gate=override_gate, if_current=if_current)
    output.print_answer(answer, f"{collection} now serves {answer.get('version', version)}", as_json)
    if not as_json:
        publication_status.compare(answer)


def erase(
    collection: Collection,
    ids: Annotated[list[str], typer.Argument(metavar="IDS...")],
    reason: Annotated[str, typer.Option(help="Why; kept in the collection's log, in which ids are hashes.")],
    as_json: JsonFlag = False,
) -> None:
    """Remove the rows of ids from every kept version, and keep them out."""
    with Client() as client:
        answer = client.erase(collection, ids, reason)
    text = f"{collection}: {answer['rows']} rows erased from {len(answer['versions'])} versions"
    output.print_answer(answer, text, as_json)


def readmit(
    collection: Collection,
    ids: Annotated[list[str], typer.Argument(metavar="IDS...")],
    reason: Annotated[str, typer.Option(help="Why; kept in the collection's log.")],
    as_json: JsonFlag = False,
) -> None:
    """Allow erased ids to be published again, by the next run that finds them."""
    with Client() as client:
        answer = client.readmit(collection, ids, reason)
    output.print_answer(answer, f"{collection}: {answer['ids']} ids may be published again", as_json)


def fetch(
    name: Annotated[str, typer.Argument(metavar="COLLECTION|VIEW", help="A collection serves its default view.")],
    ids: Annotated[list[str], typer.Argument(metavar="IDS...")],
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    file: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to FILE.parquet or FILE.arrow instead.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fetch vectors by id."""
    if file is not None and file.suffix not in (".parquet", ".arrow"):
        raise CommandError(f"--output {file}: the ending says the format", "end it in .parquet or .arrow", output.USAGE)
    with Client() as client:
        table = _table(client, name, ids, version, dtype)
    if file is not None:
        _write(table, file)
        output.note(f"{table.num_rows} rows written to {file}")
        return
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    items = table.to_pylist()
    if as_json:
        output.print_json({"version": metadata.get("version"), "view": metadata.get("view"), "items": items})
        return
    rows = [{**item, "vector": _short(item["vector"])} for item in items]
    dim = table.schema.field("vector").type.list_size
    output.note(f"version {metadata.get('version')}, view {metadata.get('view')}, {dim} coordinates")
    output.print_table(rows, output.headings("id", "status", "vector"), "no ids")


def _table(client: Client, name: str, ids: list[str], version: str, dtype: str) -> pa.Table:
    """Fetch from the collection of this name, or from the view if the service knows no such collection."""
    try:
        return client.vectors_table(name, ids, version=version, dtype=dtype)
    except ProblemError as error:
        if error.status != 404:
            raise
        not_a_collection = error
    try:
        client.view(name)
    except ProblemError as error:
        if error.status != 404:
            raise
        raise not_a_collection from None
    return client.vectors_table(view=name, ids=ids, version=version, dtype=dtype)


def _write(table: pa.Table, file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        pq.write_table(table, file)
        return
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


def _short(vector: Any, shown: int = 6) -> str:
    if vector is None:
        return ""
    numbers = " ".join(f"{x:+.4f}" for x in vector[:shown])
    return numbers + (f" ... ({len(vector)})" if len(vector) > shown else "")
