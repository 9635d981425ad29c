"""How the CLI says that a version is held: since when, why, by how much, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from service.cli import output

_FIELDS = {"metric": "METRIC", "value": "VALUE", "bound": "BOUND", "limit": "LIMIT", "times": "TIMES", "about": "ABOUT"}


def status(publication: Mapping[str, Any]) -> str:
    """Return ``held v000004 (3 in a row)``, ``published v000004 (new generation)``; empty where nothing was published."""
    if publication.get("status") in (None, "none"):
        return ""
    told = " ".join(str(publication[name]) for name in ("status", "version") if publication.get(name))
    in_a_row = publication.get("held_in_a_row") or 0
    if publication.get("released"):
        return f"{told} (new generation)"
    return f"{told} ({in_a_row} in a row)" if in_a_row > 1 else told


def in_a_row(number: int, since: str | None) -> str:
    """Return ``held 3 times in a row since TIME``."""
    return f"held {number} times in a row since {since}" if number > 1 else f"held since {since}"


def explain(told: Mapping[str, Any]) -> None:
    """Print why a publication, or a version, is held, or what of it failed where it was published all the same."""
    diagnosis, held = told.get("diagnosis"), "held" in (told.get("status"), told.get("state"))
    if told.get("held_in_a_row"):
        typer.echo(in_a_row(told["held_in_a_row"], told.get("held_since")))
    if not diagnosis:
        for reason in told.get("reasons") or ():
            typer.echo(f"held because {reason}" if held else reason)
        return
    typer.echo(f"held because: {diagnosis['summary']}" if held else diagnosis["summary"])
    if diagnosis["failed"]:
        output.print_table([_row(one) for one in diagnosis["failed"]], _FIELDS, "")
    if held:
        typer.echo(f"what to do: {diagnosis['advice']}")


def _row(failure: Mapping[str, Any]) -> dict[str, Any]:
    times = failure["times"]
    return {**failure, "bound": failure["bound"].replace("_", " "), "times": None if times is None else f"{times:.1f}"}
