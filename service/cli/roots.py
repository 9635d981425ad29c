"""CLI command group for data roots that are added while the service runs. The group contacts no service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import output
from service.cli.output import USAGE, CommandError, JsonFlag

if TYPE_CHECKING:
    from service.core.settings import Settings

roots = typer.Typer(
    help="Folders that datasets may use besides EVENKEEL_DATA_ROOTS. Run it on the service's machine; "
    "the service sees the change at once.",
    no_args_is_help=True,
)

Directory = Annotated[Path, typer.Argument(metavar="DIR")]


@roots.command("add")
def add_root(directory: Directory) -> None:
    """Let datasets use the files below a folder."""
    from service.core import added_roots

    settings, real = _settings(), Path(os.path.realpath(directory))
    if not real.is_dir():
        raise CommandError(f"{directory}: no such folder", "name the folder that holds the files of rows", USAGE)
    if any(real.is_relative_to(private) for private in settings.private) or "\n" in str(real):
        raise CommandError(f"{real} cannot be a data root", "name a folder outside the service's own files", USAGE)
    added = added_roots.read(settings.home)
    if real not in added:
        added_roots.write(settings.home, (*added, real))
    typer.echo(f"the service of {settings.home} reads rows below {real}")


@roots.command("remove")
def remove_root(directory: Directory) -> None:
    """Withdraw a folder that was added; jobs that run continue."""
    from service.core import added_roots

    settings, real = _settings(), Path(os.path.realpath(directory))
    added = added_roots.read(settings.home)
    if real not in added:
        raise CommandError(f"{real} was not added", "`evenkeel roots list` shows those that were", USAGE)
    added_roots.write(settings.home, (root for root in added if root != real))
    typer.echo(f"{real} removed")


@roots.command("list")
def list_roots(as_json: JsonFlag = False) -> None:
    """List the folders that were added."""
    from service.core import added_roots

    listed = [{"path": str(root)} for root in added_roots.read(_settings().home)]
    output.print_list(listed, output.headings("path"), "none were added to EVENKEEL_DATA_ROOTS", as_json)


def _settings() -> Settings:
    from service.cli.serve import read_settings

    settings = read_settings()
    if not settings.home.is_dir():
        raise CommandError(f"{settings.home}: there is no such home", "set EVENKEEL_HOME to the service's", USAGE)
    return settings
