"""CLI command that writes a version of a store to a file for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag


def register(app: typer.Typer) -> None:
    app.command("export-vectors")(export_vectors)


def export_vectors(
    collection: Annotated[str, typer.Argument(metavar="COLLECTION")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .parquet, .safetensors, .usearch or .faiss.")],
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    view: Annotated[str | None, typer.Option(help="Its features instead of the item vectors.")] = None,
    store: Annotated[
        str | None, typer.Option(help="The store (default: EVENKEEL_STORE_URL, else EVENKEEL_HOME/store).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write all vectors of a version to a file: read from the store itself, without a service."""
    from embeddings.store import StoreError, open_store, vector_files

    home = os.environ.get("EVENKEEL_HOME", ".evenkeel")
    url = store or os.environ.get("EVENKEEL_STORE_URL") or str(Path(home, "store"))
    try:
        exported = vector_files.export_vectors(open_store(url).collection(collection), file, version=version, view=view)
    except (ValueError, ImportError, StoreError, KeyError) as error:
        raise CommandError(str(error), "see `evenkeel export-vectors --help`") from None
    except OSError as error:
        raise CommandError(
            f"{file}: {error.strerror or error}", "name a file in a folder that can be written"
        ) from None
    answer = {"collection": collection, "file": str(file), **exported._asdict()}
    text = f"{exported.num_rows} vectors of {collection} {exported.version} written to {file}"
    output.print_answer(answer, text, as_json)
