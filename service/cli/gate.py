"""CLI commands for the gate: canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli import output
from service.cli.output import JsonFlag
from service.client import Client

Collection = Annotated[str, typer.Argument(metavar="COLLECTION")]
canaries = typer.Typer(help="Canaries: frozen consumers that read every candidate first.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(canaries, name="canaries")


@canaries.command("add")
def add_canary(
    collection: Collection,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    labels: Annotated[str, typer.Argument(metavar="LABELS.parquet", help="Columns id and label.")],
    as_json: JsonFlag = False,
) -> None:
    """Fit a frozen consumer on the current version; it is evaluated on every candidate from now on."""
    with Client() as client:
        here = client.is_local and "://" not in labels and Path(labels).exists()
        (answer,) = client.add_canary(collection, name, str(Path(labels).absolute()) if here else labels)["items"]
    text = (
        f"canary {name}: {answer['num_items']} items, {len(answer['classes'])} classes, "
        f"accuracy {answer['accuracy']:.3f} (most frequent class {answer['majority']:.3f})"
    )
    output.print_answer(answer, text, as_json)


@canaries.command("list")
def list_canaries(collection: Collection, as_json: JsonFlag = False) -> None:
    """List a collection's canaries."""
    with Client() as client:
        listed = client.canaries(collection)
    columns = {
        "name": "NAME", "version": "FITTED ON", "anchor_generation": "GENERATION", "num_items": "ITEMS",
        "classes": "CLASSES", "accuracy": "ACCURACY", "created_at": "CREATED",
    }  # fmt: skip
    empty = f"'{collection}' has no canary: `evenkeel canaries add` makes one"
    output.print_list(listed, columns, empty, as_json, lambda one: {**one, "classes": len(one["classes"])})


@canaries.command("delete")
def delete_canary(collection: Collection, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete a canary."""
    with Client() as client:
        client.delete_canary(collection, name)
    typer.echo(f"canary {name} removed")
