"""CLI command of a search over hyperparameters (trainer.search), and the refusal of a command that is gone."""

from __future__ import annotations

import os
import sys

import typer


def register(app: typer.Typer) -> None:
    options = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(
        add_help_option=False, options_metavar="SPEC.yaml SEARCH.yaml [OPTIONS]", context_settings=options
    )(search)  # fmt: skip
    app.command(add_help_option=False, hidden=True, context_settings=options)(recipe)


def search(context: typer.Context) -> None:
    """Search hyperparameters of a job here, by trials on the same rows (`evenkeel search --help` shows the options)."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainer.search.command", *context.args])


def recipe() -> None:
    """Refuse: the papers' tables left the package."""
    typer.echo("evenkeel recipe is gone: in a checkout of the sources, run python -m benchmarks.papers NAME", err=True)
    raise typer.Exit(2)
