"""CLI command that reproduces a paper's tables as grids of jobs (trainer.recipes)."""

from __future__ import annotations

import os
import sys

import typer


def register(app: typer.Typer) -> None:
    app.command(
        add_help_option=False,
        options_metavar="NAME [OPTIONS]",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(recipe)


def recipe(context: typer.Context) -> None:
    """Run a paper's tables here and report them beside the published figures (`evenkeel recipe --help`)."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainer.recipes.command", *context.args])
